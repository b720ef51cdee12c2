"""FlexAttentions whose backwards are the same graph, but for what the joint graph proves of their masks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from attention import FP32_ERROR, compiled, error, gradients
from flex import Attention, causal
from tensors import qkv
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from dash_inductor import decisions, enabled
from dash_inductor.emulation import emulate

LENGTH, BLOCK = 128, 32
BLOCKS = LENGTH // BLOCK


def within(blocks: int) -> Callable[..., Tensor]:
    """Causal attention that lists no more than so many blocks before a query's own, in lists made of constants of the graph."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ones = torch.ones(1, 1, BLOCKS, BLOCKS, dtype=torch.int32)
        matrix = ones.tril().triu(-blocks)
        num, indices = matrix.sum(-1, dtype=torch.int32), matrix.argsort(descending=True, stable=True).to(torch.int32)
        mask = BlockMask.from_kv_blocks(num, indices, BLOCK_SIZE=BLOCK, mask_mod=causal, seq_lengths=(LENGTH, LENGTH))
        return flex_attention(query, key, value, block_mask=mask)

    return attend


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("order", [pytest.param((BLOCKS, 1), marks=pytest.mark.nightly), (1, BLOCKS)])
def test_a_warm_cache_knows_what_was_proven(order):
    """Lists that leave blocks out do not get the code of the whole causal mask, nor the other way round."""
    *inputs, grad_out = qkv(1, 2, LENGTH, LENGTH, 16)
    blocks = torch.arange(LENGTH) // BLOCK
    misses = []
    for most in (*order, order[0]):
        counters.clear()
        with enabled(), emulate():
            actual = gradients(compiled(within(most)), inputs, grad_out)
        listed = blocks[:, None] - blocks <= most
        expected = Attention(causal).reference([*inputs, grad_out], listed)
        assert max(error(a, e) for a, e in zip(actual, expected, strict=True)) < FP32_ERROR
        misses.append(counters["inductor"]["fxgraph_cache_miss"])
    assert misses == [2, 2, 0]
    assert [decision.mask for decision in decisions()[-3:]] == [
        "causal" if most == BLOCKS else "block_mask" for most in (*order, order[0])
    ]
    assert all(decision.rewritten for decision in decisions()[-3:])


@pytest.mark.usefixtures("deterministic")
def test_the_function_of_a_mask_is_in_the_key():
    """Of SDPA under windows of two widths, of which a warm cache answers for each with its own code."""

    def within_keys(width: int) -> Callable[..., Tensor]:
        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            position = torch.arange(LENGTH)
            distance = position[:, None] - position
            return scaled_dot_product_attention(query, key, value, attn_mask=(distance >= 0) & (distance < width))

        return attend

    *inputs, grad_out = qkv(1, 2, LENGTH, LENGTH, 16)
    misses = []
    for width in (20, 30, 20):
        counters.clear()
        with enabled(), emulate():
            actual = gradients(compiled(within_keys(width)), inputs, grad_out)
        expected = gradients(within_keys(width), [x.double() for x in inputs], grad_out.double())
        assert max(error(a, e) for a, e in zip(actual, expected, strict=True)) < FP32_ERROR
        misses.append(counters["inductor"]["fxgraph_cache_miss"])
    assert misses == [2, 2, 0]
    assert [(decision.rewritten, decision.mask) for decision in decisions()[-3:]] == [(True, "block_mask")] * 3
