"""Whether the forward of a stock op leaves what our backward takes: asked of the op itself, by a tiny attention.

No interface promises the layout and base of its logsumexp, or where its causal mask begins. So each kind of attention is tried once
in a process, for a device and dtype, before the first one is rewritten; generated code asks again when it is loaded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from ..decision import Declined, is_of_torch
from ..devices import target
from ..reference import LOG2E
from .stock_ops import PADDED, SDPA, SDPA_OPS, SdpaBackward, active_implementation, forward_of, implementation_of

BATCH, HEADS, Q_LEN, KV_LEN, HEAD_DIM = 1, 2, 40, 80, 64  # no length is a multiple of 32
WITHOUT_KEYS = [0, 17, 39]  # rows of the mask that is tried
ALLOWED = 0.01  # by which a logsumexp in fp32 may be off; another base, or a key more or less, makes tenths
# Kinds of attention, each of which is tried by itself: an op need not have all. CAUSAL is of equal lengths and TOP_LEFT of others,
# MASKED is by a tensor, with rows that see no key.
FULL, CAUSAL, TOP_LEFT, MASKED = KINDS = ("full", "causal", "top_left", "masked")
# And what flash_attn makes of scores, each with "causal" or without: the kind of its ScoreFunction.
SOFT_CAP, ALIBI = "soft-cap", "alibi"
CAP, SLOPES = 2.0, (0.02, 0.01)
LARGER = 64  # by which queries are multiplied for scores that the soft-cap bends
REPORT = "report it to dash_inductor with your versions, and take flash attention until then (sdpa_kernel)"


WITHOUT_DEFAULTS = {
    **{"dropout_p": 0.0, "softmax_scale": 1 / math.sqrt(HEAD_DIM), "window_size_left": -1, "window_size_right": -1},
    **{"softcap": 0.0, "alibi_slopes": None, "return_softmax": False},
}


def _of_flash_attn(
    defaults: dict[str, Any], op: OpOverload, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """A forward of flash_attn, as `probe` calls one. defaults: of arguments that have none."""
    tensors = (x.transpose(1, 2) for x in (query, key, value))
    out, lse, *_ = op(*tensors, causal=rest[-1], **defaults | options)
    return out.transpose(1, 2), lse.unsqueeze(-1)


FORWARDS: dict[str, Callable[..., Any]] = {str(op): known.forward for op, known in SDPA_OPS.items() if known.forward}
IS_PADDED = {str(op) for op, known in SDPA_OPS.items() if known.logsumexp == PADDED}
OF_PACKAGES: dict[str, Callable[..., Any]] = {
    "FA2": functools.partial(_of_flash_attn, WITHOUT_DEFAULTS),
    "FA3": functools.partial(_of_flash_attn, {}),
}


def forward_asked(op: str) -> Callable[..., Any] | None:
    """The forward of a backward's op, as `probe` calls one; None for one that is not asked."""
    if is_of_torch(op):
        return FORWARDS.get(op)
    namespace, name, overload = op.split(".")
    backward = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    implementation, of_package = implementation_of(backward), forward_of(backward)
    return functools.partial(OF_PACKAGES[implementation], of_package) if implementation and of_package else None


def kind_of(stock: SdpaBackward) -> str:
    """The kind of an attention; comparing symbolic lengths guards."""
    if stock.attn_mask is not None:
        return MASKED
    if stock.scores is not None:
        return stock.scores.kind
    if not stock.is_causal or stock.window is not None:  # of a window the rest is asked
        return FULL
    return CAUSAL if stock.query.meta["val"].shape[2] == stock.key.meta["val"].shape[2] else TOP_LEFT


def why_distrusted(stock: SdpaBackward) -> Declined | None:
    """What was seen of the op's forward that our backward cannot take; None where all is well, or where there is no such device."""
    seen = _probed(*_question(stock)) if forward_asked(_op(stock)) else None
    return Declined(seen, REPORT) if seen else None


def line_at_load(stock: SdpaBackward) -> str | None:
    """The line of generated code that asks again; None for an op that is not probed."""
    if forward_asked(_op(stock)) is None:
        return None
    return f"from {__name__} import require as _require; _require{_question(stock)}"


def require(op: str, kind: str, dtype: str, device: str) -> None:
    """Called by generated code when it is loaded; RuntimeError where its backward would not fit the forward."""
    if reason := _probed(op, kind, dtype, device):
        raise RuntimeError(
            f"dash_inductor wrote this code in the place of {op}, whose forward here is another: {reason}. "
            "Delete Inductor's cache, or switch dash_inductor off (DASH_INDUCTOR=0)"
        )


def _op(stock: SdpaBackward) -> str:
    """The op whose forward is asked. Those below SDPA's have the same as SDPA's; of matmuls the graph itself has the logsumexp."""
    return str(stock.called if stock.called is SDPA or not is_of_torch(str(stock.called)) else stock.op)


def _question(stock: SdpaBackward) -> tuple[str, str, str, str]:
    query = stock.query.meta["val"]
    return _op(stock), kind_of(stock), str(query.dtype).removeprefix("torch."), str(query.device)


