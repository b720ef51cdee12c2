"""The walk of one pass under a mask in blocks: a chain for each KV tile, or parts of it, by the lists of the mask."""

from __future__ import annotations

import sympy
import torch
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import CeilDiv, FloorDiv, Min

from dash_inductor.config import GLUON
from dash_inductor.op import MaskArguments
from dash_inductor.resolve import Resolution
from dash_inductor.schedule.parts import FEW_CHAINS, LEAST_STEPS, RunTimeParts
from dash_inductor.templates.tiles import Tile
from dash_inductor.text import digest

from . import run_time
from .block_lists import Rows, rows_of_mask
from .buffers import empty
from .inputs import Inputs
from .mods import Mods
from .two_pass import none_kept_free
from .walk import Parts, Walk


def from_lists(inputs: Inputs, tile: Tile, mask: MaskArguments, mods: Mods) -> Walk:
    """The walk by the lists of the mask, which are made on the device."""
    resolution = inputs.resolution
    if reserved := resolution.target.reserved_sms:
        none_kept_free(reserved, "a BlockMask takes a CTA for each of its KV tiles")
    segments = resolution.problem.segments
    rows, parts = _rows_in_parts(inputs, tile, mask, mods)
    assert resolution.costs
    return Walk(
        [rows.rows, rows.steps],
        workers=parts.units if parts else _chains(inputs, tile),
        ints=rows.ints + (parts.ints if parts else 0),
        record={
            "family": resolution.family,
            "launch": "chained",
            "step_ns": resolution.costs.step_ns,
            "segments": segments or None,
            "order": _order(resolution, rows, parts),
        },
        own_ints=parts.chains if parts else 0,
        blocks=rows,
        parts=parts,
    )


def _order(resolution: Resolution, rows: Rows, parts: Parts | None) -> str:
    """A digest of what decides the order beside the mask."""
    cut = parts and (parts.bands, parts.sets, parts.least_steps)
    return digest(repr((resolution.family, resolution.problem.segments, rows.q_tiles, rows.kv_tiles, rows.bands, cut)))


def _rows_in_parts(inputs: Inputs, tile: Tile, mask: MaskArguments, mods: Mods) -> tuple[Rows, Parts | None]:
    """The rows that chains walk, and their parts; None where they stay whole."""
    problem, chains = inputs.resolution.problem, _chains(inputs, tile)
    with_bits = inputs.resolution.kernel == GLUON  # which asks no mask function
    kv_tiles = V.graph.sizevars.guard_int(mask.kv_block) // tile.block_n
    parts = {"bands": sympy.Integer(1), "sets": sympy.Integer(1)}
    if inputs.resolution.may_cut_chains:
        rule = RunTimeParts(problem.group, tile.block_n, kv_tiles)
        parts = run_time.fields(rule, "parts", inputs.kv_len, _kv_heads(inputs))
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
    return rows, Parts(**parts, chains=chains, sums=sums, least_steps=LEAST_STEPS)


def _chains(inputs: Inputs, tile: Tile) -> sympy.Expr:
    """KV tiles of all kv heads of a launch; in segments, those of each."""
    return _kv_heads(inputs) * CeilDiv(inputs.kv_len, tile.block_n) * max(1, inputs.resolution.problem.segments)


def _kv_heads(inputs: Inputs) -> sympy.Expr:
    return FloorDiv(inputs.kv_heads_total, inputs.resolution.turns)
