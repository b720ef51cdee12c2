"""One pass: five matmuls a tile, dq summed across CTAs in the order of the schedule."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch._inductor.codegen.common import WorkspaceArg, WorkspaceZeroMode
from torch._inductor.ir import FixedLayout, TensorBox
from torch._inductor.lowering import empty_strided

from dash_inductor.first_use.kind import kinds_of
from dash_inductor.schedule.packing import ROUND_ROBIN_MAX_N_Q
from dash_inductor.templates import tiles
from dash_inductor.templates.tiles import Tile

from . import failed_waits, kernels, two_pass
from .buffers import empty
from .dq import Visited, in_accumulator_order, scaled_dq
from .header import add_to_header, root_graph
from .inputs import Inputs, accumulator_order
from .mods import NONE, Mods
from .table import kernel_table


def gradients(inputs: Inputs, mods: Mods = NONE) -> kernels.Gradients:
    """dq, dk, dv, and what to record of them.

    Where sizes known at run time may take two passes, their kernels stand beside that of one: one or the other is launched.
    """
    tile = one_pass_tile(inputs)
    table = kernel_table(inputs, tile)
    launched = launch(
        inputs,
        mods,
        kernels.ONE_PASS,
        [table.table],
        grid=table.workers,
        row_ints=table.row_ints,
        cooperative=not inputs.resolution.chained,
        constants={"STRADDLING": table.round_robin, "ROW_BLOCK": ROUND_ROBIN_MAX_N_Q}
        | ({"SHARED_ROW": True} if table.shared_row else {}),
    )
    if inputs.resolution.two_pass:
        two_pass.into_buffers(inputs, tile, launched.scratch, launched.dk, launched.dv, table.is_two_pass)
    schedule_ints = table.table_ints + table.row_ints
    return kernels.Gradients(launched.dq(inputs), launched.dk, launched.dv, schedule_ints, table.record)


def one_pass_tile(inputs: Inputs) -> Tile:
    """The tile of one pass, alone or beside that of two."""
    tile = inputs.resolution.one_pass
    assert tile
    return tile


@dataclass(frozen=True)
class Launched:
    """What one pass fills: dk, dv, and the scratch of dq, fp32 [B * H, Q tiles, elements of a Q tile]."""

    scratch: TensorBox
    dk: TensorBox
    dv: TensorBox

    def dq(self, inputs: Inputs, visited: Visited | None = None) -> TensorBox:
        """dq [B, H, S_q, D]; `visited` says whether anything was written to a Q tile, None if to each."""
        tile = one_pass_tile(inputs)
        size = inputs.query.get_size()
        return scaled_dq(self.scratch, tile.block_m, in_accumulator_order(tile), size, inputs.dtype, inputs.scale, visited)


def launch(
    inputs: Inputs,
    mods: Mods,
    template: kernels.KernelTemplate,
    walk: Sequence[TensorBox],
    *,
    grid: sympy.Expr | int,
    row_ints: sympy.Expr | int = 0,
    cooperative: bool,
    constants: Mapping[str, object],
    scalars: Sequence[sympy.Expr] = (),
    sums: Sequence[TensorBox] = (),
) -> Launched:
    """Launches `grid` CTAs of a template of one pass, which read from `walk` what they do in which order.

    row_ints: ints that the CTAs write for themselves, behind their semaphores. scalars: for the template. sums: what dk and dv are
    summed in, where CTAs share them.
    """
    device, dtype, tile = inputs.device, inputs.key_gradients_dtype, one_pass_tile(inputs)
    _, dk_meta, dv_meta = inputs.gradients
    tiles_in_all = inputs.query_heads_total * inputs.n_q
    scratch = empty([inputs.query_heads_total, inputs.n_q, tile.block_m * tile.block_d], torch.float32, device)
    dv = empty_strided(*dv_meta, dtype=dtype, device=device)
    dk = kernels.call(
        template,
        grid=grid,
        inputs=[*inputs.tensors, *walk, *mods.read],
        mutated=[scratch, dv, *sums, *mods.mutated],
        scalars=scalars,
        output=FixedLayout(device, dtype, *dk_meta),
        workspace_arg=WorkspaceArg(
            count=2 + tiles_in_all + row_ints,  # the ticket, a dummy, a semaphore for each (head, Q tile)
            zero_mode=WorkspaceZeroMode.ZERO_ON_CALL,
            device=device,
            outer_name=WorkspaceArg.unique_name(),
            dtype=torch.int32,
        ),
        triton_meta={"launch_cooperative_grid": cooperative} | ({} if device.type == "cpu" else _of_a_gpu(inputs, tile)),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        constants=inputs.constants(tile)
        | accumulator_order(tile)
        | {"ATOMIC_ADD": tile.atomic_add, "RELEASE_AFTER": tiles.RELEASE_AFTER}
        | dict(constants)
        | mods.constants,
        subgraphs=mods.subgraphs,
    )
    mods.note(dk)
    return Launched(scratch, dk, dv)


def _of_a_gpu(inputs: Inputs, tile: Tile) -> dict[str, object]:
    """What a kernel on a GPU is held to, and where it reports a wait that gave up."""
    kind = str(kinds_of(inputs.resolution)[0])
    name = f"dash_waits_{hashlib.sha256(kind.encode()).hexdigest()[:16]}"
    source = f"from {failed_waits.__name__} import address_of\n\n{name}_high, {name}_low = address_of({kind!r})\n"
    add_to_header(root_graph(), source)
    return {kernels.CTAS_PER_SM: tile.ctas_per_sm, kernels.FAILED_WAIT: name}
