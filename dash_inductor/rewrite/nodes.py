"""What passes do with the nodes of a joint graph, whatever they call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
SWAPPED = [0, 2, 1, 3]  # [B, S, H, D] <-> [B, H, S, D]
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def call(graph: fx.Graph, op: Callable[..., Any], *args: Any) -> fx.Node:
    """A node of `op` with its fake value, which the arguments' values give."""
    node = graph.call_function(op, args)
    node.meta["val"] = op(*([value_of(y) for y in x] if isinstance(x, list) else value_of(x) for x in args))
    return node


def value_of(x: Any) -> Any:
    """What an argument of a node is in the graph's fakes: a tensor, a number, a symbol."""
    return x.meta["val"] if isinstance(x, fx.Node) else x


def call_of(node: fx.Node) -> tuple[Any, Any]:
    """What a node calls, and with which positional arguments."""
    return node.target, node.args


def original(node: fx.Node) -> str:
    """The op that the node was decomposed from; by its name, for copies of graphs have copies of the op."""
    return str(node.meta.get("original_aten"))


def is_tensor(node: fx.Node) -> bool:
    """Whether the node's value is one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def reached(start: Iterable[Any], following: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """These nodes, and those that follow one of them; a node that follows is followed itself."""
    found, left = set[fx.Node](), list(start)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left.extend(following(node))
    return found


def backward_of(graph: fx.Graph) -> set[fx.Node]:
    """The nodes of a joint graph that depend on a gradient of an output, which AOTAutograd calls a tangent."""
    tangents = [node for node in graph.nodes if node.op == "placeholder" and str(node.target).startswith("tangents")]
    return reached(tangents, lambda node: node.users)
