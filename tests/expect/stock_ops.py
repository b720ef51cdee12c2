"""Attentions by the stock ops of a GPU, forward and backward, which autograd does not call on fake CUDA tensors."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

aten = torch.ops.aten


def by_flash(*inputs: Tensor, dropout_p: float = 0.0, is_causal: bool = False) -> tuple[Tensor, ...]:
    query, key, value, grad_out = inputs
    settings = (dropout_p, is_causal)
    out, *saved, seed, offset, _ = aten._scaled_dot_product_flash_attention(query, key, value, *settings)
    return aten._scaled_dot_product_flash_attention_backward(grad_out, query, key, value, out, *saved, *settings, seed, offset)


flash, causal = partial(by_flash), partial(by_flash, is_causal=True)
dropping = partial(by_flash, dropout_p=0.1)


def mask_of(query: Tensor, key: Tensor) -> Tensor:
    """Some tensor [B, H, S_q, S_k] that no graph shows to be a constant."""
    return query.narrow(3, 0, 1).expand(*query.shape[:3], key.shape[2])


def efficient(
    *inputs: Tensor, bias: bool = False, wanted: bool = False, dropout_p: float = 0.0, is_causal: bool = False
) -> tuple[Tensor, ...]:
    """bias: there is a mask; wanted: its gradient is."""
    *qkv, grad_out = inputs
    mask = mask_of(*qkv[:2]) if bias else None
    saved = aten._scaled_dot_product_efficient_attention(*qkv, mask, True, dropout_p, is_causal)
    gradients = [True] * 3 + [wanted]
    return aten._scaled_dot_product_efficient_attention_backward(grad_out, *qkv, mask, *saved, dropout_p, gradients, is_causal)[
        : 4 if wanted else 3
    ]


def cudnn(*inputs: Tensor, bias: bool = False, dropout_p: float = 0.0, is_causal: bool = False) -> tuple[Tensor, ...]:
    *qkv, grad_out = inputs
    mask = mask_of(*qkv[:2]) if bias else None
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
        *qkv, mask, True, dropout_p, is_causal
    )
    saved = (out, lse, seed, offset, mask, cum_q, cum_k, max_q, max_k)
    return aten._scaled_dot_product_cudnn_attention_backward(grad_out, *qkv, *saved, dropout_p, is_causal)


def cpus(*inputs: Tensor) -> tuple[Tensor, ...]:
    """The CPU's op, whatever the device."""
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*inputs[:3])
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(inputs[3], *inputs[:3], out, lse, 0.0, False)


def jagged(*inputs: Tensor) -> tuple[Tensor, ...]:
    """What SDPA becomes of jagged tensors on the flash path: all sequences in one, [T, H, D]."""
    query, key, value, grad_out = (x.squeeze(0).permute(1, 0, 2) for x in inputs)
    ends, length = (
        torch.ops.prims.convert_element_type(query.select(0, 0).select(0, 0).narrow(0, 0, 3), torch.int32),
        query.shape[0],
    )
    arguments = (ends, ends, length, length, 0.0, False)
    out, lse, rng, unused, _ = aten._flash_attention_forward(query, key, value, *arguments, False)
    return aten._flash_attention_backward(grad_out, query, key, value, out, lse, *arguments, rng, unused)


def dense_efficient(*inputs: Tensor, mask_type: int = 0, **options: int) -> tuple[Tensor, ...]:
    """The op below SDPA's, of [B, S, H, D]."""
    query, key, value, grad_out = (x.permute(0, 2, 1, 3) for x in inputs)
    nothing = (None,) * 4
    out, lse, seed, offset, max_q, max_k = aten._efficient_attention_forward(
        query, key, value, None, *nothing, 0.0, mask_type, True, **options
    )
    saved = out, None, None, max_q, max_k, lse, 0.0, seed, offset
    return aten._efficient_attention_backward(grad_out, query, key, value, None, *saved, mask_type, False, **options)[:3]


def dense_flash(*inputs: Tensor, is_causal: bool = False, **options: int) -> tuple[Tensor, ...]:
    query, key, value, grad_out = (x.permute(0, 2, 1, 3) for x in inputs)
    arguments = (None, None, query.shape[1], key.shape[1], 0.0, is_causal)
    out, lse, rng, unused, _ = aten._flash_attention_forward(query, key, value, *arguments, False, **options)
    return aten._flash_attention_backward(grad_out, query, key, value, out, lse, *arguments, rng, unused, **options)


def tensors(q_len: int = 64, kv_len: int = 64, head_dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """query, key, value and grad_out."""
    return [torch.empty(1, 2, n, head_dim, dtype=dtype, device="cuda") for n in (q_len, kv_len, kv_len, q_len)]
