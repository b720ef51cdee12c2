"""One pass under a mask in blocks: the launch that walks the rows of the mask."""

from __future__ import annotations

from dataclasses import dataclass

import sympy
import torch
from torch._inductor.ir import TensorBox
from torch._inductor.utils import sympy_product
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import CeilDiv, FloorDiv, Min

from dash_inductor.op import MaskArguments
from dash_inductor.schedule.parts import FEW_CHAINS, LEAST_STEPS, RunTimeParts
from dash_inductor.templates.tiles import Tile

from . import kernels, run_time
from .block_lists import Rows, rows_of_mask
from .buffers import empty
from .inputs import Inputs
from .mods import Mods
from .one_pass import launch, one_pass_tile
from .two_pass import none_kept_free


def gradients(inputs: Inputs, mask: MaskArguments, mods: Mods) -> kernels.Gradients:
    """dq, dk, dv, and what to record of them."""
    resolution, tile = inputs.resolution, one_pass_tile(inputs)
    if reserved := resolution.target.reserved_sms:
        none_kept_free(reserved, "a BlockMask takes a CTA for each of its KV tiles")
    segments = resolution.problem.segments
    rows, parts = rows_in_parts(inputs, mask, mods, tile)
    launched = launch(
        inputs,
        mods,
        kernels.BLOCK_MASK_ONE_PASS,
        [rows.rows, rows.steps],
        grid=parts.units if parts else chains_of(inputs, tile) * max(1, segments),
        row_ints=parts.chains if parts else sympy.Integer(0),
        cooperative=False,
        scalars=[parts.bands, parts.sets] if parts else [],
        sums=[parts.sums] if parts else [],
        constants=({"BANDS": rows.bands, "MOST_CHAINS": FEW_CHAINS, "LEAST_STEPS": LEAST_STEPS} if parts else {})
        | ({"SEGMENTS": segments} if segments else {})
        | {"Q_TILES": rows.q_tiles, "KV_TILES": rows.kv_tiles, "MASK_HEADS": rows.rows.get_size()[1] != 1},
    )
    assert resolution.costs
    record = {"family": resolution.family, "launch": "chained", "step_ns": resolution.costs.step_ns, "segments": segments or None}
    dq = launched.dq(inputs, rows.is_visited)
    return kernels.Gradients(dq, launched.dk, launched.dv, rows.ints + (parts.ints if parts else 0), record)


@dataclass(frozen=True)
class ChainsInParts:
    """Chains that are cut, where sizes at run time say so; `bands`, `sets` and `units` as in `RunTimeParts`."""

    bands: sympy.Expr
    sets: sympy.Expr
    units: sympy.Expr
    chains: sympy.Expr
    sums: TensorBox  # of dK and dV, fp32, for each chain

    @property
    def ints(self) -> sympy.Expr:
        """Of memory: sums, and a semaphore for each chain."""
        return self.chains + sympy_product(self.sums.get_size())


def rows_in_parts(
    inputs: Inputs, mask: MaskArguments, mods: Mods, tile: Tile, *, with_bits: bool = False
) -> tuple[Rows, ChainsInParts | None]:
    """What chains walk, and their parts; None where they stay whole. `with_bits`: for the Gluon kernel."""
    problem, chains = inputs.resolution.problem, chains_of(inputs, tile)
    kv_tiles = V.graph.sizevars.guard_int(mask.kv_block) // tile.block_n
    # Under `batch` the number of heads may not decide bits. Segments cut chains themselves.
    parts = {"bands": sympy.Integer(1), "sets": sympy.Integer(1)}
    if inputs.resolution.settings.guarantee != "batch" and not problem.segments:
        rule = RunTimeParts(problem.group, tile.block_n, kv_tiles)
        parts = run_time.fields(rule, "parts", inputs.kv_len, inputs.kv_heads_total)
    are_whole = parts["bands"] == parts["sets"] == 1
    rows = rows_of_mask(inputs, mask, mods, tile, in_parts=not are_whole, with_bits=with_bits)
    if rows.bands > 1:
        # Of no chain where there are more: an expression that Inductor knows, which gives sizes of memory.
        chains *= Min(1, FloorDiv(FEW_CHAINS, chains))
    elif with_bits and problem.group > 1 and rows.rows.get_size()[1] != 1:
        # The Gluon kernel walks one row of a mask: each query head that has its own is a part, whatever the level.
        parts = {"bands": sympy.Integer(1), "sets": sympy.Integer(problem.group), "units": chains * problem.group}
    else:
        return rows, None
    sums = empty([chains * (tile.block_n * (tile.block_d + tile.block_dv))], torch.float32, inputs.device)
    return rows, ChainsInParts(**parts, chains=chains, sums=sums)


def chains_of(inputs: Inputs, tile: Tile) -> sympy.Expr:
    """KV tiles of all kv heads of the batch."""
    return inputs.kv_heads_total * CeilDiv(inputs.kv_len, tile.block_n)
