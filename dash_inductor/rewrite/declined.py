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
from ..config import Config, current
from ..decision import Decision, sizes_in_text
from ..problem import dtype_name
from .cache_key import key
from .installed import is_installed
from .stock_ops import TARGETS, arguments

# Keys in a node's meta.
DECLINED = "dash_declined"  # the reason
DECIDED_UNDER = "dash_decided_under"  # `key()` when the node was rewritten


def why_no_target(device: torch.device) -> str | None:
    """The reason that lies in Inductor's settings or in the device, whatever the attention; None if there is none."""
    # Each of these runs a kernel again on what its semaphores were left with, or before that on made-up tables, or keeps sizes from
    # being computed at run time. None of the last means that it is on where `cpp_wrapper` is.
    for name in ("benchmark_fusion", "profile_bandwidth", "benchmark_kernel", "cpp_wrapper", "triton.autotune_at_compile_time"):
        if operator.attrgetter(name)(inductor_config):
            return f"torch._inductor.config.{name} is on"
    if device.type == "cpu" and not emulation.active():
        return "the stock op is already deterministic on the CPU (emulation is off)"
    return None


class UnsupportedAttentionError(RuntimeError):
    """Raised under on_unsupported="error"."""


def leave(node: fx.Node, reason: str, settings: Config, *, unsupported: bool = True) -> None:
    """Marks the node for the lowering, which records the reason; warns or raises if it is unsupported and settings say so."""
    node.meta[DECLINED] = reason
    if settings.on_unsupported == "fallback" or not unsupported:
        return
    message = f"dash_inductor leaves {node.target} to the stock kernel: {reason}"
    if settings.on_unsupported == "error":
        raise UnsupportedAttentionError(f"{message}\n{_user_stack(node)}")
    warnings.warn(message, stacklevel=2)


def _user_stack(node: fx.Node) -> str:
    """Where the user called SDPA: known to the backward node itself or to the forward node that made its `out`."""
    out = arguments(node)["out"]
    for candidate in (node, out, *(out.all_input_nodes if isinstance(out, fx.Node) else ())):
        if isinstance(candidate, fx.Node) and candidate.stack_trace:
            return candidate.stack_trace
    return "(no stack trace was recorded)"


@functools.cache
def prepare_lowering() -> None:
    """Imports the lowering, lazily since it needs the whole of Inductor, and tells it what only the pass knows of nodes."""
    from ..lowering import flex, header, stock

    flex.take_over()
    header.checks.append(_require_same_settings)
    stock.record_declined(TARGETS, _decision)


def _require_same_settings(node: fx.Node) -> None:
    """Raises if the settings are not those under which the pass rewrote the node: caches would take the code for theirs."""
    decided_under = node.meta.get(DECIDED_UNDER)
    if decided_under is not None and not (is_installed() and decided_under == key()):
        raise RuntimeError(
            "dash_inductor was disabled, or its settings were changed, between the forward and the first backward of a graph "
            "(torch's SM carve-out is one of them): "
            "run the backward before that, or compile with backend='dash' or inside `with dash_inductor.enabled()`"
        )


def _decision(node: fx.Node) -> Decision | None:
    """What is recorded of a stock op that is lowered; None if nobody declined it."""
    if DECLINED not in node.meta and _passed_over():
        leave(node, "torch._inductor.config.pattern_matcher is off", current())
    if DECLINED not in node.meta:
        return None
    named = arguments(node)
    query, key = named["query"].meta["val"], named["key"].meta["val"]
    sizes = [[1, x.shape[1], x.shape[0], x.shape[2]] if x.dim() == 3 else x.shape for x in (query, key)]  # 3: [T, H, D], packed
    return Decision(
        op=str(node.target),
        device=str(query.device),
        dtype=dtype_name(query.dtype),
        mask=_mask(named),
        reason=node.meta[DECLINED],
        **sizes_in_text(*sizes),
    )


def _mask(named: dict[str, Any]) -> str:
    if "block_mask" in named:
        return "block_mask"
    if "cu_seq_q" in named:
        return "varlen"
    if any(named.get(name) is not None for name in ("attn_mask", "attn_bias")):
        return "given"
    return "causal" if named["is_causal"] else "full"


def _passed_over() -> bool:
    """Whether Inductor left out the pass, which would have met this node."""
    on = is_installed() and current().enabled and torch.are_deterministic_algorithms_enabled()
    return on and not inductor_config.pattern_matcher
