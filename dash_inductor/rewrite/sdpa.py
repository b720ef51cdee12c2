"""Finds SDPA backward nodes in a joint graph, and rewrites each one or says why not.

What differs between the ATen ops (argument order, logsumexp's shape, causal alignment) ends here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._inductor.pattern_matcher import CallFunctionVarArgs, Match, PatternMatcherPass, register_graph_pattern

from .. import op
from ..config import Config, current
from ..devices.target import target_of
from ..problem import Problem
from ..resolve import resolve
from .cache_key import key
from .declined import DECIDED_UNDER, is_on, leave, why_no_target
from .math_path import note_math_paths
from .origin import mark_origin
from .stock_ops import FLASH_CPU, SDPA_TARGETS, UNSUPPORTED, arguments

assert op.SDPA_BACKWARD  # importing it registers what nodes are rewritten to


class DashPass(PatternMatcherPass):
    """The pass: does nothing, and costs nothing, unless deterministic mode is on. Raises what is wrong with the settings."""

    def apply(self, gm: Any) -> int:
        """Rewrites the graph module; returns how many attentions it has met."""
        if not is_on():
            return 0
        return super().apply(gm) + note_math_paths(gm if isinstance(gm, fx.Graph) else gm.graph, current())


patterns = DashPass(pass_name="dash_inductor")


def why_declined(node: fx.Node, settings: Config) -> str | None:
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
    return why_no_target(query.device) or _wrong_op(node, query.device) or _unresolved(named, query, key, value, settings)


def _wrong_op(node: fx.Node, device: torch.device) -> str | None:
    if (device.type == "cpu") != (node.target is FLASH_CPU):
        return f"{node.target} on device {device.type}"
    return None


def _unresolved(named: dict[str, Any], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: Config) -> str | None:
    try:
        target = target_of(query.device, settings)
        resolve(Problem.of(query, key, value, mask=_mask(named), scale=named["scale"]), settings, target)
    except ValueError as error:
        return str(error)
    return None


def _mask(named: dict[str, Any]) -> str:
    # Causal alignment differs between the ops only where S_q and S_k do, which is declined.
    return "causal" if named["is_causal"] else "full"


@register_graph_pattern(CallFunctionVarArgs(SDPA_TARGETS), pass_dict=patterns)
def rewrite(match: Match, *args: Any, **kwargs: Any) -> None:
    """Replaces a node of a stock op by one of `dash::sdpa_backward`, or marks it with the reason why not."""
    node, settings = match.output_node(), current()
    reason = why_declined(node, settings)
    if reason is not None:
        leave(node, reason, settings)
        return
    mark_origin(node)
    named = arguments(node)
    tensors = [named[name] for name in ("grad_out", "query", "key", "value", "out", "logsumexp")]
    with match.graph.inserting_before(node):
        new = match.graph.call_function(op.SDPA_BACKWARD, tuple(tensors), {"mask": _mask(named), "scale": named["scale"]})
    # The strides of the stock op's gradients: the nodes after it were traced with them, and the lowering takes them from here.
    new.meta.update(node.meta)
    new.meta["dash_op"] = str(node.target)
    new.meta[DECIDED_UNDER] = key()
    node.replace_all_uses_with(new)
    match.graph.erase_node(node)
