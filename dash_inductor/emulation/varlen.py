"""varlen_attn on the CPU, where torch has no kernel for it: what flash attention computes, sequence by sequence.

The forward computes in float64 and rounds once: in fp32 a row's bits would depend on the number of rows, so on that of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen

from .kernels import implement
from .patches import Patches

assert varlen  # importing it registers the ops


def install_varlen(patches: Patches) -> None:
    """Gives the op and its backward a kernel for the CPU."""
    library = torch.library.Library("torch_attn", "IMPL")
    patches.callback(library._destroy)
    implement(library, "_varlen_attn", _forward, "CPU")
    implement(library, "_varlen_attn_backward", _backward, "CPU")


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    *unused: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    if seqused_k is not None or block_table is not None:
        raise NotImplementedError("emulation runs no varlen_attn with seqused_k or block_table, which are for inference")
    out = torch.empty_like(query)  # of queries of no sequence it stays so, as does logsumexp
    logsumexp = torch.empty(query.shape[1], query.shape[0])
    scale = _scale(query, scale)
    query, key, value = query.double(), key.double(), value.double()
    for q, k in _sequences(cu_seq_q, cu_seq_k):
        scores = _scores(query[q], key[k], is_causal, scale, window_size)
        out[q] = torch.einsum("hqk,khd->qhd", _softmax(scores), _repeated(value[k], query)).to(out.dtype)
        lse = scores.logsumexp(-1)
        logsumexp[:, q] = lse.where(lse > -math.inf, math.inf)
    return out, logsumexp, torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
    *unused: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    scale = _scale(query, scale)
    query, key, value, grad_out = query.float(), key.float(), value.float(), grad_out.float()
    for q, k in _sequences(cu_seq_q, cu_seq_k):
        weights, do = _softmax(_scores(query[q], key[k], is_causal, scale, window_size)), grad_out[q]
        dp = torch.einsum("qhd,khd->hqk", do, _repeated(value[k], query))
        ds = weights * (dp - (weights * dp).sum(-1, keepdim=True)) * scale
        dq = torch.einsum("hqk,khd->qhd", ds, _repeated(key[k], query))
        dk, dv = torch.einsum("hqk,qhd->khd", ds, query[q]), torch.einsum("hqk,qhd->khd", weights, do)
        for gradient, rows, x in zip(gradients, (q, k, k), (dq, dk, dv), strict=True):
            gradient[rows] = x.unflatten(1, (gradient.shape[1], -1)).sum(2).to(gradient.dtype)
    return gradients


def _scale(query: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[2]) if scale is None else scale


def _sequences(cu_seq_q: Tensor, cu_seq_k: Tensor) -> Iterator[tuple[slice, slice]]:
    q, k = cu_seq_q.tolist(), cu_seq_k.tolist()
    for begin_q, end_q, begin_k, end_k in zip(q, q[1:], k, k[1:], strict=False):
        yield slice(begin_q, end_q), slice(begin_k, end_k)


def _scores(query: Tensor, key: Tensor, is_causal: bool, scale: float, window_size: list[int] | None) -> Tensor:
    """[H, queries, keys] of one sequence, -inf where a query does not look; the last query is in line with the last key."""
    left, right = window_size or (-1, -1)
    right = 0 if is_causal else right
    scores = torch.einsum("qhd,khd->hqk", query, _repeated(key, query)) * scale
    ahead = torch.arange(len(key)) - torch.arange(len(query))[:, None] - (len(key) - len(query))
    hidden = (ahead < -left) & (left >= 0) | (ahead > right) & (right >= 0)
    return scores.masked_fill(hidden, -math.inf)


def _softmax(scores: Tensor) -> Tensor:
    """0 where a query sees no key."""
    return scores.softmax(-1).where(scores > -math.inf, 0.0)


def _repeated(x: Tensor, query: Tensor) -> Tensor:
    """Keys or values for each query head."""
    return x.repeat_interleave(query.shape[1] // x.shape[1], 1)
