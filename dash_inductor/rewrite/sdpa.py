"""Finds SDPA backward nodes in a joint graph, and rewrites each one or says why not."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._inductor.pattern_matcher import CallFunctionVarArgs, Match, PatternMatcherPass, register_graph_pattern
from torch._ops import OpOverload

from .. import op
from ..config import Config, current, ready
from ..devices.target import target_of
from ..problem import Problem
from ..resolve import resolve
from .cache_key import key
from .declined import DECIDED_UNDER, leave, prepare_lowering, why_no_target
from .probe import line_at_load, why_distrusted
from .stock_ops import ON_CPU, ON_GPU, SDPA_TARGETS, UNSUPPORTED, SdpaBackward, contract_logsumexp, sdpa_backward_of

assert op.SDPA_BACKWARD  # importing it registers what nodes are rewritten to


class DashPass(PatternMatcherPass):
    """The pass: does nothing, and costs nothing, unless deterministic mode is on. Raises what is wrong with the settings."""

    def apply(self, gm: Any) -> int:
        """Rewrites the graph module; returns how many nodes matched."""
        if not ready().enabled or not torch.are_deterministic_algorithms_enabled():
            return 0
        prepare_lowering()
        return super().apply(gm)


patterns = DashPass(pass_name="dash_inductor")


def why_declined(node: fx.Node, settings: Config) -> str | None:
    """The reason to leave an SDPA backward alone, or None. Comparisons of symbolic sizes guard: the answer holds for all shapes."""
    if node.target in UNSUPPORTED:
        return UNSUPPORTED[node.target]
    stock = sdpa_backward_of(node)
    if stock.dropout_p != 0.0:
        return f"dropout_p={stock.dropout_p}: its random bits have a layout that only the stock op knows"
    if stock.attn_mask is not None or stock.trains_mask:
        return "an attention mask"
    if not isinstance(stock.scale, (float, int, type(None))):
        return "a scale that is not a constant"
    device = stock.query.meta["val"].device
    return why_no_target(device) or _wrong_op(stock.op, device) or _unresolved(stock, settings) or why_distrusted(stock)


def _wrong_op(op: OpOverload, device: torch.device) -> str | None:
    if op not in (ON_CPU if device.type == "cpu" else ON_GPU):
        return f"{op} on device {device.type}"
    return None


def _unresolved(stock: SdpaBackward, settings: Config) -> str | None:
    query, key, value = (x.meta["val"] for x in (stock.query, stock.key, stock.value))
    try:
        target = target_of(query.device, settings)
        resolve(Problem.of(query, key, value, mask=_mask(stock), scale=stock.scale), settings, target)
    except ValueError as error:
        return str(error)
    return None


def _mask(stock: SdpaBackward) -> str:
    # Causal alignment differs between the ops only where S_q and S_k do, which is declined.
    return "causal" if stock.is_causal else "full"


@register_graph_pattern(CallFunctionVarArgs(SDPA_TARGETS), pass_dict=patterns)
def rewrite(match: Match, *args: Any, **kwargs: Any) -> None:
    """Replaces a node of a stock op by one of `dash::sdpa_backward`, or marks it with the reason why not."""
    node, settings = match.output_node(), current()
    reason = why_declined(node, settings)
    if reason is not None:
        leave(node, reason, settings)
        return
    stock = sdpa_backward_of(node)
    with match.graph.inserting_before(node):
        logsumexp = contract_logsumexp(match.graph, stock)
        tensors = (stock.grad_out, stock.query, stock.key, stock.value, stock.out, logsumexp)
        options: dict[str, Any] = {"mask": _mask(stock), "scale": stock.scale, "stock": str(stock.op)}
        new = match.graph.call_function(op.SDPA_BACKWARD, tensors, options)
    # The strides of the stock op's gradients: the nodes after it were traced with them, and the lowering takes them from here.
    new.meta.update(node.meta)
    new.meta["val"] = node.meta["val"][:3]  # the fourth is that of a mask, and nobody takes it
    for user in [user for user in node.users if not user.users]:
        match.graph.erase_node(user)
    new.meta[DECIDED_UNDER] = key()
    if line := line_at_load(stock):
        new.meta[op.AT_LOAD] = line
    node.replace_all_uses_with(new)
    match.graph.erase_node(node)
