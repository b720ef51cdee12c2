"""The ops of flash_attn 2.8 and of FlashAttention 3 on the CPU, by their names and schemas, and functions that call them.

The kernels hub has the same in namespaces with a hash: flash-attn2 and flash-attn3 of huggingface/kernels-community at 40d4194f.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

HUB_2, HUB_3 = "_flash_attn2_cuda_588b404", "_flash_attn3_cuda_9f3e2a1"
ANOTHER, WITHOUT_FORWARD = "_flash_attn2_cuda_another", "_flash_attn2_cuda_backward"  # one has an argument more
OPTIONS = "float dropout_p, float softmax_scale, bool causal, SymInt window_size_left, SymInt window_size_right, float softcap, "
SEQUENCES = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
READ = "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
WRITTEN = f"{READ}Tensor(a6!)? dq, Tensor(a7!)? dk, Tensor(a8!)? dv, "
SCHEMAS = {
    "forward": f"(Tensor q, Tensor k, Tensor v, {OPTIONS}Tensor? alibi_slopes, bool return_softmax) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    "backward": f"({WRITTEN}{OPTIONS}Tensor? alibi_slopes, bool deterministic, Tensor? rng_state=None) -> Tensor",
    "varlen_forward": f"(Tensor q, Tensor k, Tensor v, {SEQUENCES}float dropout_p, float softmax_scale, bool causal, "
    "SymInt window_size_left=-1, SymInt window_size_right=-1, float softcap=0., Tensor? alibi_slopes=None, "
    "bool return_softmax=False, Tensor? block_table=None, Tensor? leftpad_k=None, Tensor? seqused_k=None, "
    "bool zero_tensors=False) -> (Tensor, Tensor, Tensor, Tensor)",
    "varlen_backward": f"({WRITTEN}{SEQUENCES}{OPTIONS}Tensor? alibi_slopes, bool deterministic, Tensor? rng_state=None, "
    "bool zero_tensors=False) -> Tensor",
}
NO_OPTIONS = {
    "namespace": "flash_attn",
    "causal": False,
    "window": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "dropout_p": 0.0,
    "scale": None,
}


def scores_of(
    q: Tensor, k: Tensor, scale: float, causal: bool, left: int, right: int, softcap: float, slopes: Tensor | None
) -> tuple[Tensor, Tensor | float]:
    """[B, H, S_q, S_k] of [B, S, H, D], with -inf where a query does not see a key; the last query is in line with the last key.

    With what the soft-cap makes of their gradients. The causal kernel's ALiBi is that of keys alone.
    """
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    m = torch.arange(q.shape[1])[:, None] + (k.shape[1] - q.shape[1])
    n = torch.arange(k.shape[1])
    right = 0 if causal else right
    hidden = ((n > m + right) if right >= 0 else (n < 0)) | ((n < m - left) if left >= 0 else (n < 0))
    scores, factor = torch.einsum("bmhd,bnhd->bhmn", q.float(), k.float()) * scale, 1.0
    if softcap > 0:
        tanh = (scores / softcap).tanh()
        scores, factor = softcap * tanh, 1 - tanh**2
    if slopes is not None:
        is_causal = right == 0 and not 0 <= left < k.shape[1]
        distance = n if is_causal else -(m - n).abs()
        scores = scores + slopes[..., None, None] * distance
    return scores.masked_fill(hidden, -math.inf), factor


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    scale: float,
    causal: bool,
    left: int = -1,
    right: int = -1,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    *_: Any,
) -> Any:
    scores, _ = scores_of(q, k, scale, causal, left, right, softcap, slopes)
    lse = scores.logsumexp(-1)
    lse = lse.where(lse != -math.inf, math.inf)  # of a query that sees no key
    out = torch.einsum("bhmn,bnhd->bmhd", (scores - lse[..., None]).exp(), v.repeat_interleave(q.shape[2] // v.shape[2], 2).float())
    return out.to(q.dtype).contiguous(), lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dq: Any, dk: Any, dv: Any, *rest: Any
) -> Tensor:
    scores, factor = scores_of(q, k, *rest[1:7])
    probabilities, group, scale = (scores - lse[..., None]).exp(), q.shape[2] // k.shape[2], rest[1]
    keys, values = (x.repeat_interleave(group, 2).float() for x in (k, v))
    delta = (dout.float() * out.float()).sum(-1).transpose(1, 2)[..., None]
    grad_scores = probabilities * (torch.einsum("bmhd,bnhd->bhmn", dout.float(), values) - delta) * factor * scale
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


def of_sequence(options: Sequence[Any], number: int) -> list[Any]:
    """With the sequence's own slopes, where each has some."""
    return [x[number] if isinstance(x, Tensor) and x.dim() == 2 else x for x in options]


