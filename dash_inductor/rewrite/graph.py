"""The attentions of a joint graph: each becomes kernels of ours, or keeps its stock kernel and says why."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from .. import text
from ..config import Config
from ..decision import Declined
from ..devices.cost_files import CostFileError
from ..first_use.verdict import UntriedKernelError
from ..op import FLEX_BACKWARD, MARK
from . import by_hand, flash_attn, flex, heads_last, kept, math_path, matmuls, retraced, sdpa, third_party, varlen
from .context_parallel import form_of
from .declined import InternalError, is_noted, leave, leave_without_op
from .stock_ops import HEADS_LAST, SDPA_TARGETS, VARLEN

# By stock backward. Each changes the graph around a node, and returns the nodes that are obsolete, users before what they use.
REWRITERS: dict[Any, Callable[[fx.Node, Config], list[fx.Node]]] = {
    **dict.fromkeys(SDPA_TARGETS, sdpa.rewrite),
    FLEX_BACKWARD: flex.rewrite,
    VARLEN: varlen.rewrite,
    **dict.fromkeys(HEADS_LAST, heads_last.rewrite),
}


def rewrite(graph: fx.Graph, settings: Config, refused: Declined | None = None) -> tuple[int, list[InternalError]]:
    """Decides on every attention of a graph that is not decided on yet. refused: why all are declined.

    Returns how many it has met, and the bugs it has met: what repeats in each layer of a model is one.

    Raises:
        UnsupportedAttentionError: one is declined, under on_unsupported="error".
        CostFileError: the settings name a cost file that is not one of the device.
        UntriedKernelError: under guard="always" a kernel could not be tried.
    """
    joint = digest(graph)
    called = [node for node in graph.nodes if node.op == "call_function"]
    kept.note_names(graph)
    retraced.mark_again(graph, settings)
    keeper = kept.Keeper(graph)
    met = [node for node in called if node.target in REWRITERS and MARK not in node.meta and not is_noted(node)]
    said = []
    for node in reversed(met):
        declined = refused or _rewrite(node, partial(REWRITERS[node.target], node, settings), keeper)
        if declined is not None:
            said.append(leave(node, declined, settings))
    # Why flash_attn's stay, which are found and told as those of any other package; None: they do not.
    flash = {
        node: refused or _rewrite(node, partial(flash_attn.rewrite, node, settings), keeper)
        for node in reversed(called)
        if flash_attn.is_backward(node) and node.users
    }
    made_matmuls = {} if refused else _of_matmuls(graph, settings, keeper)
    without_op = [
        *leave_without_op(math_path.OP, math_path.calls(graph, made_matmuls), settings),
        *leave_without_op(by_hand.OP, by_hand.attentions(graph), settings),
        *leave_without_op(third_party.OP, third_party.attentions(graph, flash), settings),
    ]
    bugs = {str(x): x for x in (*said, *flash.values(), *without_op) if isinstance(x, InternalError) and x is not refused}
    for node in graph.nodes:
        if MARK in node.meta:
            node.meta[MARK] = replace(node.meta[MARK], joint=joint, over_ranks=form_of(node))
    rewritten = [*flash.values(), *made_matmuls.values()].count(None)
    return len(met) + rewritten + len(without_op), list(bugs.values())


def digest(graph: fx.Graph) -> str:
    """The same for a graph that another rank has too: which GPU of a machine it is for is left out."""
    inputs = [x for node in graph.find_nodes(op="placeholder") if isinstance(x := node.meta.get("val"), torch.Tensor)]
    shapes = [(x.dtype, tuple(x.shape), x.stride(), x.device.type) for x in inputs]
    attributes = [getattr(graph.owning_module, str(node.target), None) for node in graph.find_nodes(op="get_attr")]
    functions = [x.graph for x in attributes if isinstance(x, fx.GraphModule)]  # FlexAttention's, with their numbers
    return text.digest(re.sub(r"cuda:\d+", "cuda", "\n".join(map(str, [graph, *functions, shapes]))))


def _of_matmuls(graph: fx.Graph, settings: Config, keeper: kept.Keeper) -> dict[fx.Node, Declined | None]:
    """Why each SDPA that torch made matmuls of is declined, by its softmax; None where it is rewritten."""
    try:
        found = [call for _, call in math_path.found(graph)]
    except Exception:  # told where it is met again
        return {}
    return {call.softmax: _rewrite(call.scores, partial(matmuls.rewrite, call, settings), keeper) for call in found}


def _rewrite(node: fx.Node, rewriter: Callable[[], list[fx.Node]], keeper: kept.Keeper) -> Declined | None:
    """Rewrites one attention, of which a node is given; returns why it is declined, None where it is not."""
    try:
        with kept.whole_or_not_at_all(node) as before:
            obsolete = rewriter()
            keeper.keep(before, obsolete)
    except Declined as declined:
        return declined
    except (CostFileError, UntriedKernelError):  # what a setting asks each compilation to raise
        raise
    except Exception as bug:
        return InternalError(bug)
    for each in obsolete:
        node.graph.erase_node(each)
    return None


def rewritten(graph: fx.Graph) -> list[fx.Node]:
    """The nodes of attentions that became ours."""
    return [node for node in graph.nodes if (mark := node.meta.get(MARK)) is not None and mark.resolution is not None]
