"""Attention sinks, and outputs that are merged by their logsumexps as rings do: gradients through the logsumexp, by name."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from attention import compiled, error, gradients, rewritten
from flex import INTERLEAVINGS, Attention, wide_scores
from flex import causal as causal_mod
from tensors import BF16, FP32, normal
from test_varlen import Packed
from torch import Tensor
from torch.nn.attention import varlen
from torch.nn.attention.flex_attention import AuxRequest

from dash_inductor import emulation

pytestmark = pytest.mark.usefixtures("rewriting")

NAMES = ["query", "key", "value", "sink"]
ERRORS = {FP32: 2**-17, BF16: 2e-2}
Function = Callable[..., Tensor]


def inputs_of(heads: int = 2, kv_heads: int = 2, dtype: torch.dtype = FP32) -> tuple[dict[str, Tensor], Tensor]:
    """Each tensor by its name, and the gradient of the output."""
    shapes = [(2, heads, 40, 16), (2, kv_heads, 40, 16), (2, kv_heads, 40, 16), (heads,)]
    tensors = {name: normal(*shape, seed=seed).to(dtype) for seed, (name, shape) in enumerate(zip(NAMES, shapes, strict=True))}
    return tensors, normal(*shapes[0], seed=9).to(dtype)


def reference(query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None = None) -> Tensor:
    """Causal; the sink is one more score of each head, which has no value."""
    scores, values = wide_scores(query, key, value, causal_mod, None)
    beside = [] if sink is None else [sink[:, None, None].expand(*scores.shape[:3], 1)]
    return torch.cat([scores, *beside], -1).softmax(-1)[..., : key.shape[2]] @ values


def assert_right(function: Function, expected: Function, inputs: dict[str, Tensor], grad_out: Tensor, attentions: int = 1) -> None:
    """Each gradient, named where it is wrong, and the same bits in every interleaving."""
    run, found = compiled(function), []
    for seed, resident in INTERLEAVINGS:
        with emulation.emulate(seed, resident=resident):
            found.append(gradients(run, [*inputs.values()], grad_out))
    right = gradients(expected, [x.double() for x in inputs.values()], grad_out.double())
    wrong = [name for name, a, e in zip(inputs, found[0], right, strict=True) if error(a, e) >= ERRORS[grad_out.dtype]]
    differ = [name for other in found[1:] for name, a, b in zip(inputs, found[0], other, strict=True) if not torch.equal(a, b)]
    assert rewritten() == attentions and (wrong, differ) == ([], [])


def by_mask(query: Tensor, key: Tensor, value: Tensor, sink: Tensor) -> Tensor:
    """SDPA with one more key and value, of zeros, and a learnt mask that adds the sink there."""
    length = key.shape[2]
    key, value = (F.pad(x, (0, 0, 0, 1)) for x in (key, value))
    hidden = torch.zeros(length, length).masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -math.inf)
    mask = torch.cat([hidden.expand(len(sink), -1, -1), sink[:, None, None].expand(-1, length, 1)], -1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask.to(query.dtype))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_a_sink_of_sdpa(dtype):
    """Its logsumexp has no gradient in torch, so a sink is a learnt mask of one more key."""
    inputs, grad_out = inputs_of(dtype=dtype)
    assert_right(by_mask, reference, inputs, grad_out)


def in_second_half(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
    """Causal, of keys from the twentieth on. The first queries see none of them."""
    return m >= n + 20


def merging() -> Function:
    """Of two halves of the keys, each attended to alone, as ranks of a ring do, merged by their logsumexps; perhaps with a sink."""
    halves = [Attention(mask, None, 40, 20, heads=4, kv_heads=2) for mask in (causal_mod, in_second_half)]
    first, second = (half.function(return_aux=AuxRequest(lse=True)) for half in halves)

    def merged(query: Tensor, key: Tensor, value: Tensor, *sink: Tensor) -> Tensor:
        parts = first(query, key[:, :, :20], value[:, :, :20]), second(query, key[:, :, 20:], value[:, :, 20:])
        beside = [x[:, None].expand_as(parts[0][1].lse) for x in sink]
        total = torch.stack([*(aux.lse for _, aux in parts), *beside]).logsumexp(0)
        return sum(out * (aux.lse - total).exp()[..., None] for out, aux in parts)

    return merged


@pytest.mark.parametrize("names", [NAMES[:3], NAMES], ids=["without a sink", "with a sink"])
def test_parts_that_are_merged(names):
    inputs, grad_out = inputs_of(heads=4)
    assert_right(merging(), reference, {name: inputs[name] for name in names}, grad_out, attentions=2)


def test_varlen_attn_has_no_gradient_through_the_logsumexp():
    """torch's own backward leaves it out, or says that there is none. Should torch mend that, the rewriting has to follow."""
    attention = Packed((20, 12), dtype=FP32)
    query, key, value, _ = attention.tensors()
    cu_q, cu_k = attention.offsets()

    def of_sums(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        options = {"window_size": (-1, 0), "return_aux": varlen.AuxRequest(lse=True)}
        return varlen.varlen_attn(query, key, value, cu_q, cu_k, 20, 20, **options)[1].sum()

    leaves = [x.requires_grad_() for x in (query, key, value)]
    with emulation.emulate():
        total = of_sums(*leaves)
        assert not total.requires_grad or not any(x.any() for x in torch.autograd.grad(total, leaves))
