"""Builds a function of (b, h, m, n), batch element, query head, query and key: of a mask, or of scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import guard_or_true

from .mask_function import LARGEST, NAMES, MaskFunction
from .nodes import aten, reached
from .proofs import constant
from .score_function import ScoreFunction, adding

prims = torch.ops.prims
MOST_ADDRESSED = 2**31  # elements of a tensor whose index 32 bits hold
Index = tuple[Any, ...]  # of an element: nodes of the function, or numbers


class Unreadable(Exception):
    """A tensor is no function of positions, small tensors and what the graph is given."""


class FunctionBuilder:
    """Has the function's graph, on a device, whose nodes stand for one element; a value without variables is a number instead.

    Attributes:
        variables: the nodes of b, h, m and n.
        in_range: what is an index of any dimension that it goes over.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.graph = fx.Graph()
        self.variables = {name: self.graph.placeholder(name) for name in NAMES}
        self.depends = {node: frozenset(name) for name, node in self.variables.items()}  # on which variables a node does
        self.in_range = {*self.variables.values()}
        self.captured: dict[fx.Node, fx.Node] = {}

    def mask_function(self, visible: Any) -> MaskFunction:
        """The function that returns `visible`."""
        visible = self.constant_of(False) if visible is False else visible
        graph, copies, captures = self._graph_of(visible)
        graph.output(copies.get(visible, visible))
        graph.lint()
        return MaskFunction(fx.GraphModule(torch.nn.Module(), graph), captures)

    def score_function(self, bias: Any) -> ScoreFunction:
        """The function that adds `bias` to a score."""
        graph, copies, captures = self._graph_of(bias, "score")
        return adding(graph, copies.get(bias, bias), captures)

    def _graph_of(self, result: Any, *first: str) -> tuple[fx.Graph, dict[Any, fx.Node], tuple[fx.Node, ...]]:
        """A graph of what a node needs, without an output, with further arguments before (b, h, m, n); the nodes of it by ours; and
        what it captures."""
        needed = reached([result] if isinstance(result, fx.Node) else [], lambda node: node.all_input_nodes)
        graph, copies = fx.Graph(), dict[Any, fx.Node]()
        for name in first:
            graph.placeholder(name)
        for node in self.graph.nodes:
            if node in needed or node in self.variables.values():
                copies[node] = graph.node_copy(node, copies.__getitem__)
        return graph, copies, tuple(node for node, capture in self.captured.items() if capture in needed)

    def may_capture(self, index: Index) -> bool:
        """Whether an element at the index is one of a small tensor: no two of its dimensions go over queries and over keys."""
        over = [self.depends.get(x, frozenset()) for x in index]
        return not any("m" in a and "n" in b for i, a in enumerate(over) for j, b in enumerate(over) if i != j)

    def element(self, node: fx.Node, index: Index) -> fx.Node:
        """The element of a tensor that the function captures.

        Raises:
            Unreadable: it lies on another device.
        """
        value = node.meta["val"]
        if value.device != self.device:
            raise Unreadable(node)
        rows = (self.variables["b"], self.variables["h"])
        index = tuple(0 if x in rows and _is_same_along(node, dim) else x for dim, x in enumerate(index))
        if node not in self.captured:
            with self.graph.inserting_after([n for n in self.graph.nodes if n.op == "placeholder"][-1]):
                self.captured[node] = self.graph.placeholder(f"captured_{len(self.captured)}")
            self.depends[self.captured[node]] = frozenset()
        positions = [self._place(x, size) for x, size in zip(index, value.shape, strict=True)]
        if guard_or_true(_reach(value) >= MOST_ADDRESSED):  # else kernels would compute the address in the 32 bits of positions
            positions = [self.call(prims.convert_element_type.default, x, torch.int64) for x in positions]
        element = self.graph.call_function(aten.index.Tensor, (self.captured[node], positions)) if index else self.captured[node]
        self.depends[element] = frozenset().union(*(self.depends[x] for x in positions))
        return element

    def _place(self, at: Any, size: Any) -> fx.Node:
        """An index of a dimension: a kernel neither counts negative ones from the end nor keeps them in range, as the op does."""
        if at in self.in_range:
            return at
        if not isinstance(at, fx.Node):
            return self.constant_of(at if at >= 0 else at + self.number(size))
        last, call = self.number(size) - 1, self.call
        from_end = call(aten.where.self, call(aten.lt.Scalar, at, 0), call(aten.add.Tensor, at, last + 1), at)
        return call(aten.minimum.default, call(aten.maximum.default, from_end, 0), last)

    def constant_of(self, value: float) -> fx.Node:
        """A number, in the dtype of its type."""
        dtype = {bool: torch.bool, int: torch.int64, float: torch.float32}[type(value)]
        return self.call(aten.full.default, [], value, dtype=dtype, device=self.device)

    def number(self, value: Any) -> Any:
        """A number that the function may have.

        Raises:
            Unreadable: it is too large, or known at run time only.
        """
        if isinstance(value, (bool, int)) and abs(value) < LARGEST:
            return value
        raise Unreadable(value)  # positions are compared with it in 32 bits

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """A node of the function, or the value of one without variables."""
        nodes = [x for x in args if isinstance(x, fx.Node)]
        takes_tensor = [str(argument.type) == "Tensor" for argument in op._schema.arguments]
        if not nodes and op is not aten.full.default:
            return self._folded(op, args, kwargs, takes_tensor)
        is_same = not kwargs and ((op is aten.add.Tensor and 0 in args) or (op is aten.mul.Tensor and 1 in args))
        if is_same and nodes[0] in self.variables.values():
            return nodes[0]
        args = tuple(
            self.constant_of(x) if tensor and not isinstance(x, fx.Node) else x
            for x, tensor in zip(args, takes_tensor, strict=False)
        )
        node = self.graph.call_function(op, args, kwargs)
        self.depends[node] = frozenset().union(*(self.depends[x] for x in nodes))
        return node

    def _folded(self, op: Any, args: Sequence[Any], kwargs: Any, takes_tensor: Sequence[bool]) -> Any:
        with unset_fake_temporarily():
            value = op(*(torch.tensor(x) if tensor else x for x, tensor in zip(args, takes_tensor, strict=False)), **kwargs).item()
        return self.number(value)

    def both(self, x: Any, y: Any) -> Any:
        """x and y."""
        if isinstance(x, bool):
            x, y = y, x
        if isinstance(y, bool):
            return x if y else False
        return self.call(aten.bitwise_and.Tensor, x, y)

    def selected(self, condition: Any, kept: Any, other: Any) -> Any:
        """(condition and kept) or (not condition and other)."""
        if isinstance(condition, bool) or kept is other:
            return kept if condition else other
        hidden = self.call(aten.logical_not.default, condition)
        left, right = self.both(kept, condition), self.both(other, hidden)
        if isinstance(left, bool) or isinstance(right, bool):
            left, right = (right, left) if isinstance(left, bool) else (left, right)
            return True if right is True else left
        return self.call(aten.bitwise_or.Tensor, left, right)


def everything(device: torch.device) -> MaskFunction:
    """Every key is seen."""
    function = FunctionBuilder(device)
    return function.mask_function(function.constant_of(True))


def _reach(value: Tensor) -> Any:
    """Elements from the first to the last of a tensor in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))


@unset_fake_temporarily()
def _is_same_along(node: fx.Node, dim: int) -> bool:
    """Whether a node is known to have the same elements all along a dimension, as positions have that are expanded to the batch."""
    value = constant(node)
    return value is not None and value.shape[dim] > 0 and torch.equal(value, value.narrow(dim, 0, 1).expand_as(value))
