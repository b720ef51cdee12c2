"""Lowers `dash::sdpa_backward`: delta and lse, the schedule's table, the kernel, and dq as ordinary fusable ops."""

from __future__ import annotations

import math
from typing import Any

import sympy
import torch
from torch._inductor.codegen.common import WorkspaceArg, WorkspaceZeroMode
from torch._inductor.ir import ExternKernel, FixedLayout, FlexibleLayout, Pointwise
from torch._inductor.lowering import empty_strided, register_lowering
from torch._inductor.virtualized import V, ops
from torch.utils._sympy.functions import CeilDiv, FloorDiv, ModularIndexing

from dash_inductor.config import current
from dash_inductor.ops import LOG2E
from dash_inductor.record import Decision, size_text
from dash_inductor.target import DTYPES, Tile, target_of, tile_of

from . import kernels
from .report import report
from .schedule import Problem, schedule_of

ALIGNED = 8  # elements of 16 bits in 16 bytes, what one asynchronous copy moves


@register_lowering(torch.ops.dash.sdpa_backward.default, type_promotion_kind=None)
def lower(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    *,
    mask: str,
    blocks: Any = None,
    scale: float | None = None,
) -> tuple[Any, Any, Any]:
    batch, heads, q_len, head_dim = query.get_size()
    kv_heads, kv_len = key.get_size()[1:3]
    group = V.graph.sizevars.guard_int(FloorDiv(heads, kv_heads))
    head_dim = V.graph.sizevars.guard_int(head_dim)
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    device, dtype = query.get_device(), query.get_dtype()
    target = target_of(device)
    tile = tile_of(target, dtype, head_dim)

    # The strides that the graph was traced with, as our fake or the stock op's gave them.
    _, dk_meta, dv_meta = V.graph.current_node.meta["val"]
    query, key, value, grad_out, out = (_rows(x) for x in (query, key, value, grad_out, out))
    logsumexp = _realized(logsumexp)

    n_q = CeilDiv(sympy.sympify(q_len), tile.block_m)
    query_heads = sympy.sympify(batch) * heads
    padded_rows = [batch, heads, n_q * tile.block_m]
    delta = _empty(padded_rows, torch.float32, device)
    constants = {"BLOCK_M": tile.block_m, "BLOCK_D": tile.block_d, "HEAD_DIM": head_dim}
    neg_lse = kernels.call(
        kernels.PREPROCESS,
        grid=query_heads * n_q,
        inputs=[out, grad_out, logsumexp],
        mutated=[delta],
        output=_contiguous(padded_rows, torch.float32, device),
        num_warps=tile.preprocess_warps,
        constants=constants,
    )

    problem = Problem(target, tile, mask, group, q_len, kv_len, sympy.sympify(batch) * kv_heads)
    schedule = schedule_of(problem, query)
    scratch = _empty([query_heads, n_q, tile.block_m * tile.block_d], torch.float32, device)
    dv = empty_strided(*_size_and_strides(dv_meta), dtype=dtype, device=device)
    semaphores = 2 + query_heads * n_q  # the ticket, a dummy, one for each (head, Q tile)
    dk = kernels.call(
        kernels.SDPA_BACKWARD,
        grid=schedule.workers,
        inputs=[query, key, value, grad_out, neg_lse, delta, schedule.table],
        mutated=[scratch, dv],
        output=FixedLayout(device, dtype, *_size_and_strides(dk_meta)),
        workspace_arg=WorkspaceArg(
            count=semaphores,
            zero_mode=WorkspaceZeroMode.ZERO_ON_CALL,
            device=device,
            outer_name=WorkspaceArg.unique_name(),
            dtype=torch.int32,
        ),
        cooperative=schedule.cooperative,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        constants=constants
        | {
            "BLOCK_N": tile.block_n,
            "GROUP": group,
            "CAUSAL": mask != "full",
            "EVEN_M": _multiple(q_len, tile.block_m),
            "EVEN_N": _multiple(kv_len, tile.block_n),
            "EVEN_D": head_dim == tile.block_d,
            "SCALE": scale,
            "SCALE_LOG2E": scale * LOG2E,
            "DQ_TRANSPOSED": tile.dq_transposed,
            "WARPS_M": tile.warps_m,
            "INSTR_N": tile.instr_n,
            "ATOMIC_ADD": tile.atomic_add,
            "INTERPRET": device.type == "cpu",
        },
    )
    dq = _scaled_dq(scratch, tile, [batch, heads, q_len, head_dim], dtype, scale)

    workspace = 4 * (query_heads * n_q * tile.block_m * (tile.block_d + 2) + semaphores + schedule.table_ints)
    report(
        Decision(
            op=V.graph.current_node.meta.get("dash_op", "dash.sdpa_backward"),
            device=target.key,
            dtype=DTYPES[dtype],
            mask=mask,
            batch=size_text(batch),
            heads=size_text(heads),
            kv_heads=size_text(kv_heads),
            q_len=size_text(q_len),
            kv_len=size_text(kv_len),
            head_dim=head_dim,
            tile=f"{tile.block_m}x{tile.block_n}x{tile.block_d}",
            guarantee=current().guarantee,
            workspace_bytes=size_text(workspace),
            **schedule.report,
        )
    )
    return dq, dk, dv