def _probed(op: str, kind: str, dtype: str, device: str) -> str | None:
    if not target.is_there(torch.device(device)):
        return None
    reason = _probed_once(op, kind, dtype, device, active_implementation())
    return reason and f"{reason} (seen of the forward of {op} in {dtype} on {device})"


@functools.cache
def _probed_once(op: str, kind: str, dtype: str, device: str, implementation: str | None) -> str | None:
    forked = [torch.device(device)] if device != "cpu" else []
    # While a graph is compiled, or loaded: its fake tensors, its tracing and its random numbers are not ours.
    with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng(forked):
        forward = forward_asked(op)
        assert forward
        return probe(forward, kind, getattr(torch, dtype), torch.device(device), padded=op in IS_PADDED)


def probe(forward: Callable[..., Any], kind: str, dtype: torch.dtype, device: torch.device, *, padded: bool) -> str | None:
    """What is seen of an attention of the kind that is not as it should be, or None.

    Args:
        forward: of (query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal), returns (out, logsumexp, ...). Its
            logsumexp should be natural, fp32, [B, H, S_q] padded to a multiple of 32, or [B, H, S_q, 1] where not `padded`. Our
            kernels select what a mask shows, so that rows that see no key may have any logsumexp; but `out` must be finite there.
    """
    is_causal = kind.startswith(CAUSAL)  # of equal lengths
    q_len = KV_LEN if is_causal else Q_LEN
    query, key, value = (_wave(n, seed, dtype, device) for seed, n in enumerate((q_len, KV_LEN, KV_LEN)))
    query = query * LARGER if SOFT_CAP in kind else query
    seen = torch.ones(q_len, KV_LEN, dtype=torch.bool)
    if is_causal or kind == TOP_LEFT:
        seen = seen.tril()
    if kind == MASKED:
        seen = seen.tril(KV_LEN // 2)
        seen[WITHOUT_KEYS] = False
    masked = torch.zeros(BATCH, HEADS, *seen.shape, dtype=dtype).masked_fill(~seen, -math.inf)  # as SDPA makes of a boolean mask
    bias = masked.to(device) if kind == MASKED else None
    options: dict[str, Any] = {"softcap": CAP} if SOFT_CAP in kind else {}
    options |= {"alibi_slopes": torch.tensor(SLOPES, device=device)} if ALIBI in kind else {}
    try:
        out, lse, *_ = forward(query, key, value, bias, True, 0.0, is_causal or kind == TOP_LEFT, **options)
        out, lse = out.double().cpu(), lse.cpu()
    except torch.OutOfMemoryError:
        raise  # which says nothing about the op
    except RuntimeError as error:
        return f"a {kind} attention raises {type(error).__name__}: {str(error).splitlines()[0]}"
    shape = (BATCH, HEADS, -(-q_len // 32) * 32) if padded else (BATCH, HEADS, q_len, 1)
    if tuple(lse.shape) != shape or lse.dtype != torch.float32:
        return f"logsumexp is {lse.dtype} {list(lse.shape)}, not torch.float32 {list(shape)}"
    scores = _modified(query.double().cpu() @ key.double().cpu().mT / math.sqrt(HEAD_DIM), kind)
    return _difference(out, lse.double().flatten(2)[..., :q_len], scores, seen)


def _modified(scores: Tensor, kind: str) -> Tensor:
    """The scores after what flash_attn makes of them."""
    if SOFT_CAP in kind:
        scores = CAP * (scores / CAP).tanh()
    if ALIBI in kind:
        m, n = (torch.arange(length) for length in scores.shape[2:])
        distance = n if kind.startswith(CAUSAL) else -(m[:, None] + (len(n) - len(m)) - n).abs()
        scores = scores + torch.tensor(SLOPES, dtype=torch.float64)[:, None, None] * distance
    return scores


def _difference(out: Tensor, lse: Tensor, scores: Tensor, seen: Tensor) -> str | None:
    rows = seen.any(-1)

    def right(factor: float, mask: Tensor) -> bool:
        expected = factor * scores.masked_fill(~mask, -math.inf).logsumexp(-1)
        return bool(((lse - expected)[..., rows].abs() <= ALLOWED).all())

    if right(1, seen):
        return None if out.isfinite().all() else "out is not finite"
    if right(LOG2E, seen):
        return "logsumexp is in base 2"
    if right(1, torch.ones_like(seen).tril(seen.shape[1] - seen.shape[0])):
        return "the causal mask is aligned to the bottom right"
    worst = (lse - scores.masked_fill(~seen, -math.inf).logsumexp(-1))[..., rows].abs().max()
    return f"logsumexp is off by {worst.item():.3g}"


def _wave(length: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[B, H, length, D] with elements in -1..1, [B, length, H, D] in memory as in models; drawn from no generator."""
    count = BATCH * length * HEADS * HEAD_DIM
    values = torch.arange(count, dtype=torch.float64).mul(0.7 + 0.1 * seed).sin()
    return values.view(BATCH, length, HEADS, HEAD_DIM).transpose(1, 2).to(device, dtype)
