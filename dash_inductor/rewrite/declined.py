"""Attentions that keep their stock kernel: marked by the pass, recorded, warned of or refused with the reason."""

from __future__ import annotations

import functools
import operator
import warnings
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config

from .. import emulation
from ..config import Config, ready
from ..decision import ORIGIN, Decision, sizes_in_text
from ..hooks.cache_key import key
from ..hooks.failed import why_failed
from ..hooks.installed import is_installed
from ..problem import dtype_name
from .origin import mark_origin, stack_of
from .stock_ops import JAGGED, TARGETS, arguments

# Settings of Inductor under which nothing is rewritten. Each runs a kernel again on what its semaphores were left with, or before
# that on made-up tables, or keeps sizes from being computed at run time. The last is None where it follows `cpp_wrapper`.
REFUSED = ("benchmark_fusion", "profile_bandwidth", "benchmark_kernel", "cpp_wrapper", "triton.autotune_at_compile_time")
# Keys in a node's meta.
DECLINED = "dash_declined"  # the reason
DECIDED_UNDER = "dash_decided_under"  # `key()` when the node was rewritten


def why_no_target(device: torch.device) -> str | None:
    """The reason that lies in Inductor's settings or in the device, whatever the attention; None if there is none."""
    for name in REFUSED:
        if operator.attrgetter(name)(inductor_config):
            return f"torch._inductor.config.{name} is on"
    if device.type == "cpu" and not emulation.active():
        return "the stock op is already deterministic on the CPU (emulation is off)"
    return why_failed()


class UnsupportedAttentionError(RuntimeError):
    """Raised under on_unsupported="error"."""


def leave(node: fx.Node, reason: str, settings: Config, *, unsupported: bool = True) -> None:
    """Marks the node for the lowering, which records the reason; warns or raises if it is unsupported and settings say so."""
    node.meta[DECLINED] = reason
    mark_origin(node)
    if unsupported:
        say(_decision_of(node), stack_of(node), settings)


def say(decision: Decision, stack: str, settings: Config) -> None:
    """Warns of an attention that is left alone, or raises, if settings say so."""
    if settings.on_unsupported == "fallback":
        return
    place = f" ({decision.place})" if decision.place else ""
    remedy = f". Remedy: {decision.remedy}" if decision.remedy else ""
    message = f"dash_inductor leaves {decision.op} to the stock kernel: {decision.reason}{place}{remedy}"
    if settings.on_unsupported == "error":
        raise UnsupportedAttentionError(f"{message}\n{stack}")
    warnings.warn(message, stacklevel=2)


def is_on() -> bool:
    """Whether attentions are decided on; raises what is wrong with the settings."""
    if not ready().enabled or not torch.are_deterministic_algorithms_enabled():
        return False
    _prepare_lowering()
    return True


@functools.cache
def _prepare_lowering() -> None:
    """Imports the lowering, lazily since it needs the whole of Inductor, and tells it what only the pass knows of nodes."""
    from ..lowering import flex, header, stock

    flex.take_over()
    header.checks.append(_require_same_settings)
    stock.record_declined(TARGETS, decision_of)


def _require_same_settings(node: fx.Node) -> None:
    """Raises if the settings are not those under which the pass rewrote the node: caches would take the code for theirs."""
    decided_under = node.meta.get(DECIDED_UNDER)
    if decided_under is not None and not (is_installed() and decided_under == key()):
        raise RuntimeError(
            "dash_inductor was disabled, or its settings were changed, between the forward and the first backward of a graph "
            "(torch's SM carve-out is one of them): "
            "run the backward before that, or compile with backend='dash' or inside `with dash_inductor.enabled()`"
        )


def decision_of(node: fx.Node) -> Decision | None:
    """What is recorded of a stock op that is lowered; None if nobody declined it."""
    return _decision_of(node) if DECLINED in node.meta else None


def _decision_of(node: fx.Node) -> Decision:
    named = arguments(node)
    query, key, value = (named[name].meta["val"] for name in ("query", "key", "value"))
    if query.dim() == 3 or node.target in JAGGED:  # [T, H, D], packed, or [B, S, H, D]
        query, key, value = ((x.unsqueeze(0) if x.dim() == 3 else x).transpose(1, 2) for x in (query, key, value))
    return Decision(
        op=str(node.target),
        device=str(query.device),
        dtype=dtype_name(query.dtype),
        mask=_mask(named),
        reason=node.meta[DECLINED],
        **sizes_in_text(query.shape, key.shape, value.shape),
        **node.meta[ORIGIN],
    )


def _mask(named: dict[str, Any]) -> str:
    if "block_mask" in named:
        return "block_mask"
    if "cu_seq_q" in named:
        return "varlen"
    if any(named.get(name) is not None for name in ("attn_mask", "attn_bias", "bias")):
        return "given"
    return "causal" if named.get("is_causal") or named.get("custom_mask_type") else "full"
