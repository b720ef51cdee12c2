"""Joint graphs of attentions that `codegen` has no arguments for: packed sequences, and SDPA under a mask that the graph makes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention import varlen

from benchmarks.machine_code.generate import Generated, generate
from dash_inductor.codegen.flex import TORCH_DTYPES
from dash_inductor.codegen.mode import deterministic
from dash_inductor.rewrite import sdpa
from dash_inductor.rewrite.stock_ops import VARLEN

assert varlen  # its op is registered
aten, prims = torch.ops.aten, torch.ops.prims


def varlen_backward(
    device: str, tensors: list[tuple[int, int, int]], causal: bool, dtype: str, sequences: int, dynamic: bool
) -> Generated:
    """varlen_attn, forward and backward. tensors: sizes [T, H, D] of query, key, value and gradient, packed without gaps."""
    tokens, window = tensors[0][0], [-1, 0 if causal else -1]

    def attention(query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
        packed = offsets, offsets, tokens, tokens
        out, lse, rng_state = torch.ops.torch_attn._varlen_attn(query, key, value, *packed, False, None, window)
        return VARLEN(grad_out, query, key, value, out, lse, *packed, False, rng_state, None, window)

    def inputs() -> list[Tensor]:
        made = [torch.empty(size, dtype=TORCH_DTYPES[dtype], device="cuda") for size in tensors]
        return [*made, torch.empty(sequences + 1, dtype=torch.int32, device="cuda")]

    with deterministic():
        return generate(attention, inputs, device, dynamic_dims=(0,) if dynamic else ())


def flash_backward(
    device: str,
    tensors: list[tuple[int, int, int, int]],
    causal: bool,
    dtype: str,
    dynamic: bool,
    p: float,
    group: str | None = None,
) -> Generated:
    """SDPA by flash attention with dropout. tensors: sizes [B, H, S, D] of query, key, value and gradient. group: name of the
    process group, of one rank, over which dK and dV are summed, if they are."""

    def attention(query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
        out, *saved, seed, offset, _ = aten._scaled_dot_product_flash_attention(query, key, value, p, causal)
        given = grad_out, query, key, value, out, *saved, p, causal, seed, offset
        dq, *others = aten._scaled_dot_product_flash_attention_backward(*given)
        if group is not None:
            collectives = torch.ops._c10d_functional
            others = [collectives.wait_tensor(collectives.reduce_scatter_tensor(x, "sum", 1, group)) for x in others]
        return dq, *others

    def inputs() -> list[Tensor]:
        views = [(batch, length, heads, dim) for batch, heads, length, dim in tensors]
        return [torch.empty(size, dtype=TORCH_DTYPES[dtype], device="cuda").transpose(1, 2) for size in views]

    with deterministic(), as_if_asked():
        return generate(attention, inputs, device, dynamic_dims=(2,) if dynamic else ())


def as_if_asked() -> AbstractContextManager[Any]:
    """Forwards are taken as where a GPU has said that it drops what our kernels do."""
    return mock.patch.object(sdpa, "why_bits_unknown", lambda *_: None)


def masked_backward(
    device: str,
    tensors: list[tuple[int, int, int, int]],
    causal: bool,
    dtype: str,
    dynamic: bool,
    given: str = "masked",
    p: float = 0.0,
) -> Generated:
    """SDPA by the memory-efficient op under a bias of 0 and -inf, made of positions and a padding of keys, int64 [B, S_k].

    given: "mask" for a bool tensor [B, 1, S_q, S_k] in the place of the padding, "head-mask" for one [1, H, S_q, S_k], "bias" for
    all of the bias, [1, H, S_q, S_k], and "learnt" for one whose gradient is wanted too; "efficient" for none. p: of its dropout.
    tensors: sizes [B, H, S, D] of query, key, value and gradient. Heads of keys are repeated. In the ops of a joint graph, of which
    fake CUDA tensors know some and Python's indexing others.
    """

    def positions(length: int, like: Tensor) -> Tensor:
        return prims.iota(length, start=0, step=1, dtype=torch.int64, device=like.device, requires_grad=False)

    def attention(query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, padding: Tensor) -> tuple[Tensor, ...]:
        q_len, kv_len, group = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
        seen = (
            padding if given in ("mask", "head-mask") else prims.convert_element_type(padding, torch.bool).unsqueeze(1).unsqueeze(1)
        )
        if causal:
            seen = seen & (positions(kv_len, query).unsqueeze(0) <= positions(q_len, query).unsqueeze(1)).unsqueeze(0).unsqueeze(0)
        zero, hidden = (aten.full([], number, dtype=query.dtype, device=query.device) for number in (0.0, -float("inf")))
        made = padding if given in ("bias", "learnt") else torch.where(seen, zero, hidden)
        bias = None if given == "efficient" else made.expand(*query.shape[:2], q_len, kv_len)

        def repeated(x: Tensor) -> Tensor:
            copied = x.unsqueeze(2).expand(-1, -1, group, -1, -1).clone(memory_format=torch.contiguous_format)
            return aten.view(copied, [x.shape[0], query.shape[1], *x.shape[2:]])

        keys, values = repeated(key), repeated(value)
        options = {"is_causal": causal} if given == "efficient" else {}
        saved = aten._scaled_dot_product_efficient_attention(query, keys, values, bias, True, p, **options)
        wanted = [True, True, True, given == "learnt"]
        dq, *grads, dbias = aten._scaled_dot_product_efficient_attention_backward(
            grad_out, query, keys, values, bias, *saved, p, wanted, **options
        )
        sizes = [x.shape for x in (key, value)]
        of_keys = [aten.sum(aten.view(x, [*of[:2], group, *of[2:]]), [2]) for x, of in zip(grads, sizes, strict=True)]
        return dq, *of_keys, *([aten.sum(dbias, [0], True)] if given == "learnt" else [])

    def inputs() -> list[Tensor]:
        views = [(batch, length, heads, dim) for batch, heads, length, dim in tensors]
        made = [torch.empty(size, dtype=TORCH_DTYPES[dtype], device="cuda").transpose(1, 2) for size in views]
        (batch, heads, q_len, _), kv_len = tensors[0], tensors[1][2]
        if given in ("masked", "efficient"):
            return [*made, torch.empty(batch, kv_len, dtype=torch.int64, device="cuda")]
        size = (batch, 1) if given == "mask" else (1, heads)
        kind = torch.bool if given in ("mask", "head-mask") else TORCH_DTYPES[dtype]
        return [*made, torch.empty(*size, q_len, kv_len, dtype=kind, device="cuda")]

    with deterministic(), as_if_asked():
        return generate(attention, inputs, device, dynamic_dims=(2,) if dynamic else ())