def varlen_forward(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *options: Any) -> Any:
    out, lse = torch.zeros_like(q), torch.full((q.shape[1], q.shape[0]), math.inf)
    for number, (of_q, of_k) in enumerate(ranges(cu_q, cu_k)):
        made = forward(q[None, of_q], k[None, of_k], v[None, of_k], *of_sequence(options, number))
        out[of_q], lse[:, of_q] = made[0][0], made[1][0]
    return out, lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64)


def varlen_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any) -> Tensor:
    dq, dk, dv, cu_q, cu_k, _, _, *options = rest
    for number, (of_q, of_k) in enumerate(ranges(cu_q, cu_k)):
        tensors = dout[None, of_q], q[None, of_q], k[None, of_k], v[None, of_k], out[None, of_q], lse[None, :, of_q]
        backward(*tensors, dq[None, of_q], dk[None, of_k], dv[None, of_k], *of_sequence(options, number))
    return varlen_backward_fake(dout, q)


def varlen_forward_fake(q: Tensor, *_: Any) -> tuple[Tensor, ...]:
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse, q.new_empty(0), q.new_empty(2, dtype=torch.int64)


def varlen_backward_fake(dout: Tensor, q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape[1], q.shape[0] + 128, dtype=torch.float32)


LIBRARIES = []


def define(namespace: str, kind: str, schema: str, kernel: Any, fake: Any) -> None:
    """Defines an op."""
    LIBRARIES.append(library := torch.library.Library(namespace, "FRAGMENT"))
    library.define(f"_flash_attn_{kind}{schema}")
    library.impl(f"_flash_attn_{kind}", kernel, "CPU")
    torch.library.register_fake(f"{namespace}::_flash_attn_{kind}", fake, lib=library)


for kernel, fake in (
    (forward, forward_fake),
    (backward, backward_fake),
    (varlen_forward, varlen_forward_fake),
    (varlen_backward, varlen_backward_fake),
):
    kind, schema = kernel.__name__, SCHEMAS[kernel.__name__]
    for namespace in ("flash_attn", HUB_2):
        define(namespace, kind, schema, kernel, fake)
    define(ANOTHER, kind, schema.replace(") ->", ", Tensor? sink=None) ->"), kernel, fake)
define(WITHOUT_FORWARD, "backward", SCHEMAS["backward"], backward, backward_fake)


class Attention(torch.autograd.Function):
    """Of packed or separate tensors; gradients are written where the package writes them. sequences: () for dense ones."""

    @staticmethod
    def forward(ctx: Any, sequences: tuple[Any, ...], deterministic: bool, options: dict[str, Any], *tensors: Tensor) -> Tensor:
        q, k, v = separated(tensors, len(sequences) > 0)
        scale = options["scale"] or q.shape[-1] ** -0.5
        given = options["dropout_p"], scale, options["causal"], *options["window"], options["softcap"], options["alibi_slopes"]
        ops = getattr(torch.ops, options["namespace"])
        of_forward = torch.ops.flash_attn if options["namespace"] == WITHOUT_FORWARD else ops
        op = of_forward._flash_attn_varlen_forward if sequences else of_forward._flash_attn_forward
        out, lse, _, rng_state = op(q, k, v, *sequences, *given, False)
        ctx.save_for_backward(*tensors, out, lse, rng_state, *sequences[:2])
        ctx.ops, ctx.lengths, ctx.given = ops, sequences[2:], (*given, deterministic)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        is_packed = len(ctx.lengths) > 0
        *tensors, out, lse, rng_state = ctx.saved_tensors[: -2 if is_packed else None]
        made = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors]
        given = dout, *separated(tensors, is_packed), out, lse, *separated(made, is_packed)
        if is_packed:
            sequences = *ctx.saved_tensors[-2:], *ctx.lengths
            ctx.ops._flash_attn_varlen_backward(*given, *sequences, *ctx.given, rng_state, False)
        else:
            ctx.ops._flash_attn_backward(*given, *ctx.given, rng_state)
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


# FlashAttention 3: one op each way, with sequences or without.
NEW = "Tensor? k_new=None, Tensor? v_new=None, Tensor? qv=None, Tensor? out_=None, "
OF_SEQUENCES = "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
LENGTHS = "SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, "
CACHE = (
    "Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, Tensor? rotary_sin=None, "
)
SCALES = "Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, "
WINDOW = "SymInt window_size_left=-1, SymInt window_size_right=-1, "
SCHEMAS_3 = {
    "forward": f"(Tensor q, Tensor k, Tensor v, {NEW}{OF_SEQUENCES}Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, "
    f"Tensor? seqused_k=None, {LENGTHS}{CACHE}{SCALES}float? softmax_scale=None, bool causal=False, {WINDOW}"
    "SymInt attention_chunk=0, float softcap=0., bool rotary_interleaved=True, Tensor? scheduler_metadata=None, "
    "SymInt num_splits=1, bool? pack_gqa=None, SymInt sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor)",
    "backward": f"({READ}{OF_SEQUENCES}Tensor? sequed_q=None, Tensor? sequed_k=None, {LENGTHS}Tensor(a12!)? dq=None, "
    f"Tensor(a13!)? dk=None, Tensor(a14!)? dv=None, float? softmax_scale=None, bool is_causal=False, {WINDOW}float softcap=0., "
    "bool deterministic=False, SymInt sm_margin=0) -> Tensor",
}


