"""What a forward dropped, as bits for the Gluon kernel: a small kernel writes them before the launch."""

from __future__ import annotations

from dataclasses import replace

import sympy
import torch
from torch._inductor.ir import TensorBox
from torch._inductor.utils import sympy_product
from torch.utils._sympy.functions import CeilDiv

from dash_inductor.templates.tiles import Tile

from . import kernels
from .block_lists import Rows
from .buffers import empty
from .inputs import Inputs
from .mods import Mods

LANES = 128  # of a program, each of which makes four words


def with_bits(inputs: Inputs, tile: Tile, mods: Mods, blocks: Rows | None) -> Mods:
    """The same, with the bits where the forward dropped something. blocks: the lists of a mask in blocks."""
    return mods if mods.random_state is None else replace(mods, drop_bits=_written(inputs, tile, mods, mods.random_state, blocks))


def _written(inputs: Inputs, tile: Tile, mods: Mods, random_state: TensorBox, blocks: Rows | None) -> TensorBox:
    """int32 [B, H, KV tiles, Q tiles, parts of 64 queries, threads]: templates/dropout_bits.py.jinja has their format."""
    batch, heads, q_len = map(sympy.sympify, inputs.query.get_size()[:3])
    n_kv = CeilDiv(inputs.kv_len, tile.block_n)
    parts, threads = tile.block_m // 64, 2 * tile.block_n
    bits = empty([batch, heads, n_kv, inputs.n_q, sympy.Integer(parts), sympy.Integer(threads)], torch.int32, inputs.device)
    tiles = 4 * LANES // (parts * threads)
    of_blocks = {"Q_TILES": blocks.q_tiles, "KV_TILES": blocks.kv_tiles} if blocks else {}
    matrix = [] if blocks is None or blocks.matrix is None else [blocks.matrix]
    kernels.call(
        kernels.DROPOUT_BITS,
        grid=sympy_product([batch, heads, n_kv, CeilDiv(inputs.n_q, tiles)]),
        inputs=[random_state, *matrix],
        mutated=[bits],
        scalars=[q_len, inputs.kv_len],
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
