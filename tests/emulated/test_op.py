"""dash::sdpa_backward: its layouts, and its bits against the eager reference where only the sums over tiles round."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from attention import GRADIENTS, OP, assert_two_passes, backward, compiled, differing, differing_when_compiled, error, last_plan
from tensors import BF16, CAUSAL, FP16, FULL, arguments, columns, exact, expanded, padded, permuted

from dash_inductor import enabled
from dash_inductor.emulation import emulate
from dash_inductor.reference import planned
from dash_inductor.schedule import Order

pytestmark = pytest.mark.usefixtures("rewriting")

TWO_PASSES = {"template": "two_pass"}


@dataclass(frozen=True)
class Backward:
    """An order with every sum reversed."""

    forward: Order

    @property
    def geometry(self):
        return self.forward.geometry

    def visits(self, j):
        return self.forward.visits(j)[::-1]

    def rank(self, i, j):
        return len(self.geometry.contributors(i)) - 1 - self.forward.rank(i, j)


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
        (TWO_PASSES, FULL, (1, 2, 2, 64, 160, 16), 6, ("two_pass", None, None)),
        (TWO_PASSES, FULL, (2, 6, 2, 53, 130, 24), 6, ("two_pass", None, None)),
        (TWO_PASSES, CAUSAL, (1, 2, 2, 128, 128, 16), 6, ("two_pass", None, None)),
        (TWO_PASSES, CAUSAL, (1, 4, 2, 150, 150, 40), 6, ("two_pass", None, None)),
        (TWO_PASSES, CAUSAL, (1, 3, 1, 130, 130, 16), 6, ("two_pass", None, None)),
        (TWO_PASSES, CAUSAL, (1, 2, 1, 100, 100, 96), 6, ("two_pass", None, None)),
        ({}, FULL, (1, 1, 1, 40, 100, 192), 6, ("two_pass", None, None)),
        ({}, CAUSAL, (1, 2, 1, 100, 100, 256), 6, ("two_pass", None, None)),
    ],
)
def test_bits_are_those_of_the_reference(settings, mask, sizes, sms, placed):
    batch, heads, kv_heads, q_len, kv_len, head_dim = sizes
    args = exact(batch, heads, q_len, kv_len, head_dim, kv_heads=kv_heads)
    specification = backward(mask, scale=0.25)
    with enabled(**settings), emulate(seed=q_len, sms=sms):
        actual, expected = compiled(specification)(*args), specification(*args)
    decision, plan = last_plan(mask, batch * kv_heads, q_len, kv_len)
    assert (decision.family, decision.roles, decision.heads_in_flight) == placed
    if decision.family == "two_pass":
        assert_two_passes()
    assert differing(actual, expected) == []

    # Sharp: the reversed sums have other bits.
    reversed_plan = SimpleNamespace(order_of=lambda head: Backward(plan.order_of(head)))
    assert differing(planned(*args, reversed_plan, 0.25), expected) == GRADIENTS


@pytest.mark.parametrize(("dtype", "exponent"), [(BF16, 12), (FP16, 4)])
@pytest.mark.parametrize("mask", [FULL, CAUSAL])
def test_bits_in_half_precision(dtype, exponent, mask):
    args = exact(1, 2, 128, 128, 16, dtype=dtype, exponent=exponent)
    specification = backward(mask, scale=2**-6)
    with emulate():
        actual = compiled(specification)(*args)
        assert differing(actual, specification(*args)) == []
    assert all(grad.isfinite().all() for grad in actual)


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 100), (100, 1), (1, 1)])
def test_bits_of_short_sequences_in_two_passes(q_len, kv_len):
    with enabled(**TWO_PASSES), emulate():
        assert differing_when_compiled(backward(scale=0.25), exact(2, 2, q_len, kv_len, 16)) == []
    assert_two_passes()


@pytest.mark.parametrize("layout", [list, permuted, columns, expanded, padded])
def test_layouts(layout):
    """Values do not depend on strides, and the strides of eager, fake and compiled gradients are the same."""
    args = layout(arguments(1, 2, 50, 50, 24))
    with emulate():
        actual = compiled(backward(CAUSAL))(*args)
        eager = OP(*args, mask=CAUSAL)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = OP(*(mode.from_tensor(x) for x in args), mask=CAUSAL)
    contiguous = OP(*(x.contiguous() for x in args), mask=CAUSAL)
    for grad, real, meta, same, x in zip(actual, eager, fake, contiguous, args[1:4], strict=True):
        assert grad.shape == real.shape == meta.shape == x.shape
        assert grad.stride() == real.stride() == meta.stride()
        assert grad.dtype == real.dtype == meta.dtype == x.dtype
        assert error(grad, real) < 1e-6
        assert error(grad, same) < 1e-6


DOCUMENTS = torch.tensor([[1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]], dtype=torch.bool)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (arguments(1, 2, 40, 70), {"mask": FULL}),
        (arguments(2, 4, 40, 40, 24, kv_heads=2, dtype=BF16), {"mask": CAUSAL, "scale": 0.5}),
        (permuted(arguments(1, 2, 40, 40, dtype=FP16)), {"mask": CAUSAL}),
        (expanded(arguments(1, 2, 20, 20)), {"mask": FULL}),
        (columns(arguments(1, 1, 1, 33, 128)), {"mask": FULL}),
        (arguments(1, 2, 96, 96), {"mask": "blocks", "blocks": DOCUMENTS}),
    ],
)
def test_opcheck(args, kwargs):
    torch.library.opcheck(OP.default, tuple(args), kwargs)
