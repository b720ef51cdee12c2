"""The memory-efficient op below SDPA's, of dense tensors [B, S, H, D], as xformers calls it. On the CPU, a stand-in does it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention import assert_right, attention, compiled, gradients, in_interleavings, rewritten
from tensors import BF16, FP16, FP32, qkv
from torch import Tensor

from dash_inductor import decisions
from dash_inductor.emulation import efficient, emulate

OP = torch.ops.aten._efficient_attention_forward
NAME = "aten._efficient_attention_backward.default"
NONE, TOP_LEFT, BOTTOM_RIGHT = range(3)


def swapped(*tensors: Tensor | None) -> list[Any]:
    return [None if x is None else x.transpose(1, 2) for x in tensors]


def forward(query: Tensor, key: Tensor, value: Tensor, bias: Any, *rest: Any, scale: Any = None) -> tuple[Any, ...]:
    *_, dropout_p, mask_type, with_logsumexp = rest
    out, *saved = efficient.forward(*swapped(query, key, value), bias, with_logsumexp, dropout_p, bool(mask_type), scale=scale)
    return out.transpose(1, 2), *saved, query.shape[1], key.shape[1]


def backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Any, out: Tensor, *rest: Any, scale: Any = None
) -> Any:
    *_, logsumexp, dropout_p, seed, offset, mask_type, bias_requires_grad = rest
    tensors, wanted = swapped(grad_out, query, key, value), [True, True, True, bias_requires_grad]
    saved = out.transpose(1, 2), logsumexp, seed, offset
    *found, of_bias = efficient.backward(*tensors, bias, *saved, dropout_p, wanted, bool(mask_type), scale=scale)
    gradients = (torch.empty_like(x).copy_(y) for x, y in zip((query, key, value), swapped(*found), strict=True))
    return *gradients, torch.empty(0) if of_bias is None else of_bias


@pytest.fixture(autouse=True)
def stand_in() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    for kernel in (forward, backward):
        library.impl(f"_efficient_attention_{kernel.__name__}", kernel, "CPU")
    yield
    library._destroy()


def attend(query: Tensor, key: Tensor, value: Tensor, mask_type: int = NONE, bias: Any = None) -> Tensor:
    """Of [B, H, S, D], which are views of [B, S, H, D]."""
    nowhere = (None,) * 4
    out, *_ = OP(*swapped(query, key, value), bias, *nowhere, 0.0, mask_type, True)
    return out.transpose(1, 2)


@pytest.mark.parametrize(
    ("sizes", "mask_type", "dtype"),
    [
        ((2, 2, 40, 72, 16), NONE, FP32),
        ((1, 2, 72, 72, 16), TOP_LEFT, BF16),
        ((1, 2, 64, 64, 32), BOTTOM_RIGHT, FP16),  # of equal lengths, so that both are one
    ],
)
def test_gradients(rewriting: None, sizes: tuple[int, ...], mask_type: int, dtype: torch.dtype) -> None:
    """Right, and the same in five interleavings. Without a scale: torch's fake of the backward takes none."""
    inputs = qkv(*sizes, dtype=dtype)[:3]
    found = in_interleavings(lambda *x: attend(*x, mask_type), inputs, interleavings=[(seed, None) for seed in range(5)])
    assert rewritten() == 1 and decisions()[-1].op == NAME and decisions()[-1].mask == ("causal" if mask_type else "full")
    assert_right(found, attention(causal=bool(mask_type)), inputs)


def test_a_mask_that_the_graph_makes(rewriting: None) -> None:
    inputs = qkv(1, 2, 40, 40, 16)[:3]

    def windowed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        m, n = torch.arange(40)[:, None], torch.arange(40)
        bias = torch.where((n <= m) & (m - n < 9), 0.0, -math.inf).expand(1, 2, 40, 40)
        return attend(query, key, value, NONE, bias)

    with emulate():
        actual = gradients(compiled(windowed), inputs)
    assert rewritten() == 1 and (decisions()[-1].op, decisions()[-1].mask) == (NAME, "block_mask")
    assert_right(actual, windowed, inputs)


def test_what_stays(rewriting: None) -> None:
    """The graph is as it was: the stand-in is called, which has no such mask."""
    with emulate():
        found = gradients(compiled(lambda *x: attend(*x, BOTTOM_RIGHT)), qkv(1, 2, 40, 72, 16)[:3])
    decision = decisions()[-1]
    assert rewritten() == 0 and "aligned to the last query and key" in (decision.reason or "") and decision.remedy
    assert (decision.shape, len(found)) == ("B=1 H=2 S=40x72 D=16 fp32", 3)
