"""Functions of a score and its place (b, h, m, n), with their derivatives, as FlexAttention's node takes them: what a mask of
floats, a soft-cap and ALiBi make of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

aten, prims = torch.ops.aten, torch.ops.prims
OPERATIONS_OF_TANH = 20  # by the replay of the soft-cap's kernel for an H100: 22 by Triton 3.6, 21 by 3.7, 3 by 3.9
TRANSCENDENTAL = {
    aten.tanh,
    aten.sigmoid,
    aten.erf,
    aten.exp,
    aten.exp2,
    aten.log,
    aten.log2,
    aten.sin,
    aten.cos,
    aten.pow,
}
OF_A_SCORE = 5  # arguments before the captures: score, b, h, m, n


@dataclass(frozen=True)
class ScoreFunction:
    """module(score, b, h, m, n, *captures) -> score, and derivative(score, b, h, m, n, grad, *captures) -> [grad, None, ...].

    There is a None for each argument but the score. Captures are nodes of the graph that has the attention; nobody wants their
    gradients.
    """

    module: fx.GraphModule
    derivative: fx.GraphModule
    captures: tuple[fx.Node, ...] = ()


def operations(module: fx.GraphModule) -> int:
    """How many operations a function does for an element, a transcendental one by what it takes."""
    calls = [node.target for node in module.graph.nodes if node.op == "call_function"]
    return sum(OPERATIONS_OF_TANH if getattr(op, "overloadpacket", op) in TRANSCENDENTAL else 1 for op in calls)


def adding(graph: fx.Graph, bias: Any, captures: tuple[fx.Node, ...]) -> ScoreFunction:
    """The score and a bias, a number or a node of the graph, which has the arguments and no output yet."""
    score = next(iter(graph.nodes))
    wide = graph.call_function(prims.convert_element_type.default, (score, torch.float32))
    graph.output(graph.call_function(aten.add.Tensor, (wide, bias)))
    graph.lint()
    return ScoreFunction(_module(graph), passing_on(len(captures)), captures)


def passing_on(captures: int = 0) -> fx.GraphModule:
    """The derivative of the identity, and of what adds to a score."""
    graph, (*_, grad) = _arguments("grad", captures=captures)
    return _derivative(graph, grad, captures)


def identity() -> ScoreFunction:
    """The score as it is."""
    graph, (score, *_) = _arguments()
    graph.output(score)
    return ScoreFunction(_module(graph), passing_on())


def _arguments(*more: str, captures: int = 0) -> tuple[fx.Graph, Sequence[fx.Node]]:
    """A graph with the arguments of a score function; those that are no captures."""
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in ("score", "b", "h", "m", "n", *more)]
    for number in range(captures):
        graph.placeholder(f"captured_{number}")
    return graph, nodes


def _derivative(graph: fx.Graph, grad: fx.Node, captures: int) -> fx.GraphModule:
    graph.output([grad, *[None] * (OF_A_SCORE - 1 + captures)])
    return _module(graph)


def _module(graph: fx.Graph) -> fx.GraphModule:
    return fx.GraphModule(torch.nn.Module(), graph)
