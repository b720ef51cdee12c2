"""Attentions that were rewritten before their graph was traced again, as compiled autograd traces a backward.

A second tracing keeps what a node calls, with which arguments, and the functions among them. It loses a node's meta, where the pass
left what the lowering needs. All of that follows from the arguments, and from the settings in force.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from ..config import Config
from ..dropout import Dropout
from ..op import DROPOUT, FLEX_BACKWARD, LEARNT, MARK, REWRITTEN, SDPA_BACKWARD, SEGMENTS, FlexArguments, Mark
from ..problem import BLOCK_MASK, Problem
from . import flex
from .mask_function import MaskFunction
from .nodes import module_of, value_of
from .resolved import resolved
from .score_function import is_identity


def mark_again(graph: fx.Graph, settings: Config) -> None:
    """Marks the nodes of ours that have lost their marks.

    Raises:
        Declined: the settings in force give one no kernel; they were others when its forward was compiled.
    """
    for node in graph.nodes:
        if node.target in (SDPA_BACKWARD, FLEX_BACKWARD) and MARK not in node.meta:
            mark = _of_op(node, settings) if node.target is SDPA_BACKWARD else _of_flex(node, settings)
            node.meta |= {} if mark is None else {MARK: mark}


def _of_op(node: fx.Node, settings: Config) -> Mark:
    query, key, value = (x.meta["val"] for x in node.args[1:4])  # type: ignore[union-attr]
    given: dict[str, Any] = {**node.kwargs}
    problem = Problem.of(query, key, value, mask=given["mask"], scale=given.get("scale"))
    return Mark(resolved(problem, settings, query), given.get("stock") or "", given["mask"], at_load=given.get("at_load"))


def _of_flex(node: fx.Node, settings: Config) -> Mark | None:
    """None for a node that stays stock's."""
    arguments = FlexArguments(*node.args)
    said = arguments.grad_logsumexp if arguments.grad_out is None else arguments.grad_out
    if said.target is not REWRITTEN:
        return None
    _, mask, stock = said.args
    if stock is None:
        gathered = SEGMENTS in arguments.kernel_options
        return Mark(flex.rewriting_of(node, settings, gathered=gathered, mask=mask), "", mask)
    query, key, value = (x.meta["val"] for x in (arguments.query, arguments.key, arguments.value))
    kind = BLOCK_MASK if mask == "varlen" else mask
    masks = MaskFunction(module_of(node, arguments.mask.mask_mod), ()).masks(*query.shape[:2])
    blocks = {"block_size": (arguments.mask.q_block, arguments.mask.kv_block), "masks": masks}
    dropout = Dropout(*arguments.kernel_options[DROPOUT]) if DROPOUT in arguments.kernel_options else None
    functions = module_of(node, arguments.score_mod), module_of(node, arguments.joint)
    others: dict[str, Any] = {"function_ops": said.kwargs.get("function_ops", 0), "dropout": dropout}
    others["segments"] = arguments.kernel_options.get(SEGMENTS, 0)
    others |= {"changes_scores": not is_identity(functions[0]), "trains_captures": LEARNT in arguments.kernel_options}
    problem = Problem.of(query, key, value, mask=kind, scale=arguments.scale, **others | (blocks if kind == BLOCK_MASK else {}))
    captures = [value_of(x) for x in arguments.score_mod_captures]
    return Mark(resolved(problem, settings, query, functions, captures), stock, mask, at_load=said.kwargs.get("at_load"))
