"""dK/dV and dQ by CTAs of their own: seven matmuls a tile in place of five, and no sum that crosses a CTA."""

from __future__ import annotations

import functools
import logging

import sympy
import torch
from torch._inductor.ir import FixedLayout, TensorBox
from torch._inductor.lowering import empty_strided
from torch.utils._sympy.functions import CeilDiv

from dash_inductor.op import MaskArguments
from dash_inductor.schedule import TWO_PASS
from dash_inductor.templates.tiles import Tile, TwoPassTile, dims_text

from . import kernels
from .block_lists import Lists, lists_of_mask
from .buffers import contiguous
from .inputs import Inputs, accumulator_order
from .mods import NONE, Mods

log = logging.getLogger("dash_inductor")


def gradients(inputs: Inputs, mods: Mods = NONE, mask: MaskArguments | None = None) -> kernels.Gradients:
    """dq, dk, dv in a plain launch: no CTA waits for another. mask: that in blocks, if there is one."""
    resolution, device, dtype = inputs.resolution, inputs.device, inputs.dtype
    assert resolution.two_pass
    if resolution.target.reserved_sms:
        none_kept_free(
            resolution.target.reserved_sms, f"attention of head dim {dims_text(*resolution.problem.head_dims)} takes two passes"
        )
    dq_meta, dk_meta, dv_meta = inputs.gradients
    dq, dv = (empty_strided(*meta, dtype=dtype, device=device) for meta in (dq_meta, dv_meta))
    lists = None if mask is None else lists_of_mask(inputs, mask, mods, resolution.two_pass)
    dk_layout = FixedLayout(device, dtype, *dk_meta)
    dk = _launch(inputs, resolution.two_pass, [dv, dq], dk_layout, {"BY_SIZE": False}, mods=mods, lists=lists)
    mods.note(dk)
    time_ns = resolution.schedule[1] if resolution.problem.is_static and lists is None else None
    predicted_us = None if time_ns is None else time_ns / 1000
    record = {"family": TWO_PASS, "launch": "plain", "predicted_us": predicted_us}
    return kernels.Gradients(dq, dk, dv, 0 if lists is None else lists.ints, record)


@functools.cache
def none_kept_free(reserved: int, launch: str) -> None:
    """Says so once of a kind of launch."""
    log.warning("%d SMs are reserved, but %s, which use whatever SMs are free", reserved, launch)


def into_buffers(inputs: Inputs, of_dq: Tile, scratch: TensorBox, dk: TensorBox, dv: TensorBox, launched: sympy.Expr | int) -> None:
    """Launch two passes into the buffers of one pass, its scratch for dq included (dynamic shapes hold both); launched = 0 launches
    nothing."""
    nothing = contiguous([0], torch.float32, inputs.device)  # every template has an output
    tile = inputs.resolution.two_pass
    assert tile
    constants = {"BY_SIZE": True, "TILE_ROWS": of_dq.block_m} | accumulator_order(of_dq, tile.q_rows // of_dq.block_m)
    _launch(inputs, tile, [dv, scratch, dk], nothing, constants, launched)


def _launch(
    inputs: Inputs,
    tile: TwoPassTile,
    mutated: list[TensorBox],
    output: FixedLayout,
    constants: dict[str, object],
    launched: sympy.Expr | int = 1,
    mods: Mods = NONE,
    lists: Lists | None = None,
) -> TensorBox:
    kv_tiles, q_tiles = CeilDiv(inputs.kv_len, tile.kv_rows), CeilDiv(inputs.q_len, tile.q_rows)
    sizes = {"KV_ROWS": tile.kv_rows, "Q_ROWS": tile.q_rows, "SPLIT": tile.split}
    return kernels.call(
        kernels.TWO_PASS,
        grid=inputs.kv_heads_total * (kv_tiles * (1 + tile.split) + q_tiles * inputs.resolution.problem.group) * launched,
        inputs=[*inputs.tensors, *([] if lists is None else lists.tensors), *mods.read],
        mutated=[*mutated, *mods.mutated],
        output=output,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        constants=inputs.constants(tile) | sizes | constants | mods.constants | ({} if lists is None else lists.constants),
        subgraphs=mods.subgraphs,
    )
