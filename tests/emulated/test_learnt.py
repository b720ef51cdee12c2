"""SDPA under masks of floats that are learnt: the gradient of each element is dS there, which torch sums where it was broadcast."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from attention import assert_right, compiled, error, gradients, mutate, rewritten
from flex import INTERLEAVINGS
from tensors import BF16, FP16, FP32, normal, qkv
from torch import Tensor
from torch._dynamo.utils import counters

from dash_inductor import decisions, emulation, enabled
from dash_inductor.op import captured

pytestmark = pytest.mark.usefixtures("rewriting")

BATCH, HEADS, Q_LEN, KV_LEN = 2, 2, 40, 75
EFFICIENT = "aten._scaled_dot_product_efficient_attention_backward.default"
STORE = "tl.store(pointers, tl.where(p == 0.0, 0.0, share).to(SHARE.dtype.element_ty), mask=inside)"
Mask = Callable[[Tensor], Tensor]  # of what is learnt


def attend(mask: Mask = lambda bias: bias) -> Callable[..., Tensor]:
    """SDPA of query, key, value and what is learnt."""

    def function(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask(bias).to(query.dtype))

    return function


def inputs_of(*shape: int, q_len: int = Q_LEN, head_dim: int = 16, dtype: torch.dtype = FP32) -> tuple[list[Tensor], Tensor]:
    """query, key, value and a bias; the gradient of the output."""
    *tensors, grad_out = (x.to(dtype) for x in qkv(BATCH, HEADS, q_len, KV_LEN, head_dim))
    return [*tensors, normal(*shape, seed=7).to(dtype)], grad_out


def assert_taken(actual: tuple[Tensor, ...], function: Callable[..., Tensor], inputs: list[Tensor], grad_out: Tensor) -> None:
    assert rewritten() == 1 and decisions()[-1].op == EFFICIENT and decisions()[-1].mask == "block_mask"
    assert_right(actual, function, inputs, grad_out)


def causal(bias: Tensor) -> Tensor:
    """Of the first queries; a whole block of keys is hidden from all of them."""
    return bias.masked_fill(torch.ones(bias.shape[-2:], dtype=torch.bool).triu(1), -math.inf)


def by_buckets(table: Tensor) -> Tensor:
    """T5's: a row of the table [buckets, heads] for each distance."""
    distance = (torch.arange(KV_LEN) - torch.arange(Q_LEN)[:, None]).clamp(-8, 7) + 8
    return F.embedding(distance, table).permute(2, 0, 1)[None]


def slopes(of_heads: Tensor) -> Tensor:
    """ALiBi's, learnt."""
    return of_heads[:, None, None] * (torch.arange(KV_LEN) - torch.arange(Q_LEN)[:, None])


@pytest.mark.parametrize(
    "shape",
    [
        (Q_LEN, KV_LEN),
        (HEADS, Q_LEN, KV_LEN),
        (1, HEADS, Q_LEN, KV_LEN),
        (BATCH, HEADS, Q_LEN, KV_LEN),
        (BATCH, 1, Q_LEN, KV_LEN),
        (BATCH, 1, 1, KV_LEN),
        (HEADS, 1, KV_LEN),
    ],
    ids=str,
)
def test_what_it_is_broadcast_along(shape):
    inputs, grad_out = inputs_of(*shape)
    with emulation.emulate():
        actual = gradients(compiled(attend()), inputs, grad_out)
    assert_taken(actual, attend(), inputs, grad_out)


