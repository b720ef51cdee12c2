"""Tensors in memory as the kernels take and return them."""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch
from torch._inductor.ir import ExternKernel, FixedLayout, FlexibleLayout, IRNode, SliceView, TensorBox
from torch._inductor.lowering import empty_strided, full
from torch._inductor.virtualized import V

ALIGNED = 8  # elements of 16 bits in 16 bytes, what one asynchronous copy moves


def in_memory(x: IRNode) -> IRNode:
    """x in memory, its layout decided."""
    x = ExternKernel.realize_input(x)
    if isinstance(x.maybe_get_layout(), FlexibleLayout):
        x.freeze_layout()
    return x


def with_aligned_rows(x: IRNode) -> IRNode:
    """x in memory, rows starting and stepping in multiples of 16 bytes, as cp.async needs: as it is where possible, else copied."""
    x = in_memory(x)
    *outer, last = x.get_stride()
    aligned = all(multiple(stride, ALIGNED) for stride in (*outer, x.get_layout().offset))
    if last == 1 and (aligned or not multiple(x.get_size()[-1], ALIGNED)):
        return x
    return ExternKernel.require_contiguous(ExternKernel.copy_input(x))


def narrow(x: IRNode, dim: int, start: int, length: int) -> TensorBox:
    """A view of what is in memory, as torch.narrow."""
    return TensorBox(SliceView.create(x, dim, start, start + length))


def multiple(size: sympy.Expr | int, factor: int) -> bool:
    """Whether a size is known to be a multiple of `factor`."""
    return V.graph.sizevars.statically_known_multiple_of(sympy.sympify(size), factor)


def traced_gradients() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv as the graph was traced with them: their strides are those that our fake or the stock op's gave."""
    return V.graph.current_node.meta["val"][:3]


def size_and_strides(meta: torch.Tensor) -> tuple[list[sympy.Expr], list[sympy.Expr]]:
    """Those of a traced tensor, as expressions."""

    def expression(x: int | torch.SymInt) -> sympy.Expr:
        return x.node.expr if isinstance(x, torch.SymInt) else sympy.Integer(x)

    return [expression(s) for s in meta.shape], [expression(s) for s in meta.stride()]


def contiguous(size: Sequence[sympy.Expr], dtype: torch.dtype, device: torch.device) -> FixedLayout:
    """The layout of a contiguous tensor."""
    return FixedLayout(device, dtype, size, FlexibleLayout.contiguous_strides(size))


def empty(size: Sequence[sympy.Expr], dtype: torch.dtype, device: torch.device) -> TensorBox:
    """Uninitialised memory, without a fill."""
    return empty_strided(size, FlexibleLayout.contiguous_strides(size), dtype=dtype, device=device)


def zeros(size: Sequence[sympy.Expr], dtype: torch.dtype, device: torch.device) -> TensorBox:
    """Zeros in memory, contiguous."""
    filled = full(size, 0, dtype=dtype, device=device)
    in_memory(filled)
    return filled
