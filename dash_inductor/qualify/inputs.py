"""Inputs of one shape, and the right gradients of a part of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .mods import alibi_slopes, mask_mod
from .shapes import Shape

NAMES = ("dq", "dk", "dv")
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}  # torch's names
ROWS = 1024  # of the score matrix at a time in the reference


@dataclass(frozen=True)
class Inputs:
    """query, key, value that want gradients, and grad_out: [B, H, S, D] views of [B, S, H, D] tensors, as models have them."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value


def random_inputs(shape: Shape, device: str, dtype: torch.dtype | None = None, seed: int = 0) -> Inputs:
    """All N(0, 1), of the shape's dtype if no other is given."""
    dtype = getattr(torch, DTYPES[shape.dtype]) if dtype is None else dtype
    generator = torch.Generator(device).manual_seed(seed)

    def normal(heads: int) -> Tensor:
        size = (shape.batch, shape.length, heads, shape.head_dim)
        return torch.randn(size, generator=generator, device=device, dtype=dtype).transpose(1, 2)

    query, key, value = (normal(heads).requires_grad_() for heads in (shape.heads, shape.kv_heads, shape.kv_heads))
    return Inputs(query, key, value, normal(shape.heads))


@dataclass(frozen=True)
class Reference:
    """The gradients of a few (batch, kv head) pairs: query heads of the pair's group, the pair's key and value."""

    grads: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]]

    @classmethod
    def of(cls, shape: Shape, inputs: Inputs, dtype: torch.dtype) -> Reference:
        """The gradients of the first pair and the last, computed in `dtype`."""
        pairs = sorted({(0, 0), (shape.batch - 1, shape.kv_heads - 1)})
        return cls({pair: _gradients(shape, inputs, *pair, dtype) for pair in pairs})

    def errors(self, grads: tuple[Tensor, ...]) -> dict[str, float]:
        """|x - ref| / |ref| of dq, dk and dv (Frobenius norms), the worst pair's; NaN where x has any."""
        worst = {}
        for n, name in enumerate(NAMES):
            errors = []
            for (z, h), expected in self.grads.items():
                group = expected[0].shape[0] if n == 0 else 1
                part = grads[n][z, h * group : (h + 1) * group].to(expected[n].dtype)
                errors.append(torch.linalg.vector_norm(part - expected[n]) / torch.linalg.vector_norm(expected[n]))
            worst[name] = torch.stack(errors).max().item()
        return worst


def _gradients(shape: Shape, inputs: Inputs, z: int, h: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """dq [group, S, D], dk and dv [1, S, D] of kv head h of batch z, by the formulas, some rows of scores at a time."""
    group = shape.heads // shape.kv_heads
    heads = slice(h * group, (h + 1) * group)
    q, do = (x[z, heads].detach().to(dtype) for x in (inputs.query, inputs.grad_out))
    k, v = (x[z, h].detach().to(dtype) for x in (inputs.key, inputs.value))
    scale = 1 / math.sqrt(shape.head_dim)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    columns, sees, cap = torch.arange(shape.length, device=q.device), mask_mod(shape, q.device), shape.softcap
    slopes = alibi_slopes(shape).to(k) if shape.alibi else k.new_zeros(shape.heads)
    for g in range(group):
        for start in range(0, shape.length, ROWS):
            rows = slice(start, min(start + ROWS, shape.length))
            scores = q[g, rows] @ k.mT * scale
            slope = scores.new_ones(()) if cap is None else 1 / torch.cosh(scores / cap) ** 2
            scores = scores if cap is None else cap * torch.tanh(scores / cap)
            scores = scores + slopes[h * group + g] * (columns - columns[rows, None])
            if sees is not None:
                scores = scores.masked_fill(~sees(columns, columns, columns[rows, None], columns), -math.inf)
            p = torch.softmax(scores, -1)
            dp = do[g, rows] @ v.mT
            ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * slope
            dq[g, rows] = ds @ k * scale
            dk += ds.mT @ q[g, rows] * scale
            dv += p.mT @ do[g, rows]
    return dq, dk[None], dv[None]
