"""The ops of flash_attn 2.8 on the CPU, by their names and schemas, and functions that call them as the package does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("flash_attn", "FRAGMENT")
OPTIONS = "float dropout_p, float softmax_scale, bool causal, SymInt window_size_left, SymInt window_size_right, float softcap, "
SEQUENCES = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
WRITTEN = (
    "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a6!)? dq, Tensor(a7!)? dk, Tensor(a8!)? dv, "
)
SCHEMAS = {
    "forward": f"(Tensor q, Tensor k, Tensor v, {OPTIONS}Tensor? alibi_slopes, bool return_softmax) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    "backward": f"({WRITTEN}{OPTIONS}Tensor? alibi_slopes, bool deterministic, Tensor? rng_state=None) -> Tensor",
    "varlen_forward": f"(Tensor q, Tensor k, Tensor v, {SEQUENCES}{OPTIONS}Tensor? alibi_slopes, bool return_softmax, "
    "Tensor? block_table=None, Tensor? leftpad_k=None, Tensor? seqused_k=None, bool zero_tensors=False) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    "varlen_backward": f"({WRITTEN}{SEQUENCES}{OPTIONS}Tensor? alibi_slopes, bool deterministic, Tensor? rng_state=None, "
    "bool zero_tensors=False) -> Tensor",
}
NO_OPTIONS = {"causal": False, "window": (-1, -1), "softcap": 0.0, "alibi_slopes": None, "dropout_p": 0.0, "scale": None}


def scores_of(q: Tensor, k: Tensor, scale: float, causal: bool, left: int, right: int) -> Tensor:
    """[B, H, S_q, S_k] of [B, S, H, D], with -inf where a query does not see a key; the last query is in line with the last key."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    m = torch.arange(q.shape[1])[:, None] + (k.shape[1] - q.shape[1])
    n = torch.arange(k.shape[1])
    right = 0 if causal else right
    hidden = ((n > m + right) if right >= 0 else (n < 0)) | ((n < m - left) if left >= 0 else (n < 0))
    return (torch.einsum("bmhd,bnhd->bhmn", q.float(), k.float()) * scale).masked_fill(hidden, -math.inf)