def _realized(x: Any) -> Any:
    """x in memory, its layout decided."""
    x = ExternKernel.realize_input(x)
    if isinstance(x.maybe_get_layout(), FlexibleLayout):
        x.freeze_layout()
    return x


def _rows(x: Any) -> Any:
    """x in memory with rows that asynchronous copies can take (kernel.md rule 11), as it is where possible, else copied."""
    x = _realized(x)
    *outer, last = x.get_stride()
    aligned = all(_multiple(stride, ALIGNED) for stride in (*outer, x.get_layout().offset))
    if last == 1 and (aligned or not _multiple(x.get_size()[-1], ALIGNED)):
        return x
    return ExternKernel.require_contiguous(ExternKernel.copy_input(x))


def _multiple(size: Any, factor: int) -> bool:
    return V.graph.sizevars.statically_known_multiple_of(sympy.sympify(size), factor)


def _size_and_strides(meta: torch.Tensor) -> tuple[list[Any], list[Any]]:
    def expression(x: Any) -> Any:
        return x.node.expr if isinstance(x, torch.SymInt) else sympy.Integer(x)

    return [expression(s) for s in meta.shape], [expression(s) for s in meta.stride()]


def _contiguous(size: list[Any], dtype: torch.dtype, device: torch.device) -> FixedLayout:
    return FixedLayout(device, dtype, size, FlexibleLayout.contiguous_strides(size))


def _empty(size: list[Any], dtype: torch.dtype, device: torch.device) -> Any:
    """Uninitialised memory, without a fill."""
    return empty_strided(size, FlexibleLayout.contiguous_strides(size), dtype=dtype, device=device)


def _scaled_dq(scratch: Any, tile: Tile, size: list[Any], dtype: torch.dtype, scale: float) -> Any:
    """scale * scratch in `dtype`, [B, H, S_q, D]; scratch as the kernel's `to_accumulator_order` wrote it. Fuses with what follows.

    By index and not by views, which would guard on whether there is one Q tile or more.
    """
    load = scratch.make_loader()
    columns = tile.block_m if tile.dq_transposed else tile.block_d

    def element(index: Any) -> Any:
        b, h, m, d = index
        i, m = FloorDiv(m, tile.block_m), ModularIndexing(m, 1, tile.block_m)
        row, column = (d, m) if tile.dq_transposed else (m, d)
        digits = [  # (position, how many there are), slowest first
            (FloorDiv(row, 16 * tile.warps_m), None),
            (ModularIndexing(column, 8, tile.instr_n // 8), tile.instr_n // 8),
            (FloorDiv(column, tile.instr_n), columns // tile.instr_n),
            (ModularIndexing(row, 16, tile.warps_m), tile.warps_m),
            (ModularIndexing(row, 1, 8), 8),
            (ModularIndexing(column, 2, 4), 4),
            (ModularIndexing(row, 8, 2), 2),
            (ModularIndexing(column, 1, 2), 2),
        ]
        place = sympy.Integer(0)
        for digit, count in digits:
            place = place * (count or 1) + digit
        value = load([b * size[1] + h, i, place])
        return ops.to_dtype(ops.mul(value, ops.constant(scale, torch.float32)), dtype)

    return Pointwise.create(device=scratch.get_device(), dtype=dtype, inner_fn=element, ranges=size)
