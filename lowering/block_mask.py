"""One pass under a mask in blocks: the launch that walks the rows of the mask."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import CeilDiv, FloorDiv, Min

from dash_inductor.op import MaskArguments
from dash_inductor.schedule.parts import FEW_CHAINS, LEAST_STEPS, RunTimeParts

from . import kernels, run_time
from .block_lists import rows_of_mask
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
    n_kv = CeilDiv(inputs.kv_len, tile.block_n)
    segments = resolution.problem.segments
    chains = inputs.kv_heads_total * n_kv * max(1, segments)
    parts = _parts(inputs, V.graph.sizevars.guard_int(mask.kv_block) // tile.block_n)
    rows = rows_of_mask(inputs, mask, mods, tile, in_parts=parts is not None)
    of_parts: dict[str, Any] = {}
    sum_ints = summed = sympy.Integer(0)
    if parts is not None and rows.bands > 1:
        # Of no chain where there are more: an expression that Inductor knows, which gives sizes of memory.
        summed = chains * Min(1, FloorDiv(FEW_CHAINS, chains))
        sum_ints = summed * (tile.block_n * (tile.block_d + tile.block_dv))
        of_parts = {"BANDS": rows.bands, "MOST_CHAINS": FEW_CHAINS, "LEAST_STEPS": LEAST_STEPS}
    launched = launch(
        inputs,
        mods,
        kernels.BLOCK_MASK_ONE_PASS,
        [rows.rows, rows.steps],
        grid=parts["units"] if parts and of_parts else chains,
        row_ints=summed,
        cooperative=False,
        scalars=[parts["bands"], parts["sets"]] if parts and of_parts else [],
        sums=[empty([sum_ints], torch.float32, inputs.device)] if of_parts else [],
        constants=of_parts
        | ({"SEGMENTS": segments} if segments else {})
        | {"Q_TILES": rows.q_tiles, "KV_TILES": rows.kv_tiles, "MASK_HEADS": rows.rows.get_size()[1] != 1},
    )
    assert resolution.costs
    record = {"family": resolution.family, "launch": "chained", "step_ns": resolution.costs.step_ns, "segments": segments or None}
    dq = launched.dq(inputs, rows.is_visited)
    return kernels.Gradients(dq, launched.dk, launched.dv, rows.ints + summed + sum_ints, record)


def _parts(inputs: Inputs, kv_tiles: int) -> dict[str, sympy.Expr] | None:
    """The fields of RunTimeParts; None where chains are known to stay whole, or the number of heads may not decide bits, or where
    they are cut into segments."""
    tile, problem = one_pass_tile(inputs), inputs.resolution.problem
    if inputs.resolution.settings.guarantee == "batch" or problem.segments:
        return None
    rule = RunTimeParts(problem.group, tile.block_n, kv_tiles)
    parts = run_time.fields(rule, "parts", inputs.kv_len, inputs.kv_heads_total)
    return None if parts["bands"] == parts["sets"] == 1 else parts
