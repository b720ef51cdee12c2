"""What passes do with the nodes of a joint graph, whatever they call."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

aten = torch.ops.aten
SWAPPED = [0, 2, 1, 3]  # [B, S, H, D] <-> [B, H, S, D]
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
SQUEEZES = (aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)


def call(graph: fx.Graph, op: Callable[..., Any], *args: Any, **options: Any) -> fx.Node:
    """A node of `op` with its fake value, which the arguments' values give; options are no nodes."""
    node = graph.call_function(op, args, options)
    node.meta["val"] = op(*([value_of(y) for y in x] if isinstance(x, list) else value_of(x) for x in args), **options)
    return node


def traced(graph: fx.Graph, function: Callable[..., Any], inputs: Sequence[fx.Node]) -> Any:
    """Writes what a function of tensors does into the graph; returns the nodes of what it returns."""
    fakes = [value_of(x) for x in inputs]
    with fakes[0].fake_mode, enable_python_dispatcher():
        made = make_fx(function, select_decomp_table())(*fakes).graph
    placeholders = (node for node in made.nodes if node.op == "placeholder")
    return graph.graph_copy(made, dict(zip(placeholders, inputs, strict=True)))


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


def first_tensor(graph: fx.Graph, nodes: set[fx.Node]) -> fx.Node | None:
    """The first of these nodes whose value is one tensor; None if there is none."""
    return next((node for node in graph.nodes if node in nodes and is_tensor(node)), None)


def is_one(size: Any) -> bool:
    """Whether a size is known to be 1."""
    return isinstance(size, int) and size == 1


def outputs_of(node: fx.Node, index: int) -> list[fx.Node]:
    """The nodes that take an output of a node."""
    return [user for user in node.users if user.target is operator.getitem and user.args[1] == index]


def size_of(graph: fx.Graph, x: fx.Node, dim: int) -> Any:
    """A size of a tensor as an argument of nodes: a number, or a node where it is a symbol."""
    size = aten.sym_size.int(x.meta["val"], dim)  # a number too where a guard has made one of the symbol
    return size if isinstance(size, int) else call(graph, aten.sym_size.int, x, dim)


def module_of(node: fx.Node, attribute: fx.Node) -> fx.GraphModule:
    """The module that an argument of the node names."""
    return getattr(node.graph.owning_module, str(attribute.target))


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