@pytest.mark.parametrize(
    ("mask", "shape"),
    [(causal, (HEADS, Q_LEN, KV_LEN)), (by_buckets, (16, HEADS)), (torch.sigmoid, (HEADS, Q_LEN, KV_LEN))],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_it_is_made_of(mask, shape):
    inputs, grad_out = inputs_of(*shape)
    with emulation.emulate():
        actual = gradients(compiled(attend(mask)), inputs, grad_out)
    assert_taken(actual, attend(mask), inputs, grad_out)


@pytest.mark.parametrize("settings", [{}, {"template": "two_pass"}], ids=["one pass", "two passes"])
def test_keys_that_it_hides_itself(settings):
    """Nobody computes a tile of them: their gradients are zeros that were there before."""
    inputs, grad_out = inputs_of(HEADS, Q_LEN, KV_LEN)
    inputs[3][..., 20:] = -math.inf
    with enabled(**settings), emulation.emulate():
        actual = gradients(compiled(attend()), inputs, grad_out)
    assert not actual[3][..., 20:].any() and actual[3][..., :20].all()
    assert_taken(actual, attend(), inputs, grad_out)


def test_slopes():
    """A sum of thousands of products that nearly cancel out."""
    inputs, grad_out = inputs_of(HEADS)
    with emulation.emulate():
        *_, actual = gradients(compiled(attend(slopes)), inputs, grad_out)
    *_, expected = gradients(attend(slopes), [x.double() for x in inputs], grad_out.double())
    assert rewritten() == 1 and error(actual, expected) < 1e-4


@pytest.mark.parametrize(("dtype", "allowed"), [(BF16, 2**-5), (FP16, 2**-8)])
def test_half_precision(dtype, allowed):
    inputs, grad_out = inputs_of(1, HEADS, Q_LEN, KV_LEN, dtype=dtype)
    with emulation.emulate():
        actual = gradients(compiled(attend()), inputs, grad_out)
    assert rewritten() == 1
    expected = gradients(attend(), [x.double() for x in inputs], grad_out.double())
    assert all(error(a, e) <= allowed for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("settings", [{"guarantee": "device"}, {"guarantee": "batch"}, {"template": "two_pass"}], ids=str)
@pytest.mark.parametrize("warn_only", [False, True], ids=["strict", "warn_only"])
def test_levels_modes_and_templates(settings, warn_only):
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    inputs, grad_out = inputs_of(HEADS, Q_LEN, KV_LEN)
    with enabled(**settings), emulation.emulate():
        actual = gradients(compiled(attend(causal)), inputs, grad_out)
    assert_taken(actual, attend(causal), inputs, grad_out)


def test_two_passes_of_a_large_head_dim():
    inputs, grad_out = inputs_of(1, HEADS, Q_LEN, KV_LEN, head_dim=160)
    with emulation.emulate():
        actual = gradients(compiled(attend(causal)), inputs, grad_out)
    assert_taken(actual, attend(causal), inputs, grad_out)
    assert decisions()[-1].family == "two_pass"


def test_the_same_bits_in_every_interleaving():
    inputs, grad_out = inputs_of(1, HEADS, Q_LEN, KV_LEN)
    function = compiled(attend(causal))
    found = []
    for seed, resident in INTERLEAVINGS:
        with emulation.emulate(seed, resident=resident):
            found.append(gradients(function, inputs, grad_out))
    assert rewritten() == 1 and all(torch.equal(a, b) for other in found for a, b in zip(found[0], other, strict=True))


def test_dynamic_lengths():
    with emulation.emulate():
        function = compiled(attend(), dynamic=True)
        for length in (40, 33, 70):
            inputs, grad_out = inputs_of(1, HEADS, length, KV_LEN, q_len=length)
            assert_right(gradients(function, inputs, grad_out), attend(), inputs, grad_out)
    assert (counters["stats"]["unique_graphs"], rewritten()) == (1, 1)


def test_a_bias_alone_is_learnt():
    """Its gradient is right though nobody wants those of query, key and value."""
    (query, key, value, bias), grad_out = inputs_of(HEADS, Q_LEN, KV_LEN)
    leaf = bias.requires_grad_()
    with emulation.emulate():
        out = compiled(attend())(query, key, value, leaf)
        (actual,) = torch.autograd.grad(out, leaf, grad_out)
    *_, expected = gradients(attend(), [x.double() for x in (query, key, value, bias.detach())], grad_out.double())
    assert rewritten() == 1 and error(actual, expected) < 1e-6


@pytest.mark.parametrize(
    ("name", "change"),
    [("twice", ("share).to(", "2*share).to(")), ("without_a_key", ("mask=inside", "mask=inside & (offs_n[:, None] < KV_LEN - 1)"))],
)
def test_a_kernel_that_stores_something_else_is_seen(name, change, monkeypatch):
    mutate(monkeypatch, "BLOCK_MASK_ONE_PASS", f"learnt_{name}", {STORE: STORE.replace(*change)})
    inputs, grad_out = inputs_of(HEADS, Q_LEN, KV_LEN)
    with emulation.emulate():
        actual = gradients(compiled(attend()), inputs, grad_out)
    with pytest.raises(AssertionError, match="gradient 3"):
        assert_right(actual, attend(), inputs, grad_out)


def test_a_mask_of_too_many_elements(monkeypatch):
    """Its gradient would be one of as many, whatever it is broadcast from."""
    inputs, grad_out = inputs_of(HEADS, Q_LEN, KV_LEN)
    elements = BATCH * HEADS * Q_LEN * KV_LEN
    monkeypatch.setattr(captured, "MOST_ELEMENTS", elements - 1)
    with emulation.emulate():
        actual = gradients(compiled(attend()), inputs, grad_out)
    expected = f"the gradient of what is added to scores takes {elements} elements of memory, more than {elements - 1}"
    assert rewritten() == 0 and decisions()[-1].reason == expected
    assert_right(actual, attend(), inputs, grad_out)
