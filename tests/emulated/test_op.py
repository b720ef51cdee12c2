"""dash::sdpa_backward: its contract, and its bits against the eager reference where only the sums over tiles round."""

from dataclasses import dataclass

import pytest
import torch
from attention import OP, TILE, compiled, error, exact, normal

import dash_inductor
from dash_inductor import enabled
from dash_inductor.emulation import emulate
from dash_inductor.reference import planned
from dash_inductor.schedule import Geometry, Order, Plan, place_heads

pytestmark = pytest.mark.usefixtures("rewriting")

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
FULL, CAUSAL = "full", "causal"


@dataclass(frozen=True)
class Backward:
    """A schedule with the order of every sum reversed."""

    forward: Order

    @property
    def geometry(self):
        return self.forward.geometry

    def visits(self, j):
        return self.forward.visits(j)[::-1]

    def rank(self, i, j):
        return len(self.geometry.contributors(i)) - 1 - self.forward.rank(i, j)


@dataclass(frozen=True)
class Backwards:
    """A plan whose schedules are reversed."""

    forward: Plan

    def order_of(self, head):
        return Backward(self.forward.order_of(head))


def equal(actual, expected):
    return [torch.equal(a, e) for a, e in zip(actual, expected, strict=True)]


@pytest.mark.parametrize(
    ("settings", "mask", "sizes", "sms", "placed"),
    [
        # sizes: batch, heads, kv heads, S_q, S_k, D; placed: family, roles, heads in flight
        ({"schedule": "ascending"}, FULL, (1, 2, 2, 64, 160, 16), 6, ("ascending", 3, 2)),
        ({"schedule": "ascending"}, FULL, (2, 1, 1, 53, 130, 24), 3, ("ascending", 3, 1)),
        ({"schedule": "ascending"}, CAUSAL, (1, 2, 2, 100, 100, 16), 4, ("ascending", 4, 1)),
        ({"schedule": "descending"}, FULL, (1, 4, 2, 40, 140, 16), 4, ("descending", 2, 2)),
        ({"schedule": "descending"}, CAUSAL, (1, 2, 2, 128, 128, 16), 4, ("descending", 2, 2)),
        ({"schedule": "descending"}, CAUSAL, (1, 6, 2, 130, 130, 16), 1, ("descending", 1, 1)),
        ({"schedule": "shift"}, FULL, (1, 2, 2, 96, 160, 16), 6, ("shift", 5, 1)),
        ({"schedule": "shift"}, FULL, (1, 3, 1, 70, 180, 40), 4, ("shift", 3, 1)),
        ({"schedule": "shift"}, FULL, (2, 1, 1, 40, 130, 16), 4, ("shift", 2, 2)),
        ({"schedule": "symmetric"}, CAUSAL, (1, 2, 2, 128, 128, 16), 4, ("symmetric", 2, 2)),
        ({"schedule": "symmetric"}, CAUSAL, (1, 4, 2, 150, 150, 16), 2, ("symmetric", 1, 2)),
        ({"schedule": "symmetric"}, CAUSAL, (1, 1, 1, 220, 220, 16), 3, ("symmetric", 2, 1)),
        ({"schedule": "shift_round_robin"}, FULL, (1, 3, 3, 96, 160, 16), 6, ("shift_round_robin", 6, 1)),
        ({"schedule": "shift_round_robin"}, FULL, (2, 2, 1, 70, 180, 40), 4, ("shift_round_robin", 4, 1)),
        ({"schedule": "shift_round_robin"}, FULL, (1, 3, 3, 33, 130, 16), 7, ("shift_round_robin", 3, 1)),
        ({"schedule": "symmetric_round_robin"}, CAUSAL, (1, 3, 3, 180, 180, 16), 5, ("symmetric_round_robin", 5, 1)),
        ({"schedule": "symmetric_round_robin"}, CAUSAL, (1, 6, 3, 150, 150, 16), 4, ("symmetric_round_robin", 4, 1)),
        ({"schedule": "symmetric_round_robin"}, CAUSAL, (2, 1, 1, 300, 300, 16), 2, ("symmetric_round_robin", 2, 1)),
        ({"schedule": "searched"}, FULL, (1, 2, 2, 64, 160, 16), 6, ("searched", 5, 1)),
        ({"schedule": "searched"}, FULL, (2, 3, 3, 70, 180, 40), 5, ("searched", 2, 2)),
        ({"schedule": "searched"}, CAUSAL, (1, 4, 2, 150, 150, 16), 6, ("searched", 3, 2)),
        ({"schedule": "searched"}, CAUSAL, (2, 6, 2, 100, 100, 16), 4, ("searched", 2, 2)),
        ({"launch": "chained"}, FULL, (1, 2, 2, 53, 130, 16), 6, ("ascending", 5, 2)),
        ({"launch": "chained"}, CAUSAL, (1, 4, 2, 100, 100, 16), 6, ("descending", 4, 2)),
        ({}, FULL, (1, 2, 2, 96, 130, 128), 6, ("shift", 3, 2)),
        ({}, CAUSAL, (1, 2, 2, 128, 128, 64), 6, ("descending", 3, 2)),
        ({"guarantee": "device"}, CAUSAL, (1, 2, 2, 128, 128, 16), 6, ("descending", 3, 2)),
    ],
)
def test_bits_are_those_of_the_reference(settings, mask, sizes, sms, placed):
    batch, heads, kv_heads, q_len, kv_len, head_dim = sizes
    args = exact(batch, heads, q_len, kv_len, head_dim, kv_heads=kv_heads)
    kwargs = {"mask": mask, "scale": 0.25}
    with enabled(**settings), emulate(seed=q_len, sms=sms):
        actual = compiled(lambda *args: OP(*args, **kwargs))(*args)
        expected = OP(*args, **kwargs)
    decision = dash_inductor.decisions()[-1]
    assert (decision.family, decision.roles, decision.heads_in_flight) == placed
    assert equal(actual, expected) == [True] * 3

    # Sharp: the reversed sums have other bits.
    geometry = Geometry(q_len, kv_len, TILE.block_m, TILE.block_n, mask)
    plan = place_heads(decision.family, geometry, decision.roles, heads=batch * kv_heads, heads_in_flight=decision.heads_in_flight)
    assert equal(planned(*args, Backwards(plan), 0.25), expected) == [False] * 3


