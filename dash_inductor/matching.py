"""Finds SDPA backward nodes in a joint graph, and rewrites each one or says why not.

What differs between the ATen ops (argument order, logsumexp's shape, causal alignment) ends here.
"""

from __future__ import annotations

import logging
import operator
import warnings
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.pattern_matcher import CallFunctionVarArgs, Match, PatternMatcherPass, register_graph_pattern
from torch.fx.experimental.symbolic_shapes import is_concrete_int

from . import emulation
from .config import current, ready
from .ops import MASKS
from .reasons import sizes_decline
from .salt import key
from .schedule import TABLE, impossible, too_weak
from .stock_ops import DECIDED_UNDER, DECLINED, FLASH_CPU, TARGETS, UNSUPPORTED, arguments
from .target import target_of, tiles_for

log = logging.getLogger("dash_inductor")


class UnsupportedAttentionError(RuntimeError):
    """Raised under on_unsupported="error"."""


class DashPass(PatternMatcherPass):
    """The pass: does nothing, and costs nothing, unless deterministic mode is on. Raises what is wrong with the settings."""

    def apply(self, gm: Any) -> int:
        if not ready().enabled or not torch.are_deterministic_algorithms_enabled():
            return 0
        # Not earlier: the lowering needs the whole of Inductor.
        from . import lowering  # noqa: F401

        return super().apply(gm)


patterns = DashPass(pass_name="dash_inductor")


def declined(node: fx.Node) -> str | None:
    """The reason to leave an SDPA backward alone, or None. Comparisons of symbolic sizes guard: the answer holds for all shapes."""
    if node.target in UNSUPPORTED:
        return UNSUPPORTED[node.target]
    named = arguments(node)
    if named["dropout_p"] != 0.0:
        return f"dropout_p={named['dropout_p']}"
    if named.get("attn_mask") is not None:
        return "an attention mask"
    if not isinstance(named["scale"], (float, int, type(None))):
        return "a scale that is not a constant"
    query, key, value = (named[name].meta["val"] for name in ("query", "key", "value"))
    return _inductor_declines() or _device_declines(node, query) or _tensors_decline(query, key, value, named["is_causal"])


def _inductor_declines() -> str | None:
    # Each of these runs a kernel again on what its semaphores were left with, or before that on made-up tables, or keeps sizes from
    # being computed at run time. None of the last means that it is on where `cpp_wrapper` is.
    for name in ("benchmark_fusion", "profile_bandwidth", "benchmark_kernel", "cpp_wrapper", "triton.autotune_at_compile_time"):
        if operator.attrgetter(name)(inductor_config):
            return f"torch._inductor.config.{name} is on"
    return None


def _device_declines(node: fx.Node, query: torch.Tensor) -> str | None:
    if query.device.type == "cpu" and not emulation.active():
        return "the stock op is already deterministic on the CPU (emulation is off)"
    if (query.device.type == "cpu") != (node.target is FLASH_CPU):
        return f"{node.target} on device {query.device.type}"
    try:
        tiles_for(target_of(query.device), query.dtype, int(query.shape[3]))
    except ValueError as error:
        return str(error)
    return None


def _tensors_decline(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool) -> str | None:
    if not query.dtype == key.dtype == value.dtype:
        return f"dtypes differ: query {query.dtype}, key {key.dtype}, value {value.dtype}"
    if query.shape[3] != key.shape[3] or query.shape[3] != value.shape[3]:
        return f"head dims differ: query {query.shape[3]}, key {key.shape[3]}, value {value.shape[3]}"
    if any(size == 0 for tensor in (query, key) for size in tensor.shape):
        return "an empty tensor"
    tile = tiles_for(target_of(query.device), query.dtype, int(query.shape[3])).one_pass
    sizes = {"heads": query.shape[1], "q_len": query.shape[2], "kv_len": key.shape[2]}
    reason = sizes_decline(tile, is_causal=is_causal, key_heads=key.shape[1], value_heads=value.shape[1], **sizes)
    if reason is not None or tile is None:
        return reason
    return _schedule_declines(_mask(is_causal), *query.shape[:3], *key.shape[1:3])


def _schedule_declines(mask: str, *sizes: Any) -> str | None:
    settings = current()
    if settings.schedule != TABLE:
        return impossible(mask, settings.guarantee, settings.schedule)
    if not all(map(is_concrete_int, sizes)):
        batch, heads, q_len, kv_heads, kv_len = sizes
        known = f"B={batch}, H={heads}/{kv_heads}, S_q={q_len}, S_k={kv_len}"
        return f"family 'table' is made for static shapes (dynamic=False), not for {known}"
    return too_weak(settings.guarantee, TABLE)


def _mask(is_causal: bool) -> str:
    # Causal alignment differs between the ops only where S_q and S_k do, which is declined.
    return MASKS[1] if is_causal else MASKS[0]


@register_graph_pattern(CallFunctionVarArgs(TARGETS), pass_dict=patterns)
def rewrite(match: Match, *args: Any, **kwargs: Any) -> None:
    node = match.output_node()
    reason = declined(node)
    if reason is not None:
        leave(node, reason)
        return
    named = arguments(node)
    tensors = [named[name] for name in ("grad_out", "query", "key", "value", "out", "logsumexp")]
    with match.graph.inserting_before(node):
        new = match.graph.call_function(
            torch.ops.dash.sdpa_backward.default,
            tuple(tensors),
            {"mask": _mask(named["is_causal"]), "scale": named["scale"]},
        )
    # The strides of the stock op's gradients: the nodes after it were traced with them, and the lowering takes them from here.
    new.meta.update(node.meta)
    new.meta["dash_op"] = str(node.target)
    new.meta[DECIDED_UNDER] = key()
    node.replace_all_uses_with(new)
    match.graph.erase_node(node)


def leave(node: fx.Node, reason: str) -> None:
    """Marks the node for the lowering, which records the reason; warns or raises where the settings say so."""
    node.meta[DECLINED] = reason
    action = current().on_unsupported
    if action == "fallback":
        return
    message = f"dash_inductor leaves {node.target} to the stock kernel: {reason}"
    if action == "error":
        raise UnsupportedAttentionError(f"{message}\n{_user_stack(node)}")
    warnings.warn(message, stacklevel=2)


def _user_stack(node: fx.Node) -> str:
    """Where the user called SDPA: known to the backward node itself or to the forward node that made its `out`."""
    out = arguments(node)["out"]
    for candidate in (node, out, *(out.all_input_nodes if isinstance(out, fx.Node) else ())):
        if isinstance(candidate, fx.Node) and candidate.stack_trace:
            return candidate.stack_trace
    return "(no stack trace was recorded)"
