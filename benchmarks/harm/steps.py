"""Parts of a model, compiled with torch's caches on, twice: the second time everything comes out of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .case import Case


def mlp(x: Tensor, weight: Tensor) -> Tensor:
    return F.gelu(x @ weight) @ weight.mT


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:]) @ weight


def sdpa(x: Tensor, weight: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x @ weight, x, x)


def causal_sdpa(x: Tensor, weight: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x @ weight, x, x, is_causal=True)


def by_hand(x: Tensor, weight: Tensor) -> Tensor:
    return ((x @ weight) @ x.mT * 0.25).softmax(-1) @ x


def masked(x: Tensor, weight: Tensor) -> Tensor:
    mask = torch.ones(x.shape[2], x.shape[2], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(x @ weight, x, x, attn_mask=mask)


def dropped(x: Tensor, weight: Tensor) -> Tensor:
    return F.dropout(F.scaled_dot_product_attention(x @ weight, x, x, dropout_p=0.2), 0.2)


STEPS: tuple[Callable[..., Tensor], ...] = (mlp, normed, sdpa, causal_sdpa, by_hand, masked, dropped)


def steps() -> Iterator[Case]:
    """Each forward and backward, in fp32 and bf16."""
    for function in STEPS:
        for dtype in (torch.float32, torch.bfloat16):
            yield Case(f"{function.__name__} {str(dtype).removeprefix('torch.')}", partial(_made, function, dtype))


def _made(function: Callable[..., Tensor], dtype: torch.dtype) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return function, tuple(torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((2, 2, 32, 16), (16, 16)))
