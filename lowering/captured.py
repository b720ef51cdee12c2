"""The gradients of captured tensors: what the kernels have written for each element of the scores, summed in a fixed order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._inductor.ir import IRNode, Pointwise, TensorBox
from torch._inductor.lowering import lowerings
from torch._inductor.subgraph_lowering import PointwiseSubgraphLowering
from torch._inductor.utils import sympy_product
from torch._inductor.virtualized import OpsValue, V, ops

from dash_inductor.op import FlexArguments
from dash_inductor.op.captured import AXES, BEFORE_CAPTURES, Share

from .buffers import in_memory
from .mods import Mods, returning
from .sums import SPLITS, Index, flat, sums, total

aten = torch.ops.aten
QUERIES, KEYS = AXES - 2, AXES - 1  # axes


def gradients(arguments: FlexArguments, mods: Mods) -> tuple[TensorBox | None, ...]:
    """The gradient of each capture, contiguous; None for one that needs none."""
    found: list[TensorBox | None] = []
    for number, capture in enumerate(arguments.score_mod_captures):
        shares = [share for share in mods.shares if share.capture == number]
        found.append(_gradient(capture, shares, arguments, mods) if shares else None)
    return tuple(found)


def _gradient(capture: TensorBox, shares: list[Share], arguments: FlexArguments, mods: Mods) -> TensorBox:
    size, dtype = list(map(sympy.sympify, capture.get_size())), capture.get_dtype()
    if len(shares) == 1 and _is_values(shares[0], size, dtype, mods):
        return mods.values[shares[0].value]
    elements = [_element(share, size, arguments, mods) for share in shares]

    def element(index: Index) -> Any:
        return ops.to_dtype(functools.reduce(ops.add, [each(index) for each in elements]), dtype)

    return Pointwise.create(device=capture.get_device_or_error(), dtype=dtype, inner_fn=element, ranges=size)


def _is_values(share: Share, size: list[sympy.Expr], dtype: torch.dtype, mods: Mods) -> bool:
    """Whether the values are the gradient."""
    values = mods.values[share.value]
    same_size = all(map(V.graph.sizevars.statically_known_equals, size, values.get_size()))
    return share.kept == {axis: axis for axis in range(AXES)} and same_size and dtype == values.get_dtype()


def _element(share: Share, size: list[sympy.Expr], arguments: FlexArguments, mods: Mods) -> Callable[[Index], OpsValue]:
    """The fp32 gradient at an index of the tensor."""
    values = mods.values[share.value]
    sizes = [sympy.sympify(each) for each in values.get_size()]
    axes = sorted(share.kept.values())
    found = None if len(axes) == AXES else _sums(share, values, size, arguments)

    def element(index: Index) -> Any:
        of_axis = {axis: index[dim] for dim, axis in share.kept.items()}
        kept = [of_axis[axis] for axis in axes]
        if found is None:
            return ops.to_dtype(values.make_loader()(kept), torch.float32)
        entry = flat([index[dim] for dim in share.computed], [size[dim] for dim in share.computed])
        return total(found, flat(kept, [sizes[axis] for axis in axes]), entry)

    def where_it_is(index: Index) -> Any:
        """Zero past the ends of an axis, and beside an index that is a number."""
        inside = [
            _compare(ops.lt, index[dim], sizes[axis]) for dim, axis in share.kept.items() if not _fits(size[dim], sizes[axis])
        ]
        inside += [_compare(ops.eq, index[dim], at % size[dim]) for dim, at in share.fixed.items() if size[dim] != 1]
        if not inside:
            return element(index)
        return ops.masked(functools.reduce(ops.logical_and, inside), lambda: element(index), 0.0)

    return where_it_is


def _fits(size: sympy.Expr, axis: sympy.Expr) -> bool:
    return V.graph.sizevars.statically_known_leq(size, axis)


def _compare(compare: Any, index: sympy.Expr, other: sympy.Expr) -> Any:
    return compare(ops.index_expr(index, torch.int64), ops.index_expr(other, torch.int64))


def _sums(share: Share, values: TensorBox, size: list[sympy.Expr], arguments: FlexArguments) -> TensorBox:
    """`sums` of the values: an entry for each place along the dims whose index is computed."""
    sizes = [sympy.sympify(each) for each in values.get_size()]
    entries = sympy_product([size[dim] for dim in share.computed])
    order = _order(share, sizes, size, entries, arguments) if share.computed else []
    added = sympy_product([sizes[axis] for axis in (*share.summed, *share.mixed)])
    # Few are added to each sum where batch and heads alone are, or where an index is hardly ever met twice.
    few = not {QUERIES, KEYS} & {*share.summed, *share.mixed} or _fits(added, SPLITS * entries)
    return sums(values, sorted(share.kept.values()), share.summed, share.mixed, order, 1 if few else SPLITS)


def _order(
    share: Share, sizes: list[sympy.Expr], size: list[sympy.Expr], entries: sympy.Expr, arguments: FlexArguments
) -> list[IRNode]:
    """The places along the mixed axes, sorted by their index in the tensor and then by themselves, int64; and at which of them each
    entry begins, int32 [entries + 1]. Made once for all attentions of a graph that have the same index.

    A stable sort has one result, whoever computes it."""
    index: Any = [share.index[dim] for dim in share.computed]
    module = returning(arguments.joint.graph_module, index, arguments.query.get_device_or_error())
    captures = [in_memory(x) if isinstance(x, TensorBox) else x for x in arguments.score_mod_captures]
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    read = [x for x, node in zip(captures, placeholders[BEFORE_CAPTURES:], strict=True) if node.users]
    mixed = [sizes[axis] for axis in share.mixed]
    known = V.graph.__dict__.setdefault("dash_orders", {})
    key = (
        str(module.graph),
        *(x.get_name() if isinstance(x, IRNode) else x for x in read),
        *mixed,
        *(size[dim] for dim in share.computed),
    )
    if key in known:
        return known[key]
    flat = lowerings[aten.expand.default](_index(module, share, sizes, size, arguments), mixed)
    flat = in_memory(lowerings[aten.view.default](flat, [sympy_product(mixed)]))
    in_order, order = lowerings[aten.sort.stable](flat, stable=True, dim=0, descending=False)
    all_entries = _iota(entries + 1, torch.int32, flat.get_device_or_error())
    begins = lowerings[aten.searchsorted.Tensor](TensorBox(in_memory(in_order)), all_entries, out_int32=True)
    known[key] = [in_memory(order), in_memory(begins)]
    return known[key]


def _index(
    module: fx.GraphModule, share: Share, sizes: list[sympy.Expr], size: list[sympy.Expr], arguments: FlexArguments
) -> TensorBox:
    """The index along the dims for which it is computed, as one number, int32, for each place along the mixed axes. module: returns
    the index of each of these dims."""
    device = arguments.query.get_device_or_error()
    axes = [_iota_along(axis, share.mixed, sizes, device) for axis in range(AXES)]
    score = lowerings[aten.full.default]([], 0.0, dtype=torch.float32, device=device)
    lowered = PointwiseSubgraphLowering(module, V.graph, None, {aten.index.Tensor: _index_inside})
    with V.set_graph_handler(lowered):  # type: ignore[arg-type]
        lowered.run(score, *axes, score, *arguments.score_mod_captures)
        found = [_inside(x, size[dim]) for x, dim in zip(lowered.graph_outputs, share.computed, strict=True)]  # type: ignore[arg-type]
        flat = found[0]
        for x, dim in zip(found[1:], share.computed[1:], strict=True):
            flat = lowerings[aten.add.Tensor](lowerings[aten.mul.Tensor](flat, size[dim]), x)
        return lowerings[torch.ops.prims.convert_element_type.default](flat, torch.int32)


def _inside(index: TensorBox, size: sympy.Expr) -> TensorBox:
    """The index, int64. One that is out of range, as that of a hidden element may be, becomes one in range."""
    wide = lowerings[aten.clamp_min.default](lowerings[torch.ops.prims.convert_element_type.default](index, torch.int64), 0)
    last = Pointwise.create(
        device=index.get_device_or_error(),
        dtype=torch.int64,
        inner_fn=lambda _: ops.index_expr(size - 1, torch.int64),
        ranges=[],
    )
    return lowerings[aten.minimum.default](wide, last)


def _index_inside(x: TensorBox, index: Sequence[TensorBox | None]) -> TensorBox:
    """`aten.index` whose index stays inside, for elements too that are hidden in the forward."""
    size = x.get_size()
    return lowerings[aten.index.Tensor](x, [None if each is None else _inside(each, size[dim]) for dim, each in enumerate(index)])


def _iota(length: sympy.Expr, dtype: torch.dtype, device: torch.device) -> TensorBox:
    return Pointwise.create(device=device, dtype=dtype, inner_fn=lambda index: ops.index_expr(index[0], dtype), ranges=[length])


def _iota_along(axis: int, mixed: list[int], sizes: list[sympy.Expr], device: torch.device) -> TensorBox:
    """The axis, for each place along the mixed axes; 1 long along the others of them."""

    def element(index: Index) -> Any:
        return ops.index_expr(index[mixed.index(axis)] if axis in mixed else sympy.Integer(0), torch.int32)

    ranges = [sizes[each] if each == axis else sympy.Integer(1) for each in mixed]
    return Pointwise.create(device=device, dtype=torch.int32, inner_fn=element, ranges=ranges)
