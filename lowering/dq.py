"""dq out of the fp32 scratch in which the kernels sum it, as an ordinary op that fuses with what follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import sympy
import torch
from torch._inductor.ir import Pointwise, TensorBox
from torch._inductor.virtualized import OpsValue, ops
from torch.utils._sympy.functions import FloorDiv

from dash_inductor.templates.tiles import Tile


def scaled_dq(
    scratch: TensorBox,
    tile: Tile,
    size: Sequence[sympy.Expr],
    dtype: torch.dtype,
    scale: float,
    visited: Callable[[sympy.Expr, sympy.Expr, sympy.Expr], OpsValue] | None = None,
) -> TensorBox:
    """scale * scratch in `dtype`, [B, H, S_q, D] = `size`; scratch is [B * H, Q tiles, elements of a Q tile].

    0 where `visited`, of (b, h, Q tile), says that nothing was written; all was where it is None. By index and not by views, which
    would guard on whether there is one Q tile or more.
    """
    load, place = scratch.make_loader(), in_accumulator_order(tile)

    def element(index: Sequence[sympy.Expr]) -> OpsValue:
        b, h, m, d = index
        i = FloorDiv(m, tile.block_m)
        value = load([b * size[1] + h, i, *place(m, d)])
        if visited is not None:
            value = ops.where(ops.to_dtype(visited(b, h, i), torch.bool), value, ops.constant(0.0, torch.float32))
        return ops.to_dtype(ops.mul(value, ops.constant(scale, torch.float32)), dtype)

    return Pointwise.create(device=scratch.get_device(), dtype=dtype, inner_fn=element, ranges=size)


def in_accumulator_order(tile: Tile) -> Callable[[sympy.Expr, sympy.Expr], list[sympy.Expr]]:
    """Where the kernel put element (m, d) of a head in the row of scratch of m's Q tile: by `Tile.dq_digits`."""

    def place(m: sympy.Expr, d: sympy.Expr) -> list[sympy.Expr]:
        positions = (d, m) if tile.dq_transposed else (m, d)
        # Digits by quotients alone, x // one - count * (x // (one * count)): Inductor takes long to simplify remainders.
        at = sympy.Integer(0)
        for axis, one, count in tile.dq_digits:
            at = at * count + FloorDiv(positions[axis], one) - count * FloorDiv(positions[axis], one * count)
        return [at]

    return place
