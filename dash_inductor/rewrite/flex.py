"""Finds FlexAttention's backwards in a joint graph, and decides about each; the lowering reads the decision in the node's meta.

The HOP stays in the graph: its subgraphs, fake and functionalisation are torch's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._inductor.pattern_matcher import CallFunctionVarArgs, Match, register_graph_pattern

from ..config import Config, current
from ..decision import CAPTURED
from ..devices.target import target_of
from ..hooks.cache_key import key
from ..op import DECIDED, FLEX_BACKWARD, FLEX_PROBLEM, FlexArguments
from ..problem import BLOCK_MASK, Problem
from ..resolve import StockIsFaster, resolve
from .declined import DECIDED_UNDER, leave, why_no_target
from .origin import mark_origin
from .proofs import mask_of
from .sdpa import patterns

OPERATIONS_OF_TANH = 20  # by the replay of the soft-cap's kernel for an H100: 22 by Triton 3.6, 21 by 3.7, 3 by 3.9
_aten = torch.ops.aten
TRANSCENDENTAL = {
    _aten.tanh,
    _aten.sigmoid,
    _aten.erf,
    _aten.exp,
    _aten.exp2,
    _aten.log,
    _aten.log2,
    _aten.sin,
    _aten.cos,
    _aten.pow,
}
MOST_SHARED = 64  # batch elements whose gradients of shared keys are summed in an unrolled loop


@register_graph_pattern(CallFunctionVarArgs([FLEX_BACKWARD]), pass_dict=patterns)
def decide(match: Match, *args: Any, **kwargs: Any) -> None:
    """Marks a node with what it is lowered as, or with the reason why it keeps the stock lowering."""
    node, settings = match.output_node(), current()
    try:
        node.meta[FLEX_PROBLEM] = resolved(node, settings)
    except StockIsFaster as reason:
        leave(node, str(reason), settings, unsupported=False)
    except ValueError as reason:
        leave(node, str(reason), settings)
    else:
        node.meta[DECIDED_UNDER] = key()
        mark_origin(node)
        _into_cache_key(node, node.meta[FLEX_PROBLEM].mask)


def resolved(node: fx.Node, settings: Config) -> Problem:
    """The problem of a node that has a kernel of ours. Comparisons of symbolic sizes guard: the answer holds for all shapes.

    Raises:
        ValueError: with the reason why it keeps the stock one.
    """
    arguments = FlexArguments(*node.args)
    query, key, value = (x.meta["val"] for x in (arguments.query, arguments.key, arguments.value))
    if reason := why_no_target(query.device) or _functions_decline(node, arguments) or _batches_decline(query, key):
        raise ValueError(reason)
    mask = arguments.mask
    proven = mask_of(mask, _graph(node, mask.mask_mod))
    problem = Problem.of(
        query,
        key,
        value,
        mask=proven or BLOCK_MASK,
        scale=arguments.scale,
        block_size=None if proven else (_known(mask.q_block), _known(mask.kv_block)),
        mods=sum(_operations(_graph(node, name)) for name in (arguments.score_mod, arguments.joint, mask.mask_mod)),
    )
    resolve(problem, settings, target_of(query.device, settings))
    return problem


def _into_cache_key(node: fx.Node, mask: str) -> None:
    """Puts the mask into the graph's text: the joint graph proves it, and the key of a backward's code is of the backward alone."""
    place = FlexArguments._fields.index("kernel_options")
    node.update_arg(place, {**FlexArguments(*node.args).kernel_options, DECIDED: mask})


def _functions_decline(node: fx.Node, arguments: FlexArguments) -> str | None:
    backend = arguments.kernel_options.get("BACKEND", "AUTO")
    if backend in ("FLASH", "TRITON_DECODE"):
        return f"BACKEND={backend!r} is asked for"
    (output,) = (n for n in _graph(node, arguments.joint).graph.nodes if n.op == "output")
    if any(gradient is not None for gradient in output.args[0][5:]):  # after those of score, b, h, m, n
        return (
            f"{CAPTURED}, which is summed by atomics, in no fixed order: "
            "stock's kernel differs from run to run, in deterministic mode too"
        )
    return None


def _batches_decline(query: torch.Tensor, key: torch.Tensor) -> str | None:
    if query.shape[0] != key.shape[0] and not (isinstance(query.shape[0], int) and query.shape[0] <= MOST_SHARED):
        return f"a batch of {query.shape[0]} shares its keys: at most {MOST_SHARED}, of a static shape, may"
    return None


def _graph(node: fx.Node, attribute: fx.Node) -> fx.GraphModule:
    return getattr(node.graph.owning_module, str(attribute.target))


def _known(size: int | fx.Node) -> int:
    """A size that may be an input of the graph, where all shapes are dynamic; guarded then."""
    return int(size.meta["val"] if isinstance(size, fx.Node) else size)


def _operations(module: fx.GraphModule) -> int:
    """How many operations a function does for an element, a transcendental one by what it takes."""
    calls = [node.target for node in module.graph.nodes if node.op == "call_function"]
    return sum(OPERATIONS_OF_TANH if getattr(op, "overloadpacket", op) in TRANSCENDENTAL else 1 for op in calls)
