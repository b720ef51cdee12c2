"""SDPA as a GPU that is not there would take it: torch's choice among the ops, for tensors that are on the CPU.

The choice is that of `select_sdp_backend` in torch's aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, and what is done to the
tensors before that of `scaled_dot_product_attention` in aten/src/ATen/native/transformers/attention.cpp.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, flex_attention

from ..devices import NamedDevice
from ..emulation.efficient import STOCK, forget_dispatch
from ..emulation.kernels import implement
from ..hooks.hook import around_here
from ..rewrite.stock_ops import CUDNN, EFFICIENT, FLASH, SDPA
from . import outside

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
CUDNN_ARCHS = (90, 100, 103)  # where torch prefers cuDNN, if that is newer than 9.15
MOST_CUDNN = (128, 128), (192, 128)  # head dims of query and value
NO_FLASH_TRAINING = (86, 89, 120)  # where flash attention has no backward of head dims 193 to 224, nor of more with dropout
MASK_ALIGNMENT = 8  # elements
BACKWARDS = {
    SDPBackend.CUDNN_ATTENTION: CUDNN,
    SDPBackend.FLASH_ATTENTION: FLASH,
    SDPBackend.EFFICIENT_ATTENTION: EFFICIENT,
    SDPBackend.MATH: SDPA,
}
_thread = threading.local()


@contextmanager
def attention_of(gpu: NamedDevice) -> Iterator[None]:
    """Inside, CPU tensors are taken for the GPU's: SDPA becomes the op that it would there, flex_attention trains, and autocast for
    "cuda" acts on them. SDPA does so in this thread alone."""
    library = torch.library.Library("aten", "IMPL")
    implement(library, "scaled_dot_product_attention", _attend, "AutogradCPU")
    forget_dispatch()
    _thread.gpu = gpu
    try:
        with (
            mock.patch.object(flex_attention, "_validate_device", lambda query, key, value: None),
            around_here(torch.autocast, "__init__", _autocast),
            torch.autocast("cpu", torch.get_autocast_dtype("cuda"), enabled=True)
            if torch.is_autocast_enabled("cuda")
            else nullcontext(),
        ):
            yield
    finally:
        _thread.gpu = None
        library._destroy()
        forget_dispatch()


@contextmanager
def taken_for_gpu(on: bool) -> Iterator[None]:
    """Within `attention_of`: whether SDPA becomes the op that it would be on the GPU, or stays one that CPU tensors have."""
    before = getattr(_thread, "on", True)
    _thread.on = on
    try:
        yield
    finally:
        _thread.on = before


def _autocast(stock: Callable[..., None], self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
    stock(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)


def _attend(
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
    """SDPA, by the op of the GPU."""
    gpu, options = getattr(_thread, "gpu", None), {"scale": scale, "enable_gqa": enable_gqa}
    if gpu is None:
        return STOCK.decompose(query, key, value, attn_mask, dropout_p, is_causal, **options)
    op = chosen(gpu, query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    outside.called(BACKWARDS[op], (query, key, value), attn_mask, dropout_p, is_causal)
    if not getattr(_thread, "on", True):
        return STOCK.decompose(query, key, value, attn_mask, dropout_p, is_causal, **options)
    if attn_mask is not None and attn_mask.dtype == torch.bool and op != SDPBackend.MATH:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(attn_mask.logical_not(), -math.inf)
    if op == SDPBackend.CUDNN_ATTENTION:
        return aten._scaled_dot_product_cudnn_attention(
            query, key, value, attn_mask, _trains(query, key, value), dropout_p, is_causal, scale=scale
        )[0]
    if op == SDPBackend.FLASH_ATTENTION:
        head_dim = query.shape[3]
        padded = (F.pad(x, (0, -head_dim % 8)) if head_dim % 8 else x for x in (query, key, value))
        scale = 1 / math.sqrt(head_dim) if scale is None else scale
        out = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, scale=scale)[0]
        return out[..., :head_dim] if head_dim % 8 else out
    if op == SDPBackend.EFFICIENT_ATTENTION:
        bias = None if attn_mask is None else _aligned(attn_mask).expand(*query.shape[:3], key.shape[2])
        trains = _trains(query, key, value)
        return aten._scaled_dot_product_efficient_attention(query, key, value, bias, trains, dropout_p, is_causal, scale=scale)[0]
    return aten._scaled_dot_product_attention_math(query, key, value, attn_mask, dropout_p, is_causal, **options)[0]


def chosen(
    gpu: NamedDevice,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> Any:
    """The backend that torch takes; math where none of the fused ones serves."""
    tensors = query, key, value
    if any(x.dim() != 4 for x in tensors) or any(size == 0 for x in tensors for size in x.shape):
        return SDPBackend.MATH
    if len({x.shape[0] for x in tensors}) > 1 or len({x.dtype for x in tensors}) > 1:
        return SDPBackend.MATH
    if attn_mask is not None and attn_mask.stride(-1) != 1:
        return SDPBackend.MATH
    same_heads = query.shape[1] == key.shape[1] == value.shape[1]
    grouped = enable_gqa and key.shape[1] == value.shape[1] and query.shape[1] % key.shape[1] == 0
    dims = query.shape[3], value.shape[3]
    half, dense = query.dtype in HALF, all(x.stride(3) == 1 for x in tensors)
    if query.shape[3] != key.shape[3]:
        return SDPBackend.MATH
    if (
        _prefers_cudnn(gpu)
        and half
        and dense
        and (same_heads or grouped)
        and (dims == MOST_CUDNN[1] or max(dims) <= MOST_CUDNN[0][0])
        and not any(dim % 8 for dim in dims)
        and key.shape[2] != 1
        and (dropout_p * 16).is_integer()
        and not (attn_mask is not None and attn_mask.requires_grad)
    ):
        return SDPBackend.CUDNN_ATTENTION
    if (
        torch.backends.cuda.flash_sdp_enabled()
        and half
        and (dense or query.shape[3] == 1)
        and (same_heads or grouped)
        and attn_mask is None
        and dims[0] == dims[1] <= 256
        and not (gpu.arch in NO_FLASH_TRAINING and dims[0] > 192 and (dims[0] <= 224 or dropout_p) and _trains(*tensors))
        and not (is_causal and query.shape[2] != key.shape[2])
    ):
        return SDPBackend.FLASH_ATTENTION
    alignment = 8 if half else 4
    if (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and query.dtype in (*HALF, torch.float32)
        and dense
        and same_heads
        and not any(dim % alignment for dim in dims)
    ):
        return SDPBackend.EFFICIENT_ATTENTION
    return SDPBackend.MATH


def _prefers_cudnn(gpu: NamedDevice) -> bool:
    """Never in strict mode, which refuses it."""
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    return gpu.arch in CUDNN_ARCHS and not strict and torch.backends.cuda.cudnn_sdp_enabled()


def _trains(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _aligned(mask: Tensor) -> Tensor:
    """The mask, its rows padded in memory where they do not begin at multiples of MASK_ALIGNMENT elements."""
    if not any(stride % MASK_ALIGNMENT for stride in mask.stride()[:-1]):
        return mask
    length = mask.shape[-1]
    return F.pad(mask, (0, MASK_ALIGNMENT - length % MASK_ALIGNMENT))[..., :length]
