"""Finds SDPA backward nodes in a joint graph, and rewrites each one or says why not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._inductor.pattern_matcher import CallFunctionVarArgs, Match, PatternMatcherPass, register_graph_pattern
from torch._ops import OpOverload

from .. import op
from ..config import Config, current
from ..devices.target import target_of
from ..hooks.cache_key import key
from ..hooks.failed import note_rewritten, ours_if_it_fails
from ..problem import BLOCK_MASK, Problem
from ..resolve import mask_block, resolve
from .declined import DECIDED_UNDER, is_on, leave, why_no_target
from .flex_node import flex_backward
from .grouped_keys import Repeated, repeated, return_unrepeated
from .mask_function import MaskFunction, read
from .math_path import note_math_paths
from .origin import mark_origin
from .probe import line_at_load, why_distrusted
from .stock_ops import FLASH, ON_CPU, ON_GPU, SDPA_TARGETS, UNSUPPORTED, SdpaBackward, contract_logsumexp, sdpa_backward_of

assert op.SDPA_BACKWARD  # importing it registers what nodes are rewritten to


class DashPass(PatternMatcherPass):
    """The pass: does nothing, and costs nothing, unless deterministic mode is on. Raises what is wrong with the settings."""

    def apply(self, gm: Any) -> int:
        """Rewrites the graph module; returns how many attentions it has met."""
        if not is_on():
            return 0
        graph = gm if isinstance(gm, fx.Graph) else gm.graph
        with ours_if_it_fails():
            met = super().apply(gm)
        if any(DECIDED_UNDER in node.meta for node in graph.nodes):
            note_rewritten()
        return met + note_math_paths(graph, current())


patterns = DashPass(pass_name="dash_inductor")


@dataclass(frozen=True)
class Rewriting:
    """A backward that is rewritten: its problem, the function of its mask where that has no closed form, and what its key and value
    repeat, if they do; `stock` has them unrepeated."""

    stock: SdpaBackward
    problem: Problem
    function: MaskFunction | None
    keys: list[Repeated]


def rewriting_of(node: fx.Node, settings: Config) -> Rewriting:
    """What becomes of an SDPA backward. Comparisons of symbolic sizes guard: the answer holds for all shapes.

    Raises:
        ValueError: with the reason why it keeps the stock kernel.
    """
    if node.target in UNSUPPORTED:
        raise ValueError(UNSUPPORTED[node.target])
    stock = sdpa_backward_of(node)
    if stock.trains_mask:
        raise ValueError("the attention mask is learnt: the stock op computes its gradient, ours does not")
    if stock.dropout_p != 0.0:
        raise ValueError(f"dropout_p={stock.dropout_p}: its random bits have a layout that only the stock op knows")
    if not isinstance(stock.scale, (float, int, type(None))):
        raise ValueError("a scale that is not a constant")
    device = stock.query.meta["val"].device
    if reason := why_no_target(device) or _wrong_op(stock.op, device):
        raise ValueError(reason)
    keys = [x for output, of in ((1, stock.key), (2, stock.value)) if (x := repeated(node, of, output))]
    if len(keys) == 2:
        stock = replace(stock, key=keys[0].source, value=keys[1].source)
    target = target_of(device, settings)
    mask, function = _mask(stock)
    block_size = mask_block(target) if mask == BLOCK_MASK else None
    query, key, value = (x.meta["val"] for x in (stock.query, stock.key, stock.value))
    problem = Problem.of(query, key, value, mask=mask, scale=stock.scale, block_size=block_size)
    resolve(problem, settings, target)
    if reason := why_distrusted(stock):
        raise ValueError(reason)
    return Rewriting(stock, problem, function, keys if len(keys) == 2 else [])


def _wrong_op(op: OpOverload, device: torch.device) -> str | None:
    if op not in (ON_CPU if device.type == "cpu" else ON_GPU):
        return f"{op} on device {device.type}"
    return None


def _mask(stock: SdpaBackward) -> tuple[str, MaskFunction | None]:
    """full, causal, or block_mask and its function; UnreadableMaskError where the mask cannot be read."""
    q_len, kv_len = stock.query.meta["val"].shape[2], stock.key.meta["val"].shape[2]
    top_left = stock.is_causal and stock.op is not FLASH and q_len != kv_len  # flash aligns at the last query and key
    if stock.attn_mask is None and not top_left:
        return "causal" if stock.is_causal else "full", None
    function = read(stock.attn_mask, stock.query.meta["val"].device, causal=stock.is_causal)
    kind = function.kind(q_len, kv_len)
    if kind == "full" or (kind == "causal" and q_len == kv_len):
        return kind, None
    return BLOCK_MASK, function


@register_graph_pattern(CallFunctionVarArgs(SDPA_TARGETS), pass_dict=patterns)
def rewrite(match: Match, *args: Any, **kwargs: Any) -> None:
    """Replaces a node of a stock op by one of ours, or marks it with the reason why not."""
    node, settings, graph = match.output_node(), current(), match.graph
    try:
        rewriting = rewriting_of(node, settings)
    except ValueError as reason:
        leave(node, str(reason), settings)
        return
    mark_origin(node)
    stock, problem = rewriting.stock, rewriting.problem
    # The strides of the stock op's gradients: the nodes after it were traced with them, and the lowering takes them from here. The
    # fourth gradient is that of a mask, and nobody takes it.
    gradients = (node.meta["val"][0], *(x.gradient for x in rewriting.keys)) if rewriting.keys else node.meta["val"][:3]
    for user in [user for user in node.users if not user.users]:
        graph.erase_node(user)
    with graph.inserting_before(node):
        logsumexp = contract_logsumexp(graph, stock)
        if rewriting.function:
            tensors = stock.query, stock.key, stock.value, stock.out, logsumexp, stock.grad_out
            new = flex_backward(graph, problem, rewriting.function, tensors, gradients, str(stock.op))
        else:
            tensors = stock.grad_out, stock.query, stock.key, stock.value, stock.out, logsumexp
            options: dict[str, Any] = {"mask": problem.mask, "scale": stock.scale, "stock": str(stock.op)}
            new = graph.call_function(op.SDPA_BACKWARD, tensors, options)
            new.meta["val"] = gradients
    new.meta = {**node.meta, **new.meta, DECIDED_UNDER: key()}
    if line := line_at_load(stock):
        new.meta[op.AT_LOAD] = line
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    for output, x in enumerate(rewriting.keys, start=1):
        return_unrepeated(new, output, x)
