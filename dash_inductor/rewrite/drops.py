"""Attention dropout: what a stock forward drops, and whether that is what our kernels take it for, asked of the forward itself.

With a value that is a part of the identity, `out` is a part of the probabilities: zero where an element was dropped. That is
compared with `dropout.kept` bit for bit, once in a process for each kind of attention on a device, before the first one is
rewritten; generated code asks again when it is loaded. Where there is no device to ask, dropout is declined.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..decision import Declined, is_of_torch
from ..devices import target
from ..dropout import EFFICIENT as OF_EFFICIENT
from ..dropout import FLASH as OF_FLASH
from ..dropout import MOST_SCORES, Dropout, kept
from ..op import random_state
from .declined import DROPOUT
from .probe import REPORT
from .stock_ops import SDPA_OPS, SdpaBackward

aten = torch.ops.aten

ITS_OWN = "its random bits have a layout that only the stock op knows"
NOT_ASKED = "whether its random bits are ours is asked of the GPU before its first use, and there is none here"
GENERATORS = {op: known.generator for op, known in SDPA_OPS.items() if known.generator}
SHAPES = ((2, 2, 70, 165), (1, 3, 131, 132))  # [B, H, S_q, S_k]: more than a tile of any kernel, and no multiple of one
SEED = 2**41 + 3 * 2**20 + 5  # both words of the key count
ALLOWED = 0.03  # by which logsumexp may be off, and what is kept, of the whole: bf16 rounds by 0.004, several times


def dropout_of(stock: SdpaBackward) -> Dropout | None:
    """What its forward dropped; None for nothing. Comparing symbolic sizes guards.

    Raises:
        Declined: our kernels have no such dropout.
    """
    if stock.dropout_p == 0.0:
        return None
    said = f"dropout_p={stock.dropout_p}"
    if stock.op not in GENERATORS or not is_of_torch(str(stock.called)):  # another package's forward is not asked
        raise Declined(f"{said}: {ITS_OWN}", DROPOUT)
    if not isinstance(stock.dropout_p, float) or not 0 < stock.dropout_p < 1:
        raise Declined(f"{said} is not between 0 and 1", "train with a dropout that keeps something")
    generator = GENERATORS[stock.op]
    if not _is_state(generator, [getattr(x, "meta", {}).get("val") for x in stock.random]):
        raise Declined(f"{said}: its seed and offset are not those of this torch's forward", REPORT)
    (batch, heads, q_len), kv_len = stock.query.meta["val"].shape[:3], stock.key.meta["val"].shape[2]
    if generator == OF_EFFICIENT and batch * heads * q_len * kv_len >= MOST_SCORES:
        shape = f"batch {batch}, {heads} heads, S_q={q_len}, S_k={kv_len}"
        raise Declined(f"{said} of {shape}: the stock op counts scores in 32 bits", "take a smaller batch, or flash attention")
    return Dropout(stock.dropout_p, generator)


def _is_state(generator: str, random: Sequence[Any]) -> bool:
    """Whether these are two numbers of 64 bits, or flash attention's [2]."""
    if not all(isinstance(x, Tensor) and x.dtype in (torch.int64, torch.uint64) for x in random):
        return False
    seed, offset = random
    return (generator == OF_FLASH and tuple(seed.shape) == (2,)) or (seed.dim() == 0 and offset.dim() == 0)


def why_bits_unknown(stock: SdpaBackward, dropout: Dropout) -> Declined | None:
    """Why our kernels cannot know what the forward dropped; None where they do."""
    said = f"dropout_p={dropout.p}"
    if not target.is_there(stock.query.meta["val"].device):
        return Declined(f"{said}: {NOT_ASKED}", f"none needed on a GPU where its bits are ours; else {DROPOUT}")
    seen = _asked(*_question(stock, dropout))
    return Declined(f"{said}: {seen}", f"{DROPOUT}; and {REPORT}") if seen else None


def bits_at_load(stock: SdpaBackward, dropout: Dropout) -> str:
    """The line of generated code that asks again."""
    return f"from {__name__} import require as _require_bits; _require_bits{_question(stock, dropout)}"


def require(*question: Any) -> None:
    """Called by generated code when it is loaded; RuntimeError where the forward drops other elements here than its backward."""
    if reason := _asked(*question):
        raise RuntimeError(
            f"dash_inductor wrote this code for an attention with dropout, whose forward here drops other elements: {reason}. "
            "Delete Inductor's cache, or switch dash_inductor off (DASH_INDUCTOR=0)"
        )


def _question(stock: SdpaBackward, dropout: Dropout) -> tuple[Any, ...]:
    query, value = (x.meta["val"] for x in (stock.query, stock.value))
    kind = bool(stock.is_causal), stock.attn_mask is not None
    dims = int(query.shape[3]), int(value.shape[3])
    return dropout.generator, dropout.p, kind, str(query.dtype).removeprefix("torch."), dims, str(query.device)


