"""Inputs of the tests of the kernel, their dtypes and layouts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dash_inductor.templates.tiles import tile

FULL, CAUSAL = "full", "causal"
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
TILE = tile("emulated", "fp32", 16)


def normal(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    """N(0, 1), the same values in every dtype but for rounding."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    head_dim: int,
    *,
    kv_heads: int | None = None,
    dtype: torch.dtype = FP32,
    value_dim: int | None = None,
) -> list[Tensor]:
    """query, key, value and grad_out of one attention."""
    kv_heads, value_dim = kv_heads or heads, value_dim or head_dim
    shapes = [(heads, q_len, head_dim), (kv_heads, kv_len, head_dim), (kv_heads, kv_len, value_dim), (heads, q_len, value_dim)]
    return [normal(batch, *shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]


def in_eighths(x: Tensor) -> Tensor:
    """x rounded so that sums of products of two such tensors are exact in fp32, and the same on every CPU."""
    return (x * 8).round() / 8


def permuted(tensors: Sequence[Tensor]) -> list[Tensor]:
    """[B, S, H, D] in memory, lse [B, S, H]."""
    return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]


def columns(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The last stride is not 1."""
    return [x.mT.contiguous().mT for x in tensors]


def expanded(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Stride 0 over batch elements, and over heads of grad_out."""
    grad_out, *others = (x[:1].expand(3, *x.shape[1:]) for x in tensors)
    return [grad_out[:, :1].expand(grad_out.shape), *others]


def padded(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Rows of an odd pitch that start at an odd element."""
    return [F.pad(x, (1, 4))[..., 1:-4] for x in tensors]


def arguments(
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    head_dim: int = 16,
    kv_heads: int | None = None,
    dtype: torch.dtype = FP32,
    value_dim: int | None = None,
) -> list[Tensor]:
    """Inputs of the op, N(0, 1) but for a large lse, so that P is small."""
    kv_heads, value_dim = kv_heads or heads, value_dim or head_dim
    rows, keys = (batch, heads, q_len), (batch, kv_heads, kv_len)
    shapes = [(*rows, value_dim), (*rows, head_dim), (*keys, head_dim), (*keys, value_dim), (*rows, value_dim)]
    tensors = [normal(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]
    return [*tensors, normal(batch, heads, q_len, seed=5) + 5]


def exact(
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    head_dim: int,
    *,
    kv_heads: int | None = None,
    dtype: torch.dtype = FP32,
    exponent: int = 12,
    seed: int = 0,
    blocks: tuple[int, int] = (TILE.block_m, TILE.block_n),
    value_dim: int | None = None,
) -> list[Tensor]:
    """Inputs of the op for which only the sums over tiles round, tiles being `blocks`, by default the emulated device's.

    query lives in the first half of the head dim and key in the second, and lse = 0: so P = 1. All others are small
    integers, so that |dS| <= 256. Then keys are scaled up and down by a power of two in turn from one KV tile to the next,
    and grad_out (with it rows of dS) from one Q tile to the next: the order of the sums decides the bits of dq, dk and dv.
    """
    generator = torch.Generator().manual_seed(seed)
    kv_heads, half, value_dim = kv_heads or heads, head_dim // 2, value_dim or head_dim
    largest = 2 if value_dim <= 32 else 1  # |grad_out . value| and |grad_out . out| are at most 128

    def integers(n: int, length: int, most: int, dim: int = value_dim) -> Tensor:
        return torch.randint(-most, most + 1, (batch, n, length, dim), generator=generator).float()

    def powers(length: int, block: int) -> Tensor:
        odd = torch.arange(length) // block % 2
        return 2.0 ** (exponent * (1 - 2 * odd))[:, None]

    query, key = integers(heads, q_len, 3, head_dim), integers(kv_heads, kv_len, 3, head_dim)
    query[..., half:] = 0
    key[..., :half] = 0
    key *= powers(kv_len, blocks[1])
    value, out = integers(kv_heads, kv_len, largest), integers(heads, q_len, largest)
    grad_out = integers(heads, q_len, largest) * powers(q_len, blocks[0])
    lse = torch.zeros(batch, heads, q_len)
    return [*(x.to(dtype) for x in (grad_out, query, key, value, out)), lse]