@pytest.mark.parametrize(("dtype", "exponent"), [(BF16, 12), (FP16, 4)])
@pytest.mark.parametrize("mask", [FULL, CAUSAL])
def test_bits_in_half_precision(dtype, exponent, mask):
    args = exact(1, 2, 128, 128, 16, dtype=dtype, exponent=exponent)
    with emulate():
        actual = compiled(lambda *args: OP(*args, mask=mask, scale=2**-6))(*args)
        assert equal(actual, OP(*args, mask=mask, scale=2**-6)) == [True] * 3
    assert all(grad.isfinite().all() for grad in actual)


def arguments(batch, heads, q_len, kv_len, head_dim, kv_heads=None, dtype=FP32):
    """Random tensors of the right shapes; lse is large, so that P is small."""
    kv_heads = kv_heads or heads
    shapes = [(heads, q_len), (heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len), (heads, q_len)]
    tensors = [normal(batch, *shape, head_dim, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]
    return [*tensors, normal(batch, heads, q_len) + 5]


def permuted(tensors):
    """[B, S, H, D] in memory, lse [B, S, H]."""
    return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]


def columns(tensors):
    """The last stride is not 1."""
    return [x.mT.contiguous().mT for x in tensors]


def expanded(tensors):
    """Stride 0 over batch elements, and over heads of grad_out."""
    grad_out, *others = (x[:1].expand(3, *x.shape[1:]) for x in tensors)
    return [grad_out[:, :1].expand(grad_out.shape), *others]


def padded(tensors):
    """Rows of an odd pitch that start at an odd element."""
    return [torch.nn.functional.pad(x, (1, 4))[..., 1:-4] for x in tensors]


def unchanged(tensors):
    return tensors


