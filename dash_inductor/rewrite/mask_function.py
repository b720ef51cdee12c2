"""A mask that the graph makes, read as a function of (b, h, m, n), batch element, query head, query and key, and not as memory.

What positions and constants decide is computed by the function; what a small tensor of the graph decides, a padding mask or the
document of each token, is captured and indexed. A mask that varies with query and key in any other way is not readable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ..decision import Declined
from .nodes import VIEWS, call_of
from .proofs import constant, is_causal, is_constant

aten, prims = torch.ops.aten, torch.ops.prims
NAMES = ("b", "h", "m", "n")
HIDES = -1e38  # what is at most this takes up any score that it is added to, so that softmax gives 0 in a row that sees a key
LARGEST = 2**26  # of a number in the function, whose positions are 32-bit integers
MOST_PROVEN = 2**28  # elements of a mask that is evaluated for a proof
CHUNK = 2**22  # of them at a time
EVERY_POINTWISE = {
    *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.abs.default, aten.neg.default, aten.where.self),
    *(aten.add.Scalar, aten.sub.Scalar, aten.mul.Scalar, aten.remainder.Scalar, aten.remainder.Tensor),
    *(aten.le.Tensor, aten.lt.Tensor, aten.ge.Tensor, aten.gt.Tensor, aten.eq.Tensor, aten.ne.Tensor),
    *(aten.le.Scalar, aten.lt.Scalar, aten.ge.Scalar, aten.gt.Scalar, aten.eq.Scalar, aten.ne.Scalar),
    *(aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_xor.Tensor, aten.bitwise_not.default),
    *(aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default, aten.logical_not.default),
    *(aten.minimum.default, aten.maximum.default, aten.floor_divide.default, aten.div.Tensor_mode, aten.div.Scalar_mode),
    prims.convert_element_type.default,
}
FILLS = {aten.full.default, aten.scalar_tensor.default}
DTYPES = (torch.bool, torch.int32, torch.int64)  # in which positions are compared and computed with
PRODUCTS = {aten.mul.Tensor, aten.mul.Scalar}
SAME = {aten.clone.default, aten.alias.default, aten.detach.default}
IN_FUNCTION = "make the mask inside the compiled function, of positions and small tensors, or use is_causal or flex_attention"
WHOLE_NUMBERS = "compute the mask with comparisons and whole numbers of 32 or 64 bits"
Index = tuple[Any, ...]  # of an element: nodes of the function, or numbers


@dataclass(frozen=True)
class MaskFunction:
    """module(b, h, m, n, *captures) -> bool, whether query m sees key n; captures are nodes of the graph that has the mask."""

    module: fx.GraphModule
    captures: tuple[fx.Node, ...]

    def kind(self, q_len: Any, kv_len: Any) -> str | None:
        """full or causal, where the function shows it; else None. Lengths may be symbolic."""
        visible = next(n for n in self.module.graph.nodes if n.op == "output").args[0]
        if visible is True:
            return "full"
        if is_causal(self.module):
            return "causal"
        return self._evaluated(q_len, kv_len)

    @unset_fake_temporarily()
    def _evaluated(self, q_len: Any, kv_len: Any) -> str | None:
        b, h, *_ = self.module.graph.nodes
        if b.users or h.users or not (isinstance(q_len, int) and isinstance(kv_len, int)):
            return None
        values = [constant(node) for node in self.captures]
        if q_len * kv_len > MOST_PROVEN or any(value is None for value in values):
            return None
        kinds, zero, n = {"full", "causal"}, torch.zeros((), dtype=torch.int64), torch.arange(kv_len)
        rows = max(1, CHUNK // kv_len)
        for m in torch.arange(q_len)[:, None].split(rows):
            visible = _OnCpu(self.module).run(zero, zero, m, n, *values).bool().expand(len(m), kv_len)
            expected = {"full": torch.ones_like(visible), "causal": m >= n}
            kinds &= {kind for kind in kinds if torch.equal(visible, expected[kind])}
            if not kinds:
                return None
        return "full" if "full" in kinds else "causal"


class _OnCpu(fx.Interpreter):
    """Runs a function whose constants are made on another device."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(target, args, {**kwargs, "device": "cpu"} if "device" in kwargs else kwargs)


