"""FlexAttention in the tests: masks, functions of the scores, attentions of both, and their gradients in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from attention import compiled
from tensors import FP32, normal, qkv
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from dash_inductor import emulation

Mod = Callable[..., Tensor]
INTERLEAVINGS = [(0, None), (1, 1), (2, 2)]  # seed and resident CTAs; test_interleavings.py has thousands, at night


def everything(b: Any, h: Any, m: Any, n: Any) -> Any:
    return m >= 0


def causal(b: Any, h: Any, m: Any, n: Any) -> Any:
    return m >= n


def window(b: Any, h: Any, m: Any, n: Any) -> Any:
    return (m >= n) & (m - n < 40)


def in_bits(b: Any, h: Any, m: Any, n: Any) -> Any:
    """Integers in the place of truth values, of which only the second bit says anything."""
    return (m >= n).int() * 2


def two_sided(b: Any, h: Any, m: Any, n: Any) -> Any:
    return (m - n < 24) & (n - m < 40)


def documents(*lengths: int) -> Mod:
    """Each sees itself, causally."""
    ids = ids_of(*lengths)
    return lambda b, h, m, n: (m >= n) & (ids[m] == ids[n])


def ids_of(*lengths: int) -> Tensor:
    """The document of each token."""
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def documents_per_batch(*batch: Sequence[int]) -> Mod:
    """Of each batch element its own lengths; both directions."""
    ids = torch.stack([ids_of(*lengths) for lengths in batch])
    return lambda b, h, m, n: ids[b, m] == ids[b, n]


def prefix(b: Any, h: Any, m: Any, n: Any) -> Any:
    return (n < 40) | (m >= n)


def window_by_head(b: Any, h: Any, m: Any, n: Any) -> Any:
    return (m >= n) & (m - n < 8 + 24 * h)


def neighbourhood(b: Any, h: Any, m: Any, n: Any) -> Any:
    """Of a picture 12 wide, two pixels to each side."""
    return ((m // 12 - n // 12).abs() <= 2) & ((m % 12 - n % 12).abs() <= 2)


def ahead(b: Any, h: Any, m: Any, n: Any) -> Any:
    return n <= m + 30


def with_blind_rows(b: Any, h: Any, m: Any, n: Any) -> Any:
    """Every third row, and a block of rows, see nothing."""
    return (m >= n) & (m % 3 != 1) & (m // 32 != 1)


def pictures(*spans: tuple[int, int]) -> Mod:
    """Causal, and both directions within a picture."""
    ids = torch.full((512,), -1)
    for name, (begin, end) in enumerate(spans):
        ids[begin:end] = name
    return lambda b, h, m, n: (m >= n) | ((ids[m] == ids[n]) & (ids[m] >= 0))


def softcap(score: Tensor, b: Any, h: Any, m: Any, n: Any) -> Tensor:
    return 2.0 * torch.tanh(score / 2.0)


def alibi(heads: int) -> Mod:
    slopes = torch.exp2(-torch.arange(1.0, heads + 1))
    return lambda score, b, h, m, n: score + slopes[h] * (n - m)


def bias_by_distance(length: int) -> Mod:
    table = normal(2 * length, seed=9)
    return lambda score, b, h, m, n: score + table[m - n + length]


def not_finite_where_hidden(score: Tensor, b: Any, h: Any, m: Any, n: Any) -> Tensor:
    """With its derivative: a NaN for n > m + 1, an infinity or a NaN where a score is 0, as in padding."""
    return score * torch.sqrt(0.1 * (m - n + 1)) / (score != 0)


def captures(batch: int, heads: int, length: int) -> Mod:
    """By head, by batch element, by row, by key, by both, and by a computed index; a number too."""
    by_head, by_batch, by_row, by_key = (normal(size, seed=seed) for seed, size in enumerate((heads, batch, length, length)))
    by_all, strided = normal(batch, heads, length, length, seed=4), normal(8, length, seed=5).mT
    return lambda score, b, h, m, n: (
        score * torch.sigmoid(by_head[h] + by_batch[b])
        + 0.3 * by_row[m] * by_key[n]
        + by_all[b, h, m, n]
        + strided[(3 * m + n) % length, h + b]
        + 0.01 * length
    )


@dataclass(frozen=True)
class Attention:
    """FlexAttention of `q_len` queries and `kv_len` keys under mask and score_mod; `mask_sizes` are B and H of the BlockMask."""

    mask: Mod | None = None
    mod: Mod | None = None
    q_len: int = 100
    kv_len: int | None = None
    batch: int = 1
    heads: int = 2
    kv_heads: int | None = None
    head_dim: int = 16
    value_dim: int | None = None
    dtype: torch.dtype = FP32
    block: int | tuple[int, int] = 32
    mask_sizes: tuple[int | None, int | None] = (None, None)
    scale: float | None = None

    def tensors(self) -> list[Tensor]:
        """query, key, value and grad_out."""
        sizes = (self.batch, self.heads, self.q_len, self.kv_len or self.q_len, self.head_dim)
        return qkv(*sizes, kv_heads=self.kv_heads, dtype=self.dtype, value_dim=self.value_dim)

    def block_mask(self) -> BlockMask | None:
        """That of the mask."""
        lengths = (self.q_len, self.kv_len or self.q_len)
        if self.mask is None:
            return None
        return create_block_mask(self.mask, *self.mask_sizes, *lengths, device="cpu", BLOCK_SIZE=self.block)

    def function(self, block_mask: BlockMask | None = None, **keywords: Any) -> Callable[..., Tensor]:
        """The attention of query, key, value, under another BlockMask where one is given."""
        given = self.block_mask() if block_mask is None else block_mask

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Any:
            options = {"scale": self.scale, "enable_gqa": query.shape[1] != key.shape[1], **keywords}
            return flex_attention(query, key, value, score_mod=self.mod, block_mask=given, **options)

        return attend

    def reference(self, tensors: Sequence[Tensor], listed: Tensor | None = None) -> tuple[Tensor, ...]:
        """dq, dk, dv in float64, of query, key, value and grad_out; `listed` bool [S_q, S_k] hides more than the mask does."""
        query, key, value, grad_out = (x.detach().double() for x in tensors)
        leaves = [x.requires_grad_() for x in (query, key, value)]
        scores, keys = wide_scores(query, key, value, self.mask, self.mod, self.scale, listed)
        out = scores.softmax(-1).where(scores > HIDDEN, 0.0) @ keys
        return torch.autograd.grad(out, leaves, grad_out)


def backward_of(function: Callable[..., Tensor], tensors: Sequence[Tensor], **device: Any) -> Callable[..., tuple[Tensor, ...]]:
    """dq, dk, dv of the compiled function under an emulation; its forward has run, on the emulated device."""
    *inputs, grad_out = tensors
    leaves = [x.detach().requires_grad_() for x in inputs]
    with emulation.emulate(**device):
        out = compiled(function)(*leaves)

    def gradients(seed: int = 0, resident: int | None = None) -> tuple[Tensor, ...]:
        with emulation.emulate(seed, resident=resident, **device):
            return torch.autograd.grad(out, leaves, grad_out, retain_graph=True)

    return gradients


HIDDEN = -1e300


def wide_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mod | None,
    mod: Mod | None,
    scale: float | None = None,
    listed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The scores, HIDDEN where no query may look, and the value of each query head."""
    group = query.shape[1] // key.shape[1]
    keys, values = (x.expand(query.shape[0], *x.shape[1:]).repeat_interleave(group, 1) for x in (key, value))
    scores = query @ keys.mT * (scale or 1 / math.sqrt(query.shape[-1]))
    batch, heads, rows, columns = (
        torch.arange(size).view([-1 if dim == axis else 1 for dim in range(4)]) for axis, size in enumerate(scores.shape)
    )
    seen = torch.ones_like(scores, dtype=torch.bool)
    if mask is not None:
        seen = seen & mask(batch, heads, rows, columns)
    if listed is not None:
        seen = seen & listed
    if mod is not None:
        scores.register_hook(lambda grad: grad.where(seen, 0.0))  # whatever the derivative is elsewhere
        scores = mod(scores, batch, heads, rows, columns).double().expand_as(scores)
    return scores.where(seen, HIDDEN), values
