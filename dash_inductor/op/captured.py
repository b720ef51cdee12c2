"""The gradients of tensors that a score_mod captures, read from its derivative as torch traces it.

The derivative is a graph of (score, b, h, m, n, grad, *captures). It has an output for each capture: None, or for one that needs a
gradient a sum of `zeros_and_scatter(shape, index, value)`. Each element (b, h, m, n) of the scores adds `value` at `index` of the
tensor's gradient.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..decision import Declined

AXES = 4  # b, h, m, n
BEFORE_CAPTURES = 6  # arguments of the derivative: score, b, h, m, n, grad
MOST_ELEMENTS = 2**31 - 1  # of [B, H, S_q, S_k], 8 GiB of fp32: with more, Inductor would count everything in a kernel in 64 bits
MOST_SORTED = 2**28  # places (b, h, m, n) that are sorted by an index computed of them
OUTSIDE = "add the bias outside of score_mod, or detach the tensor"
BEFOREHAND = "compute it before, as a tensor of integers that score_mod reads"
CONVERSION = torch.ops.prims.convert_element_type.default
CONSTANT = torch.ops.aten.full.default
OF_ELEMENTS = (CONVERSION, CONSTANT, torch.ops.aten.index.Tensor, torch.ops.aten.scalar_tensor.default)


@dataclass(frozen=True)
class Share:
    """What elements of the scores add to the gradient of a captured tensor, and where.

    Attributes:
        capture: the number of the tensor among the captures.
        value: a node of the derivative, a number for each element.
        index: of each dim of the tensor a number, or a node of the derivative.
    """

    capture: int
    value: fx.Node
    index: tuple[int | fx.Node, ...]

    @property
    def kept(self) -> dict[int, int]:
        """The dims of the tensor that are an axis of [B, H, S_q, S_k] as it is, and which one; each axis of one dim alone."""
        read = [_axes_of(x) for x in self.index]
        alone = {axis for axes in read for axis in axes if sum(axis in others for others in read) == 1}
        own = {dim: axis for dim, x in enumerate(self.index) if (axis := _axis(x)) is not None}
        return {dim: axis for dim, axis in own.items() if axis in alone}

    @property
    def fixed(self) -> dict[int, int]:
        """The dims at which the index is a number, and that number; negative ones count from the end."""
        return {dim: x for dim, x in enumerate(self.index) if isinstance(x, int)}

    @property
    def computed(self) -> list[int]:
        """The other dims: their index is computed from axes."""
        return [dim for dim in range(len(self.index)) if dim not in self.kept and dim not in self.fixed]

    @property
    def mixed(self) -> list[int]:
        """The axes from which it is computed."""
        return sorted(set().union(*(_axes_of(self.index[dim]) for dim in self.computed)))

    @property
    def summed(self) -> list[int]:
        """The axes that the index does not depend on."""
        return [axis for axis in range(AXES) if axis not in self.mixed and axis not in self.kept.values()]


def shares_of(derivative: fx.Graph) -> list[Share]:
    """The shares of each capture with a gradient, in the order of the captures.

    Raises:
        Declined: for a gradient that is no such sum, or an index that is not read.
    """
    *_, output = derivative.nodes
    gradients = output.args[0][BEFORE_CAPTURES - 1 :]  # type: ignore[index]
    return [Share(number, *each) for number, x in enumerate(gradients) if x is not None for each in _terms(x)]


def why_too_many(sizes: Sequence[Any], shares: Sequence[Share] = ()) -> Declined | None:
    """The reason that lies in B, H, S_q and S_k; comparisons of symbolic sizes guard. shares: none of a learnt mask."""
    if math.prod(sizes) > MOST_ELEMENTS:
        reason = f"the gradient of what is added to scores takes {math.prod(sizes)} elements of memory, more than {MOST_ELEMENTS}"
        return Declined(reason, "use shorter sequences, a smaller batch or fewer heads at a time")
    for share in shares:
        if (size := math.prod(sizes[axis] for axis in share.mixed)) > MOST_SORTED:
            reason = f"{size} places are sorted by the index of a captured tensor, more than {MOST_SORTED}"
            return Declined(reason, "compute the index from fewer of b, h, q_idx and kv_idx")
    return None


def _terms(gradient: fx.Node) -> Iterator[tuple[fx.Node, tuple[int | fx.Node, ...]]]:
    """The value and the index of each part of a sum."""
    if gradient.target is torch.ops.aten.add.Tensor and not gradient.kwargs and gradient.meta["val"].dim():
        for part in gradient.args:
            if not isinstance(part, fx.Node):
                raise _unread(f"{gradient.target} of a number")
            yield from _terms(part)
    elif gradient.target is torch.ops.flex_lib.zeros_and_scatter.default:
        shape, index, value = gradient.args
        if len(shape) != len(index) or not _is_number(value):  # type: ignore[arg-type]
            raise Declined("score_mod reads rows of a captured tensor that requires a gradient", "index all of its dims")
        yield _unrounded(value), tuple(_read(x) for x in index)  # type: ignore[union-attr, arg-type]
    elif _is_number(gradient):  # of a tensor without dims
        yield _unrounded(gradient), ()
    else:
        raise _unread(str(gradient.target))


def _unread(what: str) -> Declined:
    return Declined(
        f"{what} in the gradient of a tensor that score_mod captures", f"read the tensor by its index alone, or {OUTSIDE}"
    )


def _is_number(x: Any) -> bool:
    """Whether a node is one number of each element."""
    return isinstance(x, fx.Node) and isinstance(val := x.meta.get("val"), torch.Tensor) and val.dim() == 0


def _unrounded(value: Any) -> fx.Node:
    """Before the tensor's dtype: the sum is rounded, not what is summed."""
    while value.target is CONVERSION and value.args[0].meta["val"].is_floating_point():
        value = value.args[0]
    return value