LAYOUTS = [unchanged, permuted, columns, expanded, padded]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    """Values do not depend on strides, and the strides of eager, fake and compiled gradients are the same."""
    plain = arguments(1, 2, 50, 50, 24)
    args = layout(plain)
    with emulate():
        actual = compiled(lambda *args: OP(*args, mask=CAUSAL))(*args)
        eager = OP(*args, mask=CAUSAL)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = OP(*(mode.from_tensor(x) for x in args), mask=CAUSAL)
    contiguous = OP(*(x.contiguous() for x in args), mask=CAUSAL)
    for grad, real, meta, same, x in zip(actual, eager, fake, contiguous, args[1:4], strict=True):
        assert real.shape == x.shape
        assert grad.shape == real.shape == meta.shape
        assert grad.stride() == real.stride() == meta.stride()
        assert grad.dtype == real.dtype == meta.dtype == x.dtype
        assert error(grad, real) < 1e-6
        assert error(grad, same) < 1e-6


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (arguments(1, 2, 40, 70, 16), {"mask": FULL}),
        (arguments(2, 4, 40, 40, 24, kv_heads=2, dtype=BF16), {"mask": CAUSAL, "scale": 0.5}),
        (permuted(arguments(1, 2, 40, 40, 16, dtype=FP16)), {"mask": CAUSAL}),
        (expanded(arguments(1, 2, 20, 20, 16)), {"mask": FULL}),
        (columns(arguments(1, 1, 1, 33, 128)), {"mask": FULL}),
    ],
)
def test_opcheck(args, kwargs):
    torch.library.opcheck(OP.default, tuple(args), kwargs)


GRAD_OUT, QUERY, KEY, VALUE, OUT, LSE = range(6)


@pytest.mark.parametrize(
    ("position", "wrong", "message"),
    [
        (QUERY, torch.zeros(1, 2, 40), "query (1, 2, 40) is not"),
        (KEY, torch.zeros(1, 2, 0, 16), "key (1, 2, 0, 16) is not"),
        (KEY, torch.zeros(2, 2, 40, 16), "key (2, 2, 40, 16) must be (1, 2, 40, 16)"),
        (VALUE, torch.zeros(1, 2, 41, 16), "value (1, 2, 41, 16) must be (1, 2, 40, 16)"),
        (OUT, torch.zeros(1, 2, 40, 8), "out (1, 2, 40, 8) must be (1, 2, 40, 16)"),
        (GRAD_OUT, torch.zeros(1, 2, 39, 16), "grad_out (1, 2, 39, 16) must be (1, 2, 40, 16)"),
        (GRAD_OUT, torch.zeros(1, 2, 40, 16, dtype=BF16), "grad_out is torch.bfloat16"),
        (LSE, torch.zeros(1, 2, 40, 1), "logsumexp (1, 2, 40, 1) must be (1, 2, 40)"),
        (LSE, torch.zeros(1, 2, 40, dtype=FP16), "logsumexp is torch.float16"),
    ],
)
def test_bad_tensors(position, wrong, message):
    args = arguments(1, 2, 40, 40, 16)
    args[position] = wrong
    with pytest.raises(ValueError) as raised:
        OP(*args, mask=FULL)
    assert str(raised.value).startswith(message)
    with pytest.raises(ValueError) as raised, torch._subclasses.FakeTensorMode() as mode:
        OP(*(mode.from_tensor(x) for x in args), mask=FULL)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (arguments(1, 2, 40, 40, 16), {"mask": "diagonal"}, "mask='diagonal' is not one of full, causal, blocks"),
        (arguments(1, 2, 40, 40, 16), {"mask": FULL, "blocks": torch.zeros(1)}, "blocks must be None"),
        (arguments(1, 2, 40, 41, 16), {"mask": CAUSAL}, "causal with S_q=40 and S_k=41"),
        (arguments(1, 3, 40, 40, 16, kv_heads=2), {"mask": FULL}, "kv heads (2, 2) do not divide the query heads (3)"),
        (arguments(1, 2, 40, 40, 8), {"mask": FULL}, "head dim 8 is outside 16..256"),
        (arguments(1, 2, 40, 40, 264), {"mask": FULL}, "head dim 264 is outside 16..256"),
        (arguments(1, 2, 40, 40, 16, dtype=torch.float64), {"mask": FULL}, "dtype torch.float64 is not one of bf16"),
    ],
)
def test_bad_arguments(args, kwargs, message):
    with pytest.raises(ValueError) as raised:
        OP(*args, **kwargs)
    assert str(raised.value).startswith(message)