def _named(kind: str, args: Any, given: dict[str, Any]) -> dict[str, Any]:
    arguments = getattr(torch.ops.flash_attn_3, f"_flash_attn_{kind}").default._schema.arguments
    return {x.name: x.default_value for x in arguments} | dict(zip((x.name for x in arguments), args, strict=False)) | given


def _options(named: dict[str, Any], causal: str) -> tuple[Any, ...]:
    scale = named["softmax_scale"] or named["q"].shape[-1] ** -0.5
    return 0.0, scale, named[causal], named["window_size_left"], named["window_size_right"], named["softcap"], None


def forward_3(*args: Any, **given: Any) -> tuple[Tensor, ...]:
    named, q = _named("forward", args, given), args[0]
    sequences = [named[name] for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")]
    is_packed = sequences[0] is not None
    kernel = varlen_forward if is_packed else forward
    out, lse, *_ = kernel(*args[:3], *(sequences if is_packed else ()), *_options(named, "causal"), False)
    return out, lse, q.new_empty(0), q.new_empty(0)


def backward_3(*args: Any, **given: Any) -> Tensor:
    named, q = _named("backward", args, given), args[1]
    sequences = [named[name] for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")]
    is_packed = sequences[0] is not None
    written = named["dq"], named["dk"], named["dv"]
    kernel = varlen_backward if is_packed else backward
    kernel(*args[:6], *written, *(sequences if is_packed else ()), *_options(named, "is_causal"))
    return q.new_empty(0, dtype=torch.float32)


def forward_3_fake(q: Tensor, *args: Any, **_: Any) -> tuple[Tensor, ...]:
    shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])
    lse = q.new_empty(shape, dtype=torch.float32)
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse, q.new_empty(0), q.new_empty(0)


def backward_3_fake(dout: Tensor, *_: Any, **__: Any) -> Tensor:
    return dout.new_empty(0, dtype=torch.float32)


for namespace in ("flash_attn_3", HUB_3):
    define(namespace, "forward", SCHEMAS_3["forward"], forward_3, forward_3_fake)
    define(namespace, "backward", SCHEMAS_3["backward"], backward_3, backward_3_fake)


class Attention3(torch.autograd.Function):
    """forwards: further arguments of the forward alone, such as qv."""

    @staticmethod
    def forward(
        ctx: Any, sequences: tuple[Any, ...], forwards: dict[str, Any], options: dict[str, Any], *tensors: Tensor
    ) -> Tensor:
        causal, window = options.get("causal", False), options.get("window", (-1, -1))
        cu_q, cu_k, max_q, max_k = sequences or (None,) * 4
        lengths: dict[str, Any] = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k}
        sides = {"window_size_left": window[0], "window_size_right": window[1]}
        softcap = options.get("softcap", 0.0)
        given = {**lengths, "causal": causal, **sides, "softcap": softcap, **forwards}
        ctx.ops = getattr(torch.ops, options.get("namespace", "flash_attn_3"))
        out, lse, *_ = ctx.ops._flash_attn_forward(*tensors, **given)
        ctx.save_for_backward(*tensors, out, lse, *(x for x in (cu_q, cu_k) if x is not None))
        ctx.lengths, ctx.given = (max_q, max_k), (None, causal, *window, softcap, options.get("deterministic", False), 0)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *offsets = ctx.saved_tensors
        made = [torch.empty_like(x) for x in (q, k, v)]
        offsets = offsets or [None, None]
        given = dout, q, k, v, out, lse, *offsets, None, None, *ctx.lengths, *made, *ctx.given
        ctx.ops._flash_attn_backward(*given)
        return None, None, None, *made


def attend_3(*tensors: Tensor, sequences: tuple[Any, ...] = (), forwards: Any = None, **options: Any) -> Tensor:
    """flash_attn_func and flash_attn_varlen_func of FlashAttention 3."""
    return Attention3.apply(sequences, forwards or {}, options, *tensors)


# What transformers imports of the package.


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
) -> Tensor:
    """The package's, by its arguments."""
    options = {"dropout_p": dropout_p, "scale": softmax_scale, "causal": causal, "window": window_size}
    return attend(q, k, v, deterministic=deterministic, softcap=softcap, alibi_slopes=alibi_slopes, **options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
) -> Tensor:
    """The package's, by its arguments."""
    sequences = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    options = {"dropout_p": dropout_p, "scale": softmax_scale, "causal": causal, "window": window_size}
    return attend(q, k, v, sequences=sequences, deterministic=deterministic, softcap=softcap, alibi_slopes=alibi_slopes, **options)
