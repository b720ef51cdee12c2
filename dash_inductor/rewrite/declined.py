"""Attentions that keep their stock kernel: recorded, warned of or refused with the reason."""

from __future__ import annotations

import logging
import math
import operator
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config

from .. import emulation
from ..config import Config
from ..decision import UNKNOWN, Decision, Declined, LeftToStock, size_text, sizes_in_text
from ..op import FLEX_BACKWARD, MARK, NOTE, Mark
from ..problem import dtype_name
from .autotuned import chosen_by_timing
from .context_parallel import form_of
from .origin import Origin, origin_of
from .stock_ops import CUDNN_JAGGED, HEADS_LAST, arguments, implementation_for

# Settings of Inductor under which nothing is rewritten. Each re-runs kernels with dirty semaphores or made-up tables, or prevents
# sizes from being computed at run time. The last is None where it follows `cpp_wrapper`.
REFUSED = ("benchmark_fusion", "profile_bandwidth", "benchmark_kernel", "cpp_wrapper", "triton.autotune_at_compile_time")
DROPOUT = (
    "train with an attention dropout of 0 (configurations call it attention_dropout, attn_pdrop, attention_probs_dropout_prob or "
    "dropout_rate); dropout elsewhere in the model may stay"
)
REPORT = "report it to dash_inductor with your versions and the traceback in the log; DASH_INDUCTOR=0 switches the package off"

# Of an attention that no op stands for: a gradient in its backward, a node of its forward, and what becomes of it.
WithoutOp = tuple[fx.Node, fx.Node, Decision, Declined]

log = logging.getLogger("dash_inductor")


class UnsupportedAttentionError(RuntimeError):
    """Raised under on_unsupported="error"."""


class InternalErrorWarning(RuntimeWarning):
    """A bug of this package, which an attention survived with its stock kernel."""


class InternalError(Declined):
    """A bug of ours, because of which attentions keep their stock kernels."""

    def __init__(self, bug: Exception, doing: str = "") -> None:
        first_line = next(iter(str(bug).splitlines()), "")
        super().__init__(f"internal error, please report: {doing}{type(bug).__name__}: {first_line}", REPORT)
        self.bug = bug


def why_no_target(device: torch.device) -> Declined | None:
    """The reason that lies in Inductor's settings or in the device, whatever the attention; None if there is none."""
    for name in REFUSED:
        if operator.attrgetter(name)(inductor_config):
            return Declined(f"torch._inductor.config.{name} is on", f"switch it off: torch._inductor.config.{name} = False")
    if device.type == "cpu" and not emulation.active():
        return Declined(
            "the stock op is already deterministic on the CPU (emulation is off)",
            "none needed: on a GPU it is rewritten; DASH_INDUCTOR_EMULATE=1 tries that on the CPU",
        )
    return None


def leave(node: fx.Node, declined: Declined, settings: Config) -> Declined:
    """Leaves a stock backward as it is, and says so: to its decision, and as settings ask to the user. Returns what it said."""
    try:
        decision, origin = decision_of(node, declined), origin_of(node)
    except Exception as bug:  # in what reads a node
        declined = declined if isinstance(declined, InternalError) else InternalError(bug)
        decision, origin = unread(str(node.target), declined), Origin()
    note(first_gradient(node), decision, origin)
    tell(declined, decision, origin, settings)
    return declined


def leave_without_op(op: str, found: Iterable[WithoutOp], settings: Config) -> list[Declined]:
    """Says so of attentions that no op stands for; returns what it said. A bug in finding them is recorded under the name `op`."""
    try:
        attentions = list(found)
    except Exception as bug:
        error = InternalError(bug)
        tell(error, unread(op, error), Origin(), settings)
        return [error]
    for gradient, node, decision, declined in attentions:
        origin = origin_of(node)
        note(gradient, decision, origin)
        tell(declined, decision, origin, settings)
    return [declined for *_, declined in attentions]


def note(gradient: fx.Node | None, decision: Decision, origin: Origin) -> None:
    """Puts a note of the decision behind a gradient of its attention; without a gradient, the attention is dead code.

    The text of the note is in the keys of caches, which do not see a node's meta. So it is without the source line.
    """
    if gradient is None:
        return
    with gradient.graph.inserting_after(gradient):
        noted = gradient.graph.call_function(NOTE, (gradient, decision.text()))
    gradient.replace_all_uses_with(noted, delete_user_cb=lambda user: user is not noted)
    noted.meta = {**gradient.meta, MARK: Mark(source=origin.source, module=origin.module)}


def is_noted(node: fx.Node) -> bool:
    """Whether a backward is declined already."""
    gradient = first_gradient(node)
    return gradient is not None and any(user.target is NOTE for user in gradient.users)


def noted(node: fx.Node) -> Decision:
    """The decision of a note."""
    mark = node.meta[MARK]
    return replace(Decision.of_text(str(node.args[1])), source=mark.source, module=mark.module, joint=mark.joint)