def read(mask: fx.Node | None, device: torch.device, *, causal: bool = False) -> MaskFunction:
    """The function of a mask on the device that broadcasts to [B, H, S_q, S_k]: bool, true where a query sees a key, or 0 there and
    -inf elsewhere, or the least number of fp32 or bf16.

    A row of least numbers alone is one that sees no key, and has gradients of 0. Stock's forward averages the values there; its CPU
    backward differentiates their sum, since the least number swallows the logarithm in logsumexp.

    causal: and where m >= n.

    Raises:
        Declined: it cannot be read.
    """
    reader = _Reader(device)
    visible: Any = True
    if mask is not None:
        value = mask.meta["val"]
        index = tuple(reader.variables[NAMES[4 - value.dim() :][dim]] for dim in range(value.dim()))
        visible = (reader.visible if value.is_floating_point() else reader.at)(mask, _within(value, index))
    if causal:
        visible = reader.both(visible, reader.call(aten.ge.Tensor, reader.variables["m"], reader.variables["n"]))
    return reader.function(visible)


def in_window(before: int | None, behind: int | None, offset: int) -> MaskFunction:
    """Whether n is at most `before` before m + offset, and at most `behind` behind it; None: without such a bound."""
    graph = fx.Graph()
    *_, m, n = (graph.placeholder(name) for name in NAMES)
    place = graph.call_function(aten.add.Tensor, (m, offset))
    bounds = [
        graph.call_function(comparison, (n, graph.call_function(aten.add.Tensor, (place, distance))))
        for comparison, distance in ((aten.ge.Tensor, before and -before), (aten.le.Tensor, behind))
        if distance is not None
    ]
    seen = graph.call_function(aten.bitwise_and.Tensor, tuple(bounds)) if len(bounds) == 2 else bounds[0]
    graph.output(seen)
    return MaskFunction(fx.GraphModule(torch.nn.Module(), graph), ())


def _within(value: Tensor, index: Sequence[Any]) -> Index:
    """The index of a tensor that is broadcast: the last ones, 0 where it has one element."""
    own = index[len(index) - value.dim() :]
    return tuple(0 if _is_one(size) else i for i, size in zip(own, value.shape, strict=True))


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


