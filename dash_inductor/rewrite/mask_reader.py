"""Reads a mask in the graph as functions of (b, h, m, n), batch element, query head, query and key, and not as memory if it can be.

What positions and constants decide is computed by the function; what a small tensor of the graph decides, a padding mask or the
document of each token, is captured and indexed. So is a mask of queries and keys that the graph is given. One that it computes
in another way is captured whole: the forward has it in memory.

A mask of floats is a bias. Where that is -inf, or the least number, a query does not see a key; elsewhere it is added to the score.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ..decision import Declined
from .function_builder import FunctionBuilder, Index, Unreadable
from .mask_function import MaskFunction
from .nodes import SQUEEZES, VIEWS, aten, call_of, is_one
from .proofs import is_constant
from .score_function import ScoreFunction

log = logging.getLogger("dash_inductor")
prims = torch.ops.prims
HIDES = -1e38  # what is at most this takes up any score that it is added to, so that softmax gives 0 in a row that sees a key
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
CASTS = {prims.convert_element_type.default, aten._to_copy.default}
Bias = tuple[Any, Any]  # whether a query sees a key, and what is added to the score then: a number, or a node of fp32


def read(mask: fx.Node | None, device: torch.device, *, causal: bool = False) -> tuple[MaskFunction, ScoreFunction | None]:
    """The functions of a mask on the device that broadcasts to [B, H, S_q, S_k]: which keys a query sees, and what becomes of their
    scores, None if that is nothing. The mask is bool, true where a query sees a key, or what is added to the score.

    A row of -inf, or of least numbers of fp32 or bf16, alone is one that sees no key, and has gradients of 0. Stock's forward
    averages the values under least numbers. Its math path has the gradients of that; its CPU backward those of their sum, since the
    least number swallows the logarithm in logsumexp.

    causal: and where m >= n.

    Raises:
        Declined: it lies on another device.
    """
    reader = Reader(device)
    function = reader.function
    visible: Any = True
    bias: Any = 0.0
    if mask is not None:
        value = mask.meta["val"]
        index = _within(value, tuple(function.variables.values()))
        visible, bias = reader.biased(mask, index) if value.is_floating_point() else (reader.condition(mask, index), 0.0)
    if causal:
        visible = function.both(visible, function.call(aten.ge.Tensor, function.variables["m"], function.variables["n"]))
    scores = None if _is_zero(bias) else function.score_function(bias)
    if scores and scores.captures:
        tell_of_least_rows()
    return function.mask_function(visible), scores


@functools.cache
def tell_of_least_rows() -> None:
    """Once, since what a mask of floats has in memory is known at run time only."""
    log.info(
        "a row of a float mask that has the least number of its dtype everywhere gets gradients of zero, as one of -inf does; "
        "stock's forward averages the values there (docs/cases.md)"
    )


def _within(value: Tensor, index: Sequence[Any]) -> Index:
    """The index of a tensor that is broadcast: the last ones, 0 where it has one element."""
    own = index[len(index) - value.dim() :]
    return tuple(0 if is_one(size) else i for i, size in zip(own, value.shape, strict=True))


class Reader:
    """Reads the mask's nodes, from the mask backwards, into the function that it builds."""

    def __init__(self, device: torch.device) -> None:
        self.function = FunctionBuilder(device)
        self.known: dict[tuple[fx.Node, Index], Any] = {}

    def condition(self, node: fx.Node, index: Index) -> Any:
        """The element of a bool node, which is captured whole if nothing else can be."""
        try:
            return self.at(node, index)
        except Unreadable:
            return self._whole(node, index)

    def biased(self, node: fx.Node, index: Index) -> Bias:
        """What a node of floats does to a score; it is captured whole if nothing else can be."""
        try:
            return self._biased(node, index)
        except Unreadable:
            return self._of_element(self._whole(node, index), node.meta["val"].dtype)

    def _biased(self, node: Any, index: Index) -> Bias:
        op, args = call_of(node)
        if not isinstance(node.meta.get("val"), Tensor):  # a number that is known at run time only
            raise Unreadable(node)
        dtype = node.meta["val"].dtype
        if op in FILLS:
            return _of_number(args[-1], dtype)
        if (source := self._source(node, index)) is not None:
            return self._biased(*source)
        with contextlib.suppress(_Inexact):
            if op in CASTS and args[0].meta["val"].is_floating_point():
                return self._exact(args[0], index, dtype)
            if op is aten.where.self:
                condition = self.condition(args[0], _broadcast(args[0], index))
                return self._selected_bias(condition, *(self._exact(x, index, dtype) for x in args[1:]))
            if op in (aten.add.Tensor, aten.minimum.default) and not node.kwargs:
                (sees, bias), (sees_too, other) = (self._exact(x, index, dtype) for x in args)
                if (_is_zero(bias) and _is_zero(other)) or (op is aten.add.Tensor and 0.0 in (bias, other)):
                    return self.function.both(sees, sees_too), other if _is_zero(bias) else bias
        return self._of_element(self._capture(node, index), dtype)

    def _exact(self, x: Any, index: Index, dtype: torch.dtype) -> Bias:
        """The value of an argument, exact in the dtype that the op returns."""
        if not isinstance(x, fx.Node):
            return _of_number(x, dtype)
        visible, bias = self._biased(x, _broadcast(x, index))
        if not isinstance(bias, fx.Node):
            fits, rounded = _of_number(bias, dtype)
            return self.function.both(visible, fits), rounded
        if dtype not in (x.meta["val"].dtype, torch.float32, torch.float64):
            raise _Inexact  # kernels compute in fp32, and would not round
        return visible, bias

    def _of_element(self, element: Any, dtype: torch.dtype) -> Bias:
        """A NaN is seen, and comes into the gradients."""
        bias = element if dtype == torch.float32 else self.function.call(prims.convert_element_type.default, element, torch.float32)
        hidden = self.function.call(aten.le.Scalar, bias, HIDES)
        return self.function.call(aten.logical_not.default, hidden), bias

    def _selected_bias(self, condition: Any, kept: Bias, other: Bias) -> Bias:
        (sees, bias), (sees_too, of_other) = kept, other
        visible = self.function.selected(condition, sees, sees_too)
        if sees is False or sees_too is False or bias is of_other or bias == of_other:  # of a key that is hidden any will do
            return visible, of_other if sees is False else bias
        if isinstance(condition, bool):
            return visible, bias if condition else of_other
        biases = (x if isinstance(x, fx.Node) else self.function.constant_of(float(x)) for x in (bias, of_other))
        return visible, self.function.call(aten.where.self, condition, *biases)

    def at(self, node: Any, index: Index) -> Any:
        """The element of a node of bools or integers at the index."""
        if not isinstance(node, fx.Node):
            return self.function.number(node)
        if (node, index) not in self.known:
            try:
                self.known[node, index] = self._at(node, index)
            except Unreadable:
                self.known[node, index] = self._capture(node, index)
        return self.known[node, index]

    def _at(self, node: fx.Node, index: Index) -> Any:
        op, args = call_of(node)
        if not isinstance(node.meta.get("val"), Tensor):
            raise Unreadable(node)
        if op in FILLS:
            return self.function.number(args[-1])
        if op is prims.iota.default:
            start, step = (self.function.number(node.kwargs[name]) for name in ("start", "step"))
            return self.function.call(aten.add.Tensor, self.function.call(aten.mul.Tensor, index[0], step), start)
        if (source := self._source(node, index)) is not None:
            return self.at(*source)
        if not is_constant(node) and self.function.may_capture(index):
            return self._capture(node, index)
        if op is aten.index.Tensor and (at := self._positions(node, index)):
            return self._capture(args[0], at)
        if op not in EVERY_POINTWISE:
            return self._capture(node, index)
        if node.meta["val"].is_floating_point():
            raise Unreadable(node)  # its rounding may differ in a kernel
        if op is prims.convert_element_type.default:
            return self.function.call(op, self.at(args[0], _broadcast(args[0], index)), args[1])
        values, dtype = [self.at(x, _broadcast(x, index)) for x in args], node.meta["val"].dtype
        if dtype not in DTYPES:
            raise Unreadable(node)  # positions may not fit in it
        if op is aten.bitwise_and.Tensor and dtype == torch.bool:
            return self.function.both(*values)
        if dtype != torch.bool:  # positions fit 32 bits (mask_bounds.py), in which a kernel has them; what is captured may not
            values = [
                self.function.call(prims.convert_element_type.default, value, dtype) if _is_narrower(x, dtype) else value
                for x, value in zip(args, values, strict=True)
            ]
        return self.function.call(op, *values, **node.kwargs)

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
        if op in (*VIEWS, *SQUEEZES):
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
        """The value through a view that adds or drops dimensions of one element."""
        own = [(size, i) for size, i in zip(value.shape, index, strict=True) if not is_one(size)]
        sizes = [size for size in source.meta["val"].shape if not is_one(size)]
        if len(own) != len(sizes) or any(size != other for size, (other, _) in zip(sizes, own, strict=True)):
            return None
        rest = iter(i for _, i in own)
        return source, tuple(0 if is_one(size) else next(rest) for size in source.meta["val"].shape)

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
        at = self.function.call(aten.add.Tensor, self.function.call(aten.mul.Tensor, index[dim], step), start)
        if index[dim] in self.function.in_range:
            self.function.in_range.add(at)
        return source, (*index[:dim], at, *index[dim + 1 :])

    def _gathered(self, node: fx.Node, source: fx.Node, index: Index) -> tuple[fx.Node, Index] | None:
        at = self._positions(node, index)
        if at is None or not all(x in self.function.in_range or (isinstance(x, int) and x >= 0) for x in at):
            return None  # negative ones would count from the end
        return source, at

    def _positions(self, node: fx.Node, index: Index) -> Index | None:
        """Where in its source a gather has its element from; None if not every dimension has an index."""
        source, indices = call_of(node)[1]
        if len(indices) != source.meta["val"].dim() or any(x is None for x in indices):
            return None
        return tuple(self.at(x, _broadcast(x, index)) for x in indices)

    def _capture(self, node: fx.Node, index: Index) -> Any:
        if not (self.function.may_capture(index) or _is_given(node)):
            raise Unreadable(node)
        return self.function.element(node, index)

    def _whole(self, node: fx.Node, index: Index) -> Any:
        """An element of a tensor of queries and keys that the graph computes: of the one that the forward has in memory."""
        while node.target is aten.expand.default:
            node, index = call_of(node)[1][0], _broadcast(call_of(node)[1][0], index)
        try:
            return self.function.element(node, index)
        except Unreadable:
            device = node.meta["val"].device
            raise Declined(f"the mask is on {device}, and the attention on {self.function.device}", "move the mask there") from None


class _Inexact(Exception):
    """A bias is rounded to another dtype."""


def _of_number(value: float, dtype: torch.dtype) -> Bias:
    with unset_fake_temporarily():
        rounded = torch.tensor(value, dtype=dtype).item()
    return (False, 0.0) if rounded <= HIDES else (True, rounded)


def _is_narrower(x: Any, dtype: torch.dtype) -> bool:
    return isinstance(x, fx.Node) and isinstance(x.meta.get("val"), Tensor) and x.meta["val"].dtype not in (torch.bool, dtype)


def _is_zero(bias: Any) -> bool:
    return not isinstance(bias, fx.Node) and bias == 0


def _is_given(node: fx.Node) -> bool:
    """Whether the graph has a tensor without computing it: an input, or a view of one."""
    while node.target in VIEWS:
        node = node.args[0]  # type: ignore[assignment]
    return node.op == "placeholder"


def _broadcast(x: Any, index: Index) -> Index:
    return _within(x.meta["val"], index) if isinstance(x, fx.Node) and isinstance(x.meta.get("val"), Tensor) else ()