def _read(x: fx.Node | int) -> fx.Node | int:
    """An index, a number where it is constant. Declined if an axis and tensors do not give it element by element."""
    if isinstance(x, int):
        return x
    if not _is_number(x):
        raise _unread("a size as an index")
    if x.target is CONVERSION and x.args[1] in (torch.int32, torch.int64) and _axis(axis := x.args[0]) is not None:  # type: ignore[arg-type]
        return axis  # type: ignore[return-value]
    if x.target is CONSTANT and isinstance(x.args[1], int):
        return x.args[1]
    for node in _cone(x):
        number = _number(node)
        if number in (0, BEFORE_CAPTURES - 1):
            raise Declined("score_mod reads a tensor that requires a gradient at an index made of the score", OUTSIDE)
        if node.op != "placeholder" and not (node.op == "call_function" and _is_of_elements(node)):
            raise _unread(f"{node.target} in an index")
        is_float = isinstance(val := node.meta.get("val"), torch.Tensor) and val.is_floating_point()
        # What is computed, and not only read or converted, rounds here perhaps otherwise than in the kernel of the forward.
        if is_float and node.op == "call_function" and node.target not in OF_ELEMENTS:
            raise Declined(f"score_mod computes an index in floats, by {node.target}", BEFOREHAND)
    return x


def _is_of_elements(node: fx.Node) -> bool:
    """Whether it is computed element by element; sizes by Python's operators."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return _is_number(node) and (target in OF_ELEMENTS or torch.Tag.pointwise in target.tags)
    return getattr(operator, target.__name__, None) is target


def _cone(x: fx.Node) -> list[fx.Node]:
    """The node, and all that it depends on, the last first."""
    found, left = dict[fx.Node, None](), [x]
    while left:
        node = left.pop()
        if node not in found:
            found[node] = None
            left.extend(node.all_input_nodes)
    return list(found)


def _number(node: fx.Node) -> int | None:
    """Which argument of the derivative a node is; None for none."""
    if node.op != "placeholder":
        return None
    return [x for x in node.graph.nodes if x.op == "placeholder"].index(node)


def _axis(x: fx.Node | int) -> int | None:
    """Which axis of [B, H, S_q, S_k] an index is, as it is; None for none."""
    number = None if isinstance(x, int) else _number(x)
    return number - 1 if number is not None and 1 <= number <= AXES else None


def _axes_of(x: fx.Node | int) -> set[int]:
    """The axes that an index depends on."""
    return set() if isinstance(x, int) else {axis for node in _cone(x) if (axis := _axis(node)) is not None}
