"""Dropout by the forwards of a GPU: they drop what our kernels take them to drop, and training through them is right.

Where the value is the identity, the output is the probabilities, and says what a step has dropped: then dv = out^T dO.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import test_on_gpu as on_gpu
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import dash_inductor
from dash_inductor.dropout import EFFICIENT, FLASH, Dropout
from dash_inductor.rewrite import drops

BACKENDS = {EFFICIENT: SDPBackend.EFFICIENT_ATTENTION, FLASH: SDPBackend.FLASH_ATTENTION}
HEADS, LENGTH = 4, 64  # keys, and columns of the value
ALLOWED = 2**-6  # of the largest element, in bf16
both = pytest.mark.parametrize("generator", BACKENDS)


def like(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(0, dtype=dtype, device=on_gpu.DEVICE)


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
@pytest.mark.parametrize("kind", [(False, False), (True, False), (False, True)], ids=["full", "causal", "bias"])
def test_what_is_dropped(kind, head_dim, p, dtype, generator):
    if generator == FLASH and kind[1]:
        return  # flash attention has no bias
    seen = drops.bits_seen(drops.FORWARDS[generator], Dropout(p, generator), kind, (head_dim, head_dim), like(dtype))
    assert seen is None


@both
def test_what_is_dropped_of_many(generator, monkeypatch):
    monkeypatch.setattr(drops, "SHAPES", ((3, 5, 1000, 1303), (1, 1, 4097, 640)))
    assert drops.bits_seen(drops.FORWARDS[generator], Dropout(0.3, generator), (False, False), (128, 128), like()) is None


def inputs(q_len: int = 200) -> tuple[list[Tensor], Tensor]:
    """query, key, the identity; and a gradient."""
    generator = torch.Generator().manual_seed(0)
    query, key, grad_out = (torch.randn(2, HEADS, n, LENGTH, generator=generator) for n in (q_len, LENGTH, q_len))
    value = torch.eye(LENGTH).expand(2, HEADS, LENGTH, LENGTH)
    *tensors, grad = (x.to(on_gpu.DEVICE, torch.bfloat16).contiguous() for x in (query, key, value, grad_out))
    return [x.requires_grad_() for x in tensors], grad


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, dropout_p=0.3)


def assert_right(out: Tensor, gradients: Any, tensors: list[Tensor], grad_out: Tensor) -> None:
    """Of the elements that the output shows."""
    query, key, value = (x.detach().double().requires_grad_() for x in tensors)
    weights = (query @ key.mT / LENGTH**0.5).softmax(-1)
    factors = (out != 0) * (out.double() / weights.detach())[out != 0].median()
    expected = torch.autograd.grad((weights * factors) @ value, (query, key, value), grad_out.double())
    for name, a, e in zip(("dq", "dk", "dv"), gradients, expected, strict=True):
        assert (a.double() - e).abs().max() <= ALLOWED * e.abs().max(), name


@both
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("by", ["alone", "checkpoint"])
def test_training(by, mode, generator):
    """Right at every step, CUDA graphs included; the same bits for the same seed, and others for another."""

    def step(*tensors: Tensor) -> Tensor:
        return attend(*tensors) if by == "alone" else checkpoint(attend, *tensors, use_reentrant=False)

    (tensors, grad_out), found = inputs(), []
    function: Callable[..., Tensor] = torch.compile(step, fullgraph=True, dynamic=False, mode=mode)
    with sdpa_kernel(BACKENDS[generator]):
        for seed in (1, 1, 1, 2, 1):
            torch.manual_seed(seed)
            torch.compiler.cudagraph_mark_step_begin()
            out = function(*tensors)
            gradients = [x.clone() for x in torch.autograd.grad(out, tensors, grad_out)]
            assert_right(out.clone(), gradients, tensors, grad_out)
            found.append(gradients)
    assert dash_inductor.decisions()[-1].rewritten
    *same, other, last = found
    assert all(torch.equal(a, b) for each in (*same, last) for a, b in zip(each, found[0], strict=True))
    assert not torch.equal(other[0], found[0][0])
