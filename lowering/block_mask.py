"""One pass under a mask in blocks: the launch that walks the rows of the mask."""

from __future__ import annotations

from torch.utils._sympy.functions import CeilDiv

from dash_inductor.op import MaskArguments

from . import kernels
from .block_lists import rows_of_mask
from .inputs import Inputs
from .mods import Mods
from .one_pass import launch, one_pass_tile
from .two_pass import none_kept_free


def gradients(inputs: Inputs, mask: MaskArguments, mods: Mods) -> kernels.Gradients:
    """dq, dk, dv, and what to record of them."""
    tile = one_pass_tile(inputs)
    if reserved := inputs.resolution.target.reserved_sms:
        none_kept_free(reserved, "a BlockMask takes a CTA for each of its KV tiles")
    rows = rows_of_mask(inputs, mask, mods, tile)
    launched = launch(
        inputs,
        mods,
        kernels.BLOCK_MASK_ONE_PASS,
        [rows.rows, rows.steps],
        grid=inputs.kv_heads_total * CeilDiv(inputs.kv_len, tile.block_n),
        cooperative=False,
        constants={"Q_TILES": rows.q_tiles, "KV_TILES": rows.kv_tiles, "MASK_HEADS": rows.rows.get_size()[1] != 1},
    )
    assert inputs.resolution.costs
    record = {"family": inputs.resolution.family, "launch": "chained", "step_ns": inputs.resolution.costs.step_ns}
    dq = launched.dq(inputs, rows.is_visited)
    return kernels.Gradients(dq, launched.dk, launched.dv, rows.ints, record)
