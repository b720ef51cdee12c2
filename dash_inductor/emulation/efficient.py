"""The memory-efficient op of SDPA on the CPU, where stock has none: what a GPU gives to it goes there under emulation too."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..dropout import EFFICIENT as OF_EFFICIENT
from ..dropout import Dropout, kept
from .kernels import implement
from .patches import Patches

ALIGNED = 32  # the rows of logsumexp are padded to a multiple of it
STOCK = torch.ops.aten.scaled_dot_product_attention.default
EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention.default


def install_efficient(patches: Patches) -> None:
    """Gives the op kernels for the CPU, and sends it the attentions that a GPU would."""
    library = torch.library.Library("aten", "IMPL")
    patches.callback(forget_dispatch)  # when the library is gone
    patches.callback(library._destroy)
    implement(library, "_scaled_dot_product_efficient_attention", forward, "CPU")
    implement(library, "_scaled_dot_product_efficient_attention_backward", backward, "CPU")
    implement(library, "scaled_dot_product_attention", attend, "AutogradCPU")
    forget_dispatch()


def forget_dispatch() -> None:
    """Makes torch look up anew where SDPA of CPU tensors goes: tracing remembers that, also of a kernel that is gone."""
    STOCK._uncache_dispatch(torch.DispatchKey.AutogradCPU)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """SDPA: head dims that differ, masks that are learnt and dropout, which no flash op of the CPU takes, go to the
    memory-efficient op, all else where stock sends it."""
    tensors, options = (query, key, value), {"scale": scale, "enable_gqa": enable_gqa}
    learnt = attn_mask is not None and attn_mask.requires_grad
    drops = 0 < dropout_p < 1
    taken = query.dim() == 4 and query.shape[1] == key.shape[1] and (learnt or drops or query.shape[3] != value.shape[3])
    trains = torch.is_grad_enabled() and (learnt or any(x.requires_grad for x in tensors))
    # A checkpoint's first forward does not train, and drops the same as the one that does.
    if not (taken and (trains or drops) and torch.backends.cuda.mem_efficient_sdp_enabled()) or dropout_p >= 1:
        return STOCK.decompose(*tensors, attn_mask, dropout_p, is_causal, **options)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.where(attn_mask, 0.0, -math.inf)
        attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    return EFFICIENT(*tensors, attn_mask, trains, dropout_p, is_causal, scale=scale)[0]


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the op gives on a GPU: out is [B, S, H, D] in memory; logsumexp is 0 in rows that see no key, +inf in the padding.

    Seed and offset are drawn by torch's generator of the CPU; the offset is a multiple of 4, as that of a GPU's generator.
    """
    scores = _scores(query, key, attn_bias, is_causal, scale)
    lse = scores.logsumexp(-1)
    lse = lse.where(lse != -math.inf, 0.0)
    seed, offset = (torch.zeros((), dtype=torch.long) for _ in range(2))  # of memory of their own, which Inductor takes for aligned
    if dropout_p:
        seed.random_()
        offset.random_(2**40).mul_(4)
    probabilities = (scores - lse[..., None]).exp() * _kept(query, key, dropout_p, seed, offset)
    out = _in_bshd(probabilities @ value.float(), value)
    padded = torch.nn.functional.pad(lse, (0, -query.shape[2] % ALIGNED), value=math.inf)
    return out, padded if compute_log_sumexp else padded[..., :0], seed, offset


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Any]:
    """dq, dk, dv, and the gradient of attn_bias or None."""
    scores, factors = _scores(query, key, attn_bias, is_causal, scale), _kept(query, key, dropout_p, philox_seed, philox_offset)
    probabilities = (scores - logsumexp[..., : query.shape[2], None]).exp()
    wide = grad_out.float()
    delta = (wide * out.float()).sum(-1, keepdim=True)
    grad_scores = probabilities * (factors * (wide @ value.float().mT) - delta)
    factor = _scale(query, scale)
    return (
        _in_bshd(grad_scores @ key.float() * factor, query),
        _in_bshd(grad_scores.mT @ query.float() * factor, key),
        _in_bshd((probabilities * factors).mT @ wide, value),
        _with_padded_rows(grad_scores.to(query.dtype)) if attn_bias is not None and grad_input_mask[3] else None,
    )


def _with_padded_rows(grad_bias: Tensor) -> Tensor:
    """In memory as stock's, whose rows are multiples of 16 elements."""
    length = grad_bias.shape[-1]
    return torch.nn.functional.pad(grad_bias, (0, -length % 16))[..., :length]


def _kept(query: Tensor, key: Tensor, p: float, seed: Tensor, offset: Tensor) -> Tensor:
    """What the probabilities are multiplied with, [B, H, S_q, S_k]."""
    if not p:
        return torch.ones(())
    dropout = Dropout(p, OF_EFFICIENT)
    return kept(dropout, torch.stack([seed, offset]), (*query.shape[:3], key.shape[2])) * dropout.scale(query.dtype)


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    scores = query.float() @ key.float().mT * _scale(query, scale)
    if bias is not None:
        scores = scores + bias.float()
    if is_causal:  # top-left
        scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), -math.inf)
    return scores


def _scale(query: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[3]) if scale is None else scale


def _in_bshd(x: Tensor, like: Tensor) -> Tensor:
    """x in the dtype of `like`, [B, S, H, D] in memory."""
    return torch.empty_permuted(x.shape, (0, 2, 1, 3), dtype=like.dtype).copy_(x)