def first_gradient(node: fx.Node) -> fx.Node | None:
    """The first tensor among a node's outputs that somebody uses; None if nobody uses one."""
    outputs = [user for user in node.users if user.target is operator.getitem and user.users]
    for output in sorted(outputs, key=lambda output: output.args[1]):  # type: ignore[arg-type, return-value]
        gradient = output if isinstance(output.meta["val"], torch.Tensor) else first_gradient(output)
        if gradient is not None:
            return gradient
    return None


def tell(declined: Declined, decision: Decision, origin: Origin, settings: Config) -> None:
    """Warns of an attention that is left alone, or raises, if settings say so. Of a bug `report_bug` warns, whatever they say."""
    if settings.on_unsupported == "fallback" or isinstance(declined, LeftToStock) or settings.silences(decision.op):
        return
    place = replace(decision, source=origin.source, module=origin.module).place
    message = f"dash_inductor leaves {decision.op} to the stock kernel: {declined}{f' ({place})' if place else ''}"
    message = f"{message}. Remedy: {declined.remedy}"
    bug = declined.bug if isinstance(declined, InternalError) else None
    if settings.on_unsupported == "error":
        raise UnsupportedAttentionError(f"{message}\n{origin.stack}".rstrip()) from bug
    if bug is None:
        warnings.warn(message, stacklevel=2)


def report_bug(error: InternalError) -> None:
    """One warning, and the traceback in the log."""
    message = f"dash_inductor leaves attentions to their stock kernels: {error}. Remedy: {error.remedy}"
    log.error(message, exc_info=error.bug)
    warnings.warn(message, InternalErrorWarning, stacklevel=2)


def decision_of(node: fx.Node, declined: Declined) -> Decision:
    """What is recorded of a stock backward that stays, its origin apart."""
    named = arguments(node)
    tensors = [named[name].meta["val"] for name in ("query", "key", "value")]
    decision = decision_of_call(
        str(node.target), tensors, mask_of(named), declined, heads_last=node.target in (*HEADS_LAST, CUDNN_JAGGED)
    )
    timed = chosen_by_timing(node, rewritten=False) if node.target is FLEX_BACKWARD else None
    implementation = implementation_for(decision.op, named)
    return replace(decision, implementation=implementation, chosen_by_timing=timed, over_ranks=form_of(node))


def decision_of_call(
    op: str, tensors: Sequence[torch.Tensor], mask: str, declined: Declined, *, heads_last: bool = False
) -> Decision:
    """What is recorded of an op that stays, its origin and its implementation apart; `tensors` are its query, key and value."""
    query, key, value = tensors
    if query.dim() == 3 or heads_last:  # [T, H, D], packed, or [B, S, H, D]
        query, key, value = ((x.unsqueeze(0) if x.dim() == 3 else x).transpose(1, 2) for x in tensors)
    return Decision(
        op=op,
        device=query.device.type,  # and not its index, which ranks of one machine differ in
        dtype=dtype_name(query.dtype),
        mask=mask,
        **_why(declined),
        **sizes_in_text(query.shape, key.shape, value.shape),
    )


def decision_of_scores(op: str, scores: torch.Tensor, dtype: str, head_dim: int | str, declined: Declined) -> Decision:
    """What is recorded of matmuls and a softmax that stay, by their scores, [B, H, S_q, S_k] with more dimensions or fewer."""
    *batch, heads, q_len, kv_len = scores.shape if scores.dim() > 3 else (1, 1, *scores.shape)[-4:]
    return Decision(
        op=op,
        device=scores.device.type,
        dtype=dtype,
        mask=UNKNOWN,
        batch=size_text(math.prod(batch)),
        heads=size_text(heads),
        kv_heads=size_text(heads),  # as the matmuls see them
        q_len=size_text(q_len),
        kv_len=size_text(kv_len),
        head_dim=head_dim,
        **_why(declined),
    )


def unread(op: str, declined: Declined) -> Decision:
    """What is recorded of an attention of which nothing else is known."""
    names = "device", "dtype", "mask", "batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim"
    nothing: dict[str, Any] = dict.fromkeys(names, UNKNOWN)
    return Decision(op, **nothing, **_why(declined))


def _why(declined: Declined) -> dict[str, Any]:
    left_to = declined.implementation if isinstance(declined, LeftToStock) else None
    return {"reason": str(declined), "remedy": declined.remedy, "stock_differs": declined.stock_differs, "left_to": left_to}


def mask_of(named: Mapping[str, Any]) -> str:
    """The kind of mask that an op has, by its arguments."""
    if "block_mask" in named:
        return "block_mask"
    if "cu_seq_q" in named or any(named.get(name) is not None for name in ("cum_seq_q", "cu_seqlens_q")):
        return "varlen"
    if any(named.get(name) is not None for name in ("attn_mask", "attn_bias", "bias")):
        return "given"
    return "causal" if named.get("is_causal") or named.get("custom_mask_type") else "full"
