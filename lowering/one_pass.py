"""One pass: five matmuls a tile, dq summed across CTAs in the order of the schedule."""

from __future__ import annotations

import torch
from torch._inductor.codegen.common import WorkspaceArg, WorkspaceZeroMode
from torch._inductor.ir import FixedLayout
from torch._inductor.lowering import empty_strided

from dash_inductor.schedule.packing import ROUND_ROBIN_MAX_N_Q
from dash_inductor.templates import tiles
from dash_inductor.templates.tiles import EitherTile, Tile

from . import kernels, two_pass
from .buffers import empty, size_and_strides, traced_gradients
from .dq import in_accumulator_order, scaled_dq
from .inputs import Inputs, accumulator_order
from .table import kernel_table


def gradients(inputs: Inputs) -> kernels.Gradients:
    """dq, dk, dv, and what to record of them.

    Where sizes known at run time may take two passes, their kernels stand beside that of one: one or the other is launched.
    """
    resolution, device, dtype = inputs.resolution, inputs.device, inputs.dtype
    tile = resolution.tile.one_pass if isinstance(resolution.tile, EitherTile) else resolution.tile
    assert isinstance(tile, Tile)
    _, dk_meta, dv_meta = traced_gradients()
    table = kernel_table(inputs, tile)
    scratch = empty([inputs.query_heads_total, inputs.n_q, tile.block_m * tile.block_d], torch.float32, device)
    dv = empty_strided(*size_and_strides(dv_meta), dtype=dtype, device=device)
    semaphores = 2 + inputs.query_heads_total * inputs.n_q  # the ticket, a dummy, one for each (head, Q tile)
    ints = semaphores + table.row_ints
    dk = kernels.call(
        kernels.ONE_PASS,
        grid=table.workers,
        inputs=[*inputs.tensors, table.table],
        mutated=[scratch, dv],
        output=FixedLayout(device, dtype, *size_and_strides(dk_meta)),
        workspace_arg=WorkspaceArg(
            count=ints,
            zero_mode=WorkspaceZeroMode.ZERO_ON_CALL,
            device=device,
            outer_name=WorkspaceArg.unique_name(),
            dtype=torch.int32,
        ),
        cooperative=not resolution.chained,
        ctas_per_sm=None if device.type == "cpu" else tile.ctas_per_sm,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        constants=inputs.constants(tile)
        | accumulator_order(tile)
        | {
            "ATOMIC_ADD": tile.atomic_add,
            "RELEASE_AFTER": tiles.RELEASE_AFTER,
            "STRADDLING": table.round_robin,
            "ROW_BLOCK": ROUND_ROBIN_MAX_N_Q,
        },
    )
    if isinstance(resolution.tile, EitherTile):
        two_pass.into_buffers(inputs, resolution.tile, scratch, dk, dv, table.is_two_pass)
    place = in_accumulator_order(tile)
    dq = scaled_dq(scratch, table.visited, tile.block_m, place, inputs.query.get_size(), dtype, inputs.scale)
    scratch_ints = inputs.query_heads_total * inputs.n_q * tile.block_m * tile.block_d + ints + table.table_ints
    return kernels.Gradients(dq, dk, dv, scratch_ints, table.record)
