"""What a forward dropped, as bits for the Gluon kernel: a small kernel writes them before the launch."""

from __future__ import annotations

from dataclasses import replace

import sympy
from torch._inductor.ir import TensorBox
from torch.utils._sympy.functions import CeilDiv

from dash_inductor.templates.tiles import Tile

from . import kernels
from .block_lists import Rows, room_for_bits
from .inputs import Inputs
from .mods import Mods

LANES = 128  # of a program, each of which makes four words


def with_bits(inputs: Inputs, tile: Tile, mods: Mods, blocks: Rows | None) -> Mods:
    """The same, with the bits where the forward dropped something. blocks: the lists of a mask in blocks."""
    return mods if mods.random_state is None else replace(mods, drop_bits=_written(inputs, tile, mods, mods.random_state, blocks))


def _written(inputs: Inputs, tile: Tile, mods: Mods, random_state: TensorBox, blocks: Rows | None) -> TensorBox:
    """`room_for_bits` of each query head, filled: templates/dropout_bits.py.jinja."""
    bits = room_for_bits(inputs, tile, inputs.query.get_size()[:2])
    batch, heads, n_kv, n_q, parts, threads = map(sympy.sympify, bits.get_size())
    tiles = 4 * LANES // int(parts * threads)
    of_blocks = {"Q_TILES": blocks.q_tiles, "KV_TILES": blocks.kv_tiles} if blocks else {}
    matrix = [] if blocks is None or blocks.matrix is None else [blocks.matrix]
    kernels.call(
        kernels.DROPOUT_BITS,
        grid=batch * heads * n_kv * CeilDiv(n_q, tiles),
        inputs=[random_state, *matrix],
        mutated=[bits],
        scalars=[inputs.q_len, inputs.kv_len],
        constants={
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "TILES": tiles,
            "BLOCKS": blocks is not None,
            **of_blocks,
            "CAUSAL": inputs.resolution.problem.mask == "causal",
            **mods.of_dropout,
        },
    )
    return bits
