"""Functions of a score and its place (b, h, m, n), with their derivatives, as FlexAttention's node takes them: what a mask of
floats, a soft-cap and ALiBi make of it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from .nodes import reached

aten, prims = torch.ops.aten, torch.ops.prims
OPERATIONS_OF_TANH = 20  # between ours without branches, about 10 by the replay for an H100, and stock's by Triton 3.7, about 50
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
# Of a load that changes with the query, beside which others are rare: a mask in bf16 takes the Gluon kernel 1,150 cycles more for
# 64 x 128 elements than its operations, by the replay as Triton 3.7.1 compiles it, and an operation 26.
OPERATIONS_OF_LOAD = 44
OF_A_SCORE = 5  # arguments before the captures: score, b, h, m, n


@dataclass(frozen=True)
class ScoreFunction:
    """module(score, b, h, m, n, *captures) -> score, and derivative(score, b, h, m, n, grad, *captures) -> [grad, None, ...].

    There is a None for each argument but the score. Captures are nodes of the graph that has the attention; nobody wants their
    gradients. kind: of what the op itself makes of scores, by which its forward is tried (rewrite/probe.py).
    """

    module: fx.GraphModule
    derivative: fx.GraphModule
    captures: tuple[fx.Node, ...] = ()
    kind: str = ""

    @property
    def operations(self) -> int:
        """How many both do for an element."""
        return operations(self.module, loads=True) + operations(self.derivative, loads=True)

    def with_unread(self, node: fx.Node, *, learnt: bool) -> ScoreFunction:
        """The same, which gets one more tensor and does not read it. The derivative of one that is learnt returns the score's
        gradient for it too; by that torch's fake of the node knows that there is one."""
        modules = [_with_placeholder(module) for module in (self.module, self.derivative)]
        (output,) = (each for each in modules[1].graph.nodes if each.op == "output")
        output.args = ([*output.args[0], output.args[0][0] if learnt else None],)
        modules[1].recompile()
        return replace(self, module=modules[0], derivative=modules[1], captures=(*self.captures, node))


@dataclass(frozen=True)
class OfFlashAttn:
    """What flash_attn makes of a score: a soft-cap, 0 for none, then ALiBi by slopes [H] or [B, H] of fp32, None for none.

    is_causal: its causal kernel adds slope * n in the place of -slope * |m + S_k - S_q - n|. That differs by a number for each
    query, which the softmax takes away, and logsumexp has.
    """

    cap: float
    slopes: fx.Node | None
    is_causal: bool

    def function(self, place: Any) -> ScoreFunction:
        """place: where key 0 of a query lies, in the causal kernel; else the key in line with query m, less m.

        A number, or of packed sequences a node [T], of each query: of the first key, and of the key in line.
        """
        given = () if self.slopes is None else (self.slopes, *([place] if isinstance(place, fx.Node) else []))
        graph, (score, b, h, m, n, *captures) = _arguments(captures=len(given))
        score = graph.call_function(prims.convert_element_type.default, (score, torch.float32))
        if self.cap:
            score = graph.call_function(aten.mul.Tensor, (_tanh(graph, score, self.cap), self.cap))
        if self.slopes is not None:
            index = [b, h][-self.slopes.meta["val"].dim() :]
            slope = graph.call_function(aten.index.Tensor, (captures[0], index))
            at = graph.call_function(aten.index.Tensor, (captures[1], [m])) if captures[1:] else place
            line = at if self.is_causal or captures[1:] else graph.call_function(aten.add.Tensor, (m, at))
            distance = graph.call_function(aten.sub.Tensor, (n, line))
            if not self.is_causal:
                distance = graph.call_function(aten.neg.default, (graph.call_function(aten.abs.default, (distance,)),))
            distance = graph.call_function(prims.convert_element_type.default, (distance, torch.float32))
            score = graph.call_function(aten.add.Tensor, (score, graph.call_function(aten.mul.Tensor, (slope, distance))))
        graph.output(score)
        derivative = _derivative_of_cap(self.cap, len(given)) if self.cap else passing_on(len(given))
        parts = "causal" * self.is_causal, "soft-cap" * bool(self.cap), "alibi" * (self.slopes is not None)
        return ScoreFunction(_module(graph), derivative, given, " ".join(filter(None, parts)))


