"""What a forward dropped, as bits for the Gluon kernel: a small kernel writes them before the launch."""

from __future__ import annotations

from dataclasses import replace

import sympy
from torch.utils._sympy.functions import CeilDiv

from dash_inductor.templates.tiles import Tile

from . import kernels
from .block_lists import Rows, room_for_bits
from .inputs import Inputs
from .mods import Mods

LANES = 128  # of a program, each of which makes four words


def with_bits(inputs: Inputs, tile: Tile, mods: Mods, blocks: Rows | None) -> Mods:
    """The same, with the bits where the forward dropped something, or with room for those of a turn, for `write`. blocks: the lists
    of a mask in blocks."""
    if mods.random_state is None:
        return mods
    turn, is_whole = inputs.resolution.turn, inputs.resolution.turns == 1
    heads = inputs.query.get_size()[:2] if is_whole else [turn.batch, turn.heads]
    mods = replace(mods, drop_bits=room_for_bits(inputs, tile, heads))
    if is_whole:
        write(inputs, tile, mods, blocks)
    return mods


def write(inputs: Inputs, tile: Tile, mods: Mods, blocks: Rows | None, first: int = 0) -> None:
    """Fills the bits, of query heads from `first` of the batch on: templates/dropout_bits.py.jinja."""
    assert mods.random_state and mods.drop_bits
    batch, heads, n_kv, n_q, parts, threads = map(sympy.sympify, mods.drop_bits.get_size())
    tiles = 4 * LANES // int(parts * threads)
    of_blocks = {"Q_TILES": blocks.q_tiles, "KV_TILES": blocks.kv_tiles} if blocks else {}
    matrix = [] if blocks is None or blocks.matrix is None else [blocks.matrix]
    kernels.call(
        kernels.DROPOUT_BITS,
        grid=batch * heads * n_kv * CeilDiv(n_q, tiles),
        inputs=[mods.random_state, *matrix],
        mutated=[mods.drop_bits],
        scalars=[inputs.q_len, inputs.kv_len, *([sympy.Integer(first)] if inputs.resolution.turns > 1 else [])],
        constants={
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "TILES": tiles,
            "BLOCKS": blocks is not None,
            "TURNS": inputs.resolution.turns > 1,
            **of_blocks,
            "CAUSAL": inputs.resolution.problem.mask == "causal",
            **mods.of_dropout,
        },
    )
