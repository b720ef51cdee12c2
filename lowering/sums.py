"""Sums of what is in memory, in an order that sizes alone decide: of the gradients of what is added to scores."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch._inductor.ir import ExternKernel, IRNode, Pointwise, TensorBox
from torch._inductor.lowering import lowerings, register_lowering
from torch._inductor.utils import sympy_product
from torch._inductor.virtualized import ops
from torch.utils._sympy.functions import CeilDiv

from dash_inductor.op import SUM_IN_ORDER

from . import kernels
from .buffers import contiguous, empty

SPLITS = 32  # of a sum over queries or keys
BLOCK_KEPT, BLOCK_SUMMED = 64, 16  # where neighbours in memory are not summed
BLOCK_OF_NEIGHBOURS = 1024  # where they are
Index = Sequence[sympy.Expr]


def sums(
    x: IRNode,
    kept: Sequence[int],
    summed: Sequence[int],
    mixed: Sequence[int] = (),
    order: Sequence[IRNode] = (),
    splits: int = 1,
) -> TensorBox:
    """fp32 [splits, places along the axes kept, entries]: of x, contiguous, along the axes summed. Whoever reads it adds up the
    splits, by `total`.

    mixed, order: further axes, whose places add to one sum for each entry: which ones in which order, and at which of them each
    entry begins, int64 and int32 [entries + 1]. Without them there is one entry.
    """
    sizes, device = list(map(sympy.sympify, x.get_size())), x.get_device_or_error()
    places = sympy_product([sizes[axis] for axis in kept])
    entries = order[1].get_size()[0] - 1 if order else sympy.Integer(1)
    of_neighbours = len(sizes) - 1 not in kept
    block_kept, block_summed = (1, BLOCK_OF_NEIGHBOURS) if of_neighbours or order else (BLOCK_KEPT, BLOCK_SUMMED)
    blocks = CeilDiv(sympy_product([sizes[axis] for axis in (*summed, *mixed)]), block_summed)
    if isinstance(blocks, sympy.Integer):
        splits = max(1, min(splits, int(blocks)))  # the others would add zeros
    found = empty([sympy.Integer(splits), places, entries], torch.float32, device)
    kernels.call(
        kernels.SHARES,
        grid=CeilDiv(places, block_kept) * entries * splits,
        inputs=[x, *order],
        mutated=[found],
        output=contiguous([sympy.Integer(0)], torch.float32, device),  # every template has an output
        constants={
            "AXES": len(sizes),
            "SORTED": bool(order),
            "SPLITS": splits,
            "BLOCK_KEPT": block_kept,
            "BLOCK_SUMMED": block_summed,
            **{name: _neighbours(axes) for name, axes in (("KEPT", kept), ("SUMMED", summed), ("MIXED", mixed))},
        },
    )
    return found


def total(found: TensorBox, place: sympy.Expr, entry: sympy.Expr) -> Any:
    """The sum of an entry, in fp32: its splits, from the first on."""
    load = found.make_loader()
    return functools.reduce(ops.add, [load([sympy.Integer(split), place, entry]) for split in range(int(found.get_size()[0]))])


def flat(index: Index, sizes: Index) -> sympy.Expr:
    """The number of a place, counted as contiguous memory is."""
    number = sympy.Integer(0)
    for each, size in zip(index, sizes, strict=True):
        number = number * size + each
    return number


def _neighbours(axes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The first and the last of each run of axes."""
    runs: list[tuple[int, int]] = []
    for axis in axes:
        if runs and runs[-1][1] == axis - 1:
            runs[-1] = (runs[-1][0], axis)
        else:
            runs.append((axis, axis))
    return tuple(runs)


@register_lowering(SUM_IN_ORDER, type_promotion_kind=None)
def lower(x: TensorBox, dims: Sequence[int], keepdim: bool, dtype: torch.dtype) -> TensorBox:
    """Sums over axes of a tensor, whose last two are those of queries and keys."""
    in_memory = ExternKernel.require_contiguous(x)
    size = list(in_memory.get_size())
    kept = [axis for axis in range(len(size)) if axis not in dims]
    splits = SPLITS if any(axis >= len(size) - 2 for axis in dims) else 1
    found = sums(in_memory, kept, sorted(dims), splits=splits)
    ranges = [size[axis] for axis in kept]

    def element(index: Index) -> Any:
        return ops.to_dtype(total(found, flat(index, ranges), sympy.Integer(0)), dtype)

    result = Pointwise.create(device=x.get_device_or_error(), dtype=dtype, inner_fn=element, ranges=ranges)
    whole = [sympy.Integer(1) if axis in dims else each for axis, each in enumerate(size)]
    return lowerings[torch.ops.aten.view.default](result, whole) if keepdim else result
