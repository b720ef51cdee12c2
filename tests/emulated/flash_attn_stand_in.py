"""The dense ops of flash_attn 2.8 on the CPU, by their names and schemas, and functions that call them as the package does."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("flash_attn", "FRAGMENT")
OPTIONS = "float dropout_p, float softmax_scale, bool causal, SymInt window_size_left, SymInt window_size_right, float softcap, "
LIBRARY.define(
    f"_flash_attn_forward(Tensor q, Tensor k, Tensor v, {OPTIONS}Tensor? alibi_slopes, bool return_softmax) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "_flash_attn_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a6!)? dq, "
    f"Tensor(a7!)? dk, Tensor(a8!)? dv, {OPTIONS}Tensor? alibi_slopes, bool deterministic, Tensor? rng_state=None) -> Tensor"
)
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


for kernel, fake in ((forward, forward_fake), (backward, backward_fake)):
    LIBRARY.impl(f"_flash_attn_{kernel.__name__}", kernel, "CPU")
    torch.library.register_fake(f"flash_attn::_flash_attn_{kernel.__name__}", fake, lib=LIBRARY)


class Attention(torch.autograd.Function):
    """Of packed or separate tensors; gradients are written where the package writes them."""

    @staticmethod
    def forward(ctx: Any, deterministic: bool, options: dict[str, Any], *tensors: Tensor) -> Tensor:
        q, k, v = separated(tensors)
        scale = options["scale"] or q.shape[-1] ** -0.5
        given = options["dropout_p"], scale, options["causal"], *options["window"], options["softcap"], options["alibi_slopes"]
        out, lse, _, rng_state = torch.ops.flash_attn._flash_attn_forward(q, k, v, *given, False)
        ctx.save_for_backward(*tensors, out, lse, rng_state)
        ctx.given = *given, deterministic
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, out, lse, rng_state = ctx.saved_tensors
        made = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors]
        torch.ops.flash_attn._flash_attn_backward(dout, *separated(tensors), out, lse, *separated(made), *ctx.given, rng_state)
        return None, None, *(x[..., : dout.shape[-1]] for x in made)


def separated(tensors: Any) -> tuple[Tensor, ...]:
    """query, key and value of [B, S, 3, H, D]; of [B, S, H, D] and [B, S, 2, H, D]; or of three tensors."""
    return tuple(part for x in tensors for part in (x.unbind(2) if x.dim() == 5 else [x]))


def attend(*tensors: Tensor, deterministic: bool = False, **options: Any) -> Tensor:
    """flash_attn_func, flash_attn_kvpacked_func and flash_attn_qkvpacked_func, by the tensors. [B, S, H, D]."""
    return Attention.apply(deterministic, NO_OPTIONS | options, *tensors)