class _Reader:
    """Builds the function's graph from the mask's nodes, from the mask backwards."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.graph = fx.Graph()
        self.variables = {name: self.graph.placeholder(name) for name in NAMES}
        self.depends = {node: frozenset(name) for name, node in self.variables.items()}  # on which variables a node does
        self.in_range = {*self.variables.values()}  # what is an index of any dimension that it goes over
        self.captured: dict[fx.Node, fx.Node] = {}
        self.known: dict[tuple[fx.Node, Index], Any] = {}

    def function(self, visible: Any) -> MaskFunction:
        """The function that returns `visible`."""
        self.graph.output(self._constant_of(False) if visible is False else visible)
        self.graph.eliminate_dead_code()
        self.graph.lint()
        captures = {node: capture for node, capture in self.captured.items() if capture.users}
        for capture in {*self.captured.values()} - {*captures.values()}:
            self.graph.erase_node(capture)
        return MaskFunction(fx.GraphModule(torch.nn.Module(), self.graph), tuple(captures))

    def visible(self, node: Any, index: Index) -> Any:
        """Whether what is added to a score is 0; Declined where it is neither 0 nor hides the key."""
        if isinstance(node, (int, float)):
            return self._is_zero(node)
        op, args = call_of(node)
        if op in FILLS:
            return self._is_zero(args[-1])
        if (source := self._source(node, index)) is not None:
            return self.visible(*source)
        if op in (prims.convert_element_type.default, aten._to_copy.default):
            return self.visible(args[0], index) if args[0].meta["val"].is_floating_point() else self._unknown(node)
        if op is aten.where.self:
            condition = self.at(args[0], _within(args[0].meta["val"], index))
            kept, other = (self.visible(x, _broadcast(x, index)) for x in args[1:])
            return self._selected(condition, kept, other)
        if op in (aten.add.Tensor, aten.minimum.default) and not node.kwargs:
            return self.both(*(self.visible(x, _broadcast(x, index)) for x in args))
        return self._unknown(node)

    def _is_zero(self, value: float) -> bool:
        if value != 0 and not value <= HIDES:
            raise Declined(
                f"the mask adds {value:.4g} to scores, which is neither 0 nor -inf",
                "give SDPA a boolean mask; a bias that is a function of positions goes to flex_attention as its score_mod",
            )
        return value == 0

    def _unknown(self, node: fx.Node, kind: str = "a float bias") -> Any:
        if node.op == "placeholder":
            raise Declined(f"{kind} is an input of the graph", IN_FUNCTION)
        raise Declined(f"the mask comes from {node.target}, which is no function of positions and small tensors", IN_FUNCTION)

    def at(self, node: Any, index: Index) -> Any:
        """The element of a node of bools or integers at the index."""
        if not isinstance(node, fx.Node):
            return self._number(node)
        if (node, index) not in self.known:
            self.known[node, index] = self._at(node, index)
        return self.known[node, index]

    def _at(self, node: fx.Node, index: Index) -> Any:
        op, args = call_of(node)
        if not isinstance(node.meta.get("val"), Tensor):
            raise Declined("the mask depends on a number that is known at run time only", IN_FUNCTION)
        if op in FILLS:
            return self._number(args[-1])
        if op is prims.iota.default:
            start, step = (self._number(node.kwargs[name]) for name in ("start", "step"))
            return self.call(aten.add.Tensor, self.call(aten.mul.Tensor, index[0], step), start)
        if (source := self._source(node, index)) is not None:
            return self.at(*source)
        if not is_constant(node) and self._may_capture(index):
            return self._capture(node, index)
        if op is aten.index.Tensor and (at := self._positions(node, index)):
            return self._capture(args[0], at)
        if op not in EVERY_POINTWISE:
            return self._capture(node, index)
        if node.meta["val"].is_floating_point():
            rounding = "whose rounding may differ in a kernel"
            raise Declined(f"the mask computes {op} of positions in floating point, {rounding}", WHOLE_NUMBERS)
        if op is prims.convert_element_type.default:
            return self.call(op, self.at(args[0], _broadcast(args[0], index)), args[1])
        values, dtype = [self.at(x, _broadcast(x, index)) for x in args], node.meta["val"].dtype
        if dtype not in DTYPES:
            raise Declined(f"the mask computes {op} of positions in {dtype}, in which they may not fit", WHOLE_NUMBERS)
        if op is aten.bitwise_and.Tensor and dtype == torch.bool:
            return self.both(*values)
        if op in PRODUCTS:  # positions are 32-bit integers in a kernel, whatever they are in the graph
            values = [self.call(prims.convert_element_type.default, x, dtype) for x in values]
        return self.call(op, *values, **node.kwargs)

    def _source(self, node: fx.Node, index: Index) -> tuple[fx.Node, Index] | None:
        """Where a view, or a gather by plain positions, has its element from; None for another op."""
        op, args = call_of(node)
        if node.op != "call_function":
            return None
        if op in SAME:
            return args[0], index
        if op is aten.expand.default:
            return args[0], _within(args[0].meta["val"], index)
        source = args[0] if args and isinstance(args[0], fx.Node) else None
        if source is None or not isinstance(source.meta.get("val"), Tensor):
            return None
        value = source.meta["val"]
        if op is aten.unsqueeze.default:
            dim = args[1] % (value.dim() + 1)
            return source, index[:dim] + index[dim + 1 :]
        if op in (aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default):
            dims = range(value.dim()) if len(args) < 2 else [args[1]] if isinstance(args[1], int) else args[1]
            gone = {dim % value.dim() for dim in dims if _is_one(value.shape[dim])}
            rest = iter(index)
            return source, tuple(0 if dim in gone else next(rest) for dim in range(value.dim()))
        if op in VIEWS:
            return self._viewed(source, node.meta["val"], index)
        if op is aten.permute.default:
            return source, tuple(index[list(dim % value.dim() for dim in args[1]).index(d)] for d in range(value.dim()))
        if op is aten.slice.Tensor:
            return self._sliced(node, source, index)
        if op is aten.select.int and isinstance(args[2], int):
            dim = args[1] % value.dim()
            size = value.shape[dim]
            at = args[2] if args[2] >= 0 else args[2] + size if isinstance(size, int) else None
            return None if at is None else (source, (*index[:dim], at, *index[dim:]))
        if op is aten.index.Tensor:
            return self._gathered(node, source, index)
        return None

    def _viewed(self, source: fx.Node, value: Tensor, index: Index) -> tuple[fx.Node, Index] | None:
        """Of a view that adds or drops dimensions of one element."""
        own = [(size, i) for size, i in zip(value.shape, index, strict=True) if not _is_one(size)]
        sizes = [size for size in source.meta["val"].shape if not _is_one(size)]
        if len(own) != len(sizes) or any(size != other for size, (other, _) in zip(sizes, own, strict=True)):
            return None
        rest = iter(i for _, i in own)
        return source, tuple(0 if _is_one(size) else next(rest) for size in source.meta["val"].shape)

    def _sliced(self, node: fx.Node, source: fx.Node, index: Index) -> tuple[fx.Node, Index] | None:
        _, args = call_of(node)
        given: Any = (*args[1:], *(0, None, None, 1)[len(args) - 1 :])
        dim, start, _, step = given
        start = 0 if start is None else start
        if source.target is aten.constant_pad_nd.default:  # what SDPA pads for the alignment of rows, it cuts off again
            inner, pads = call_of(source)[1][:2]
            whole = all(a == b for a, b in zip(node.meta["val"].shape, inner.meta["val"].shape, strict=True))
            return (inner, index) if whole and not any(pads[::2]) and (start, step) == (0, 1) else None
        if not (isinstance(start, int) and start >= 0 and isinstance(step, int)):
            return None
        at = self.call(aten.add.Tensor, self.call(aten.mul.Tensor, index[dim], step), start)
        if index[dim] in self.in_range:
            self.in_range.add(at)
        return source, (*index[:dim], at, *index[dim + 1 :])

    def _gathered(self, node: fx.Node, source: fx.Node, index: Index) -> tuple[fx.Node, Index] | None:
        at = self._positions(node, index)
        if at is None or not all(x in self.in_range or (isinstance(x, int) and x >= 0) for x in at):
            return None  # negative ones would count from the end
        return source, at

    def _positions(self, node: fx.Node, index: Index) -> Index | None:
        """Where in its source a gather has its element from; None if not every dimension has an index."""
        source, indices = call_of(node)[1]
        if len(indices) != source.meta["val"].dim() or any(x is None for x in indices):
            return None
        return tuple(self.at(x, _broadcast(x, index)) for x in indices)

    def _may_capture(self, index: Index) -> bool:
        """Whether an element at the index is one of a small tensor: no two of its dimensions go over queries and over keys."""
        over = [self.depends.get(x, frozenset()) for x in index]
        return not any("m" in a and "n" in b for i, a in enumerate(over) for j, b in enumerate(over) if i != j)

    def _capture(self, node: fx.Node, index: Index) -> Any:
        if not self._may_capture(index):
            return self._unknown(node, "a mask")
        rows = (self.variables["b"], self.variables["h"])
        index = tuple(0 if x in rows and _is_same_along(node, dim) else x for dim, x in enumerate(index))
        if node not in self.captured:
            with self.graph.inserting_after([n for n in self.graph.nodes if n.op == "placeholder"][-1]):
                self.captured[node] = self.graph.placeholder(f"captured_{len(self.captured)}")
            self.depends[self.captured[node]] = frozenset()
        positions = [self._place(x, size) for x, size in zip(index, node.meta["val"].shape, strict=True)]
        element = self.graph.call_function(aten.index.Tensor, (self.captured[node], positions)) if index else self.captured[node]
        self.depends[element] = frozenset().union(*(self.depends[x] for x in positions))
        return element

    def _place(self, at: Any, size: Any) -> fx.Node:
        """An index of a dimension: a kernel neither counts negative ones from the end nor keeps them in range, as the op does."""
        if at in self.in_range:
            return at
        if not isinstance(at, fx.Node):
            return self._constant_of(at if at >= 0 else at + self._number(size))
        last, call = self._number(size) - 1, self.call
        from_end = call(aten.where.self, call(aten.lt.Scalar, at, 0), call(aten.add.Tensor, at, last + 1), at)
        return call(aten.minimum.default, call(aten.maximum.default, from_end, 0), last)

    def _constant_of(self, value: int) -> fx.Node:
        dtype = torch.bool if isinstance(value, bool) else torch.int64
        return self.call(aten.full.default, [], value, dtype=dtype, device=self.device)

    def _number(self, value: Any) -> Any:
        if isinstance(value, (bool, int)) and abs(value) < LARGEST:
            return value
        raise Declined(f"the mask compares positions with {value}, which is no whole number below {LARGEST}", IN_FUNCTION)

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
            self._constant_of(x) if tensor and not isinstance(x, fx.Node) else x
            for x, tensor in zip(args, takes_tensor, strict=False)
        )
        node = self.graph.call_function(op, args, kwargs)
        self.depends[node] = frozenset().union(*(self.depends[x] for x in nodes))
        return node

    def _folded(self, op: Any, args: Sequence[Any], kwargs: Any, takes_tensor: Sequence[bool]) -> Any:
        with unset_fake_temporarily():
            value = op(*(torch.tensor(x) if tensor else x for x, tensor in zip(args, takes_tensor, strict=False)), **kwargs).item()
        return self._number(value)

    def both(self, x: Any, y: Any) -> Any:
        """x and y."""
        if isinstance(x, bool):
            x, y = y, x
        if isinstance(y, bool):
            return x if y else False
        return self.call(aten.bitwise_and.Tensor, x, y)

    def _selected(self, condition: Any, kept: Any, other: Any) -> Any:
        """(condition and kept) or (not condition and other)."""
        if isinstance(condition, bool):
            return kept if condition else other
        hidden = self.call(aten.logical_not.default, condition)
        left, right = self.both(kept, condition), self.both(other, hidden)
        if isinstance(left, bool) or isinstance(right, bool):
            left, right = (right, left) if isinstance(left, bool) else (left, right)
            return True if right is True else left
        return self.call(aten.bitwise_or.Tensor, left, right)


@unset_fake_temporarily()
def _is_same_along(node: fx.Node, dim: int) -> bool:
    """Whether a node is known to have the same elements all along a dimension, as positions have that are expanded to the batch."""
    value = constant(node)
    return value is not None and value.shape[dim] > 0 and torch.equal(value, value.narrow(dim, 0, 1).expand_as(value))


def _broadcast(x: Any, index: Index) -> Index:
    return _within(x.meta["val"], index) if isinstance(x, fx.Node) and isinstance(x.meta.get("val"), Tensor) else ()
