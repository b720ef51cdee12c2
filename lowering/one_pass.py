"""One pass: five matmuls a tile, dq summed across CTAs in the order of the schedule."""

from __future__ import annotations

import torch
from torch._inductor.lowering import empty_strided

from dash_inductor.config import GLUON
from dash_inductor.op import MaskArguments

from . import dropout_bits, kernels, two_pass
from .buffers import empty
from .dq import scaled_dq
from .inputs import Inputs
from .launch import gluon, triton
from .listed import from_lists
from .mods import NONE, Mods
from .table import from_table


def gradients(inputs: Inputs, mods: Mods = NONE, mask: MaskArguments | None = None) -> kernels.Gradients:
    """dq, dk, dv, and what to record of them. mask: that in blocks, if there is one.

    Where sizes known at run time may take two passes, their kernels stand beside that of one: one or the other is launched.
    """
    resolution, tile = inputs.resolution, inputs.resolution.one_pass
    assert tile
    walk = from_table(inputs, tile) if mask is None else from_lists(inputs, tile, mask, mods)
    _, _, dv_meta = inputs.gradients
    # dq, in accumulator order: dq.py
    scratch = empty([inputs.query_heads_total, inputs.n_q, tile.block_m * tile.block_d], torch.float32, inputs.device)
    dv = empty_strided(*dv_meta, dtype=inputs.key_gradients_dtype, device=inputs.device)
    launch = triton.launch
    if resolution.kernel == GLUON:
        launch, mods = gluon.launch, dropout_bits.with_bits(inputs, tile, mods, walk.blocks)
    dk = launch(inputs, tile, walk, mods, scratch, dv)
    if resolution.two_pass:
        two_pass.into_buffers(inputs, tile, scratch, dk, dv, walk.is_two_pass)
    size, visited = inputs.query.get_size(), walk.blocks.is_visited if walk.blocks else None
    dq = scaled_dq(scratch, tile, size, inputs.dtype, resolution.problem.softmax_scale, visited)
    return kernels.Gradients(dq, dk, dv, walk.ints + mods.ints, walk.record)