def forward(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, scale: float, causal: bool, left: int, right: int, *_: Any) -> Any:
    scores = scores_of(q, k, scale, causal, left, right)
    out = torch.einsum("bhmn,bnhd->bmhd", scores.softmax(-1), v.repeat_interleave(q.shape[2] // v.shape[2], 2).float())
    return out.to(q.dtype).contiguous(), scores.logsumexp(-1), q.new_empty(0), torch.zeros(2, dtype=torch.int64)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dq: Any, dk: Any, dv: Any, *rest: Any
) -> Tensor:
    _, scale, causal, left, right, *_ = rest
    probabilities, group = (scores_of(q, k, scale, causal, left, right) - lse[..., None]).exp(), q.shape[2] // k.shape[2]
    keys, values = (x.repeat_interleave(group, 2).float() for x in (k, v))
    delta = (dout.float() * out.float()).sum(-1).transpose(1, 2)[..., None]
    grad_scores = probabilities * (torch.einsum("bmhd,bnhd->bhmn", dout.float(), values) - delta) * scale
    dq.copy_(torch.einsum("bhmn,bnhd->bmhd", grad_scores, keys))
    dk.copy_(torch.einsum("bhmn,bmhd->bnhd", grad_scores, q.float()).unflatten(2, (-1, group)).sum(3))
    dv.copy_(torch.einsum("bhmn,bmhd->bnhd", probabilities, dout.float()).unflatten(2, (-1, group)).sum(3))
    return backward_fake(dout, q)


def forward_fake(q: Tensor, *_: Any) -> tuple[Tensor, ...]:
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse, q.new_empty(0), q.new_empty(2, dtype=torch.int64)


def backward_fake(dout: Tensor, q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], -(-q.shape[1] // 128) * 128, dtype=torch.float32)


def ranges(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Of the tokens of each sequence."""
    for pairs in zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True):
        yield tuple(slice(*pair) for pair in pairs)  # type: ignore[misc]


def varlen_forward(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *options: Any) -> Any:
    out, lse = torch.zeros_like(q), torch.full((q.shape[1], q.shape[0]), math.inf)
    for of_q, of_k in ranges(cu_q, cu_k):
        made = forward(q[None, of_q], k[None, of_k], v[None, of_k], *options)
        out[of_q], lse[:, of_q] = made[0][0], made[1][0]
    return out, lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64)


def varlen_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any) -> Tensor:
    dq, dk, dv, cu_q, cu_k, _, _, *options = rest
    for of_q, of_k in ranges(cu_q, cu_k):
        tensors = dout[None, of_q], q[None, of_q], k[None, of_k], v[None, of_k], out[None, of_q], lse[None, :, of_q]
        backward(*tensors, dq[None, of_q], dk[None, of_k], dv[None, of_k], *options)
    return varlen_backward_fake(dout, q)


def varlen_forward_fake(q: Tensor, *_: Any) -> tuple[Tensor, ...]:
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse, q.new_empty(0), q.new_empty(2, dtype=torch.int64)


def varlen_backward_fake(dout: Tensor, q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape[1], q.shape[0] + 128, dtype=torch.float32)


for kernel, fake in (
    (forward, forward_fake),
    (backward, backward_fake),
    (varlen_forward, varlen_forward_fake),
    (varlen_backward, varlen_backward_fake),
):
    LIBRARY.define(f"_flash_attn_{kernel.__name__}{SCHEMAS[kernel.__name__]}")
    LIBRARY.impl(f"_flash_attn_{kernel.__name__}", kernel, "CPU")
    torch.library.register_fake(f"flash_attn::_flash_attn_{kernel.__name__}", fake, lib=LIBRARY)


class Attention(torch.autograd.Function):
    """Of packed or separate tensors; gradients are written where the package writes them. sequences: () for dense ones."""

    @staticmethod
    def forward(ctx: Any, sequences: tuple[Any, ...], deterministic: bool, options: dict[str, Any], *tensors: Tensor) -> Tensor:
        q, k, v = separated(tensors, bool(sequences))
        scale = options["scale"] or q.shape[-1] ** -0.5
        given = options["dropout_p"], scale, options["causal"], *options["window"], options["softcap"], options["alibi_slopes"]
        op = torch.ops.flash_attn._flash_attn_varlen_forward if sequences else torch.ops.flash_attn._flash_attn_forward
        out, lse, _, rng_state = op(q, k, v, *sequences, *given, False)
        ctx.save_for_backward(*tensors, out, lse, rng_state, *sequences[:2])
        ctx.lengths, ctx.given = sequences[2:], (*given, deterministic)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        is_packed = bool(ctx.lengths)
        *tensors, out, lse, rng_state = ctx.saved_tensors[: -2 if is_packed else None]
        made = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors]
        given = dout, *separated(tensors, is_packed), out, lse, *separated(made, is_packed)
        if is_packed:
            sequences = *ctx.saved_tensors[-2:], *ctx.lengths
            torch.ops.flash_attn._flash_attn_varlen_backward(*given, *sequences, *ctx.given, rng_state, False)
        else:
            torch.ops.flash_attn._flash_attn_backward(*given, *ctx.given, rng_state)
        return None, None, None, *(x[..., : dout.shape[-1]] for x in made)


def separated(tensors: Any, is_packed: bool = False) -> tuple[Tensor, ...]:
    """query, key and value of [B, S, 3, H, D]; of [B, S, H, D] and [B, S, 2, H, D]; or of three tensors; without B in sequences."""
    dim = 1 if is_packed else 2
    return tuple(part for x in tensors for part in (x.unbind(dim) if x.dim() == dim + 3 else [x]))


def attend(*tensors: Tensor, sequences: tuple[Any, ...] = (), deterministic: bool = False, **options: Any) -> Tensor:
    """flash_attn_func, flash_attn_kvpacked_func and flash_attn_qkvpacked_func, by the tensors, [B, S, H, D].

    sequences: cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k; then the varlen ones, [T, H, D].
    """
    return Attention.apply(sequences, deterministic, NO_OPTIONS | options, *tensors)