def _asked(generator: str, p: float, kind: tuple[bool, bool], dtype: str, dims: tuple[int, int], device: str) -> str | None:
    if not target.is_there(torch.device(device)):
        return None
    reason = _asked_once(generator, p, kind, dtype, dims, device)
    return reason and f"{reason} (seen of the {generator} forward in {dtype} on {device})"


@functools.cache
def _asked_once(generator: str, p: float, kind: tuple[bool, bool], dtype: str, dims: tuple[int, int], device: str) -> str | None:
    forked = [torch.device(device)] if device != "cpu" else []
    # While a graph is compiled, or loaded: its fake tensors, its tracing and its random numbers are not ours.
    with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng(forked):
        dropout, like = Dropout(p, generator), torch.empty(0, dtype=getattr(torch, dtype), device=device)
        return bits_seen(FORWARDS[generator], dropout, kind, dims, like)


def _efficient(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, p: float, is_causal: bool) -> tuple[Tensor, ...]:
    return aten._scaled_dot_product_efficient_attention.default(query, key, value, bias, True, p, is_causal)


def _flash(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, p: float, is_causal: bool) -> tuple[Tensor, ...]:
    out, lse, *_, seed, offset, _ = aten._scaled_dot_product_flash_attention.default(query, key, value, p, is_causal)
    return out, lse, seed, offset


FORWARDS: dict[str, Callable[..., tuple[Tensor, ...]]] = {OF_EFFICIENT: _efficient, OF_FLASH: _flash}


def bits_seen(
    forward: Callable[..., tuple[Tensor, ...]], dropout: Dropout, kind: tuple[bool, bool], dims: tuple[int, int], like: Tensor
) -> str | None:
    """What is seen of elements that a forward drops that is not as `dropout.kept` has it, or None.

    forward: of (query, key, value, bias, p, is_causal), returns out, logsumexp, seed and offset. kind: whether it is causal, and
    whether it has a bias. dims: of query and key, and of value. like: of its dtype and device.
    """
    is_causal, biased = kind
    try:
        for shape in SHAPES:
            batch, heads, q_len, kv_len = (*shape[:2], shape[3], shape[3]) if is_causal else shape
            query, key = (like.new_zeros(batch, n, heads, dims[0]).transpose(1, 2) for n in (q_len, kv_len))
            bias = like.new_zeros(batch, heads, q_len, kv_len + -kv_len % 16)[..., :kv_len] if biased else None
            seen = torch.ones(q_len, kv_len, dtype=torch.bool)
            seen = seen.tril() if is_causal else seen
            state, ours = torch.empty(0), seen
            for first in range(0, kv_len, dims[1]):
                _generator(like.device).manual_seed(SEED + kv_len)  # not torch's, which seeds every device
                identity = torch.eye(kv_len, dtype=like.dtype)[:, first : first + dims[1]]
                identity = torch.nn.functional.pad(identity, (0, dims[1] - identity.shape[1])).to(like.device)
                value = identity[:, None].expand(batch, kv_len, heads, dims[1]).contiguous().transpose(1, 2)
                out, lse, *random = forward(query, key, value, bias, dropout.p, is_causal)
                last, state = state, random_state(random[0], random[1], out).cpu()
                if not torch.equal(last, state):
                    ours = kept(dropout, state, (batch, heads, q_len, kv_len)) & seen
                part = ours[..., first : first + dims[1]]
                weights = (out.double().cpu() * seen.sum(-1, keepdim=True))[..., : part.shape[-1]]
                off = lse[..., :q_len].double().cpu() - seen.sum(-1).double().log()
                if reason := _difference(weights, part, dropout.scale(like.dtype), first, off):
                    return reason
    except torch.OutOfMemoryError:
        raise  # which says nothing about the op
    except RuntimeError as error:
        return f"a forward that drops raises {type(error).__name__}: {str(error).splitlines()[0]}"
    return None


def _generator(device: torch.device) -> torch.Generator:
    """By which an op on the device draws."""
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def _difference(weights: Tensor, ours: Tensor, scale: float, first: int, off: Tensor) -> str | None:
    if not (off.abs() <= ALLOWED).all():
        return f"logsumexp is off by {off.abs().max().item():.3g}"
    differs = (weights != 0) != ours
    if differs.any():
        b, h, m, n = differs.nonzero()[0].tolist()
        count = f"{int(differs.sum())} of {ours.numel()}"
        return f"{count} elements are dropped where ours are not, or kept, as [{b}, {h}, {m}, {n + first}]"
    right = (weights[ours] / scale - 1).abs() <= ALLOWED
    return None if right.all() else f"what is kept is not multiplied with {scale:.4g}"