def operations(module: fx.GraphModule, *, loads: bool = False) -> int:
    """How many operations a function does for an element, a transcendental one by what it takes. loads: of a function of scores,
    whose loads that change with the query count by what they take."""
    calls = [node.target for node in module.graph.nodes if node.op == "call_function"]
    found = sum(OPERATIONS_OF_TANH if getattr(op, "overloadpacket", op) in TRANSCENDENTAL else 1 for op in calls)
    if loads:
        _score, _b, _h, query, *_ = module.graph.nodes
        of_query = reached([query], lambda node: node.users)
        indices = [node.args[1] for node in module.graph.find_nodes(op="call_function", target=aten.index.Tensor)]
        found += (OPERATIONS_OF_LOAD - 1) * sum(any(each in of_query for each in index) for index in indices)
    return found


def is_identity(module: fx.GraphModule) -> bool:
    """Whether a score_mod returns the score as it is. One that returns another argument does no operation either."""
    score, *_, output = module.graph.nodes
    return output.args[0] is score


def adding(graph: fx.Graph, bias: Any, captures: tuple[fx.Node, ...]) -> ScoreFunction:
    """The score and a bias, a number or a node of the graph, which has the arguments and no output yet."""
    score = next(iter(graph.nodes))
    wide = graph.call_function(prims.convert_element_type.default, (score, torch.float32))
    graph.output(graph.call_function(aten.add.Tensor, (wide, bias)))
    graph.lint()
    return ScoreFunction(_module(graph), passing_on(len(captures)), captures)


def passing_on(captures: int = 0) -> fx.GraphModule:
    """The derivative of the identity, and of what adds to a score."""
    graph, arguments = _arguments("grad", captures=captures)
    grad = arguments[OF_A_SCORE]
    return _derivative(graph, grad, captures)


def identity() -> ScoreFunction:
    """The score as it is."""
    graph, (score, *_) = _arguments()
    graph.output(score)
    return ScoreFunction(_module(graph), passing_on())


def _derivative_of_cap(cap: float, captures: int) -> fx.GraphModule:
    graph, (score, _, _, _, _, grad, *_) = _arguments("grad", captures=captures)
    score, grad = (graph.call_function(prims.convert_element_type.default, (x, torch.float32)) for x in (score, grad))
    tanh = _tanh(graph, score, cap)
    square = graph.call_function(aten.mul.Tensor, (tanh, tanh))
    slope = graph.call_function(aten.add.Tensor, (graph.call_function(aten.neg.default, (square,)), 1.0))
    return _derivative(graph, graph.call_function(aten.mul.Tensor, (grad, slope)), captures)


def _with_placeholder(module: fx.GraphModule) -> fx.GraphModule:
    graph = copy.deepcopy(module.graph)
    *_, last = (node for node in graph.nodes if node.op == "placeholder")
    with graph.inserting_after(last):
        graph.placeholder(f"unread_{len(graph.nodes)}")
    return fx.GraphModule(module, graph)


def _tanh(graph: fx.Graph, score: fx.Node, cap: float) -> fx.Node:
    return graph.call_function(aten.tanh.default, (graph.call_function(aten.mul.Tensor, (score, 1 / cap)),))


def _arguments(*more: str, captures: int = 0) -> tuple[fx.Graph, Sequence[fx.Node]]:
    """A graph with the arguments of a score function, and these."""
    graph, captured = fx.Graph(), [f"captured_{number}" for number in range(captures)]
    return graph, [graph.placeholder(name) for name in ("score", "b", "h", "m", "n", *more, *captured)]


def _derivative(graph: fx.Graph, grad: fx.Node, captures: int) -> fx.GraphModule:
    graph.output([grad, *[None] * (OF_A_SCORE - 1 + captures)])
    return _module(graph)


def _module(graph: fx.Graph) -> fx.GraphModule:
    return fx.GraphModule(torch.nn.Module(), graph)
