"""Which tiles meet under a mask in blocks: lists made on the device, of those of a BlockMask, a matrix or the mask function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import sympy
import torch
from torch._inductor.ir import ExternKernel, IRNode, TensorBox
from torch._inductor.lowering import view
from torch._inductor.utils import sympy_product
from torch._inductor.virtualized import OpsValue, V
from torch.utils._sympy.functions import CeilDiv, FloorDiv, ModularIndexing

from dash_inductor.op import MaskArguments
from dash_inductor.schedule.parts import BANDS
from dash_inductor.templates.tiles import AnyTile, Tile, TwoPassTile

from . import kernels
from .buffers import empty, in_memory
from .inputs import Inputs
from .mods import Mods

CHUNK = 128  # entries at a time
LISTS = ("q_num", "q_indices", "full_q_num", "full_q_indices")
Made = TypeVar("Made")


@dataclass(frozen=True)
class Rows:
    """What each block of keys meets: rows int32 [MASK_Z, MASK_H, KV blocks, Q blocks], steps [.., .., KV blocks] or, where they are
    in bands, [.., .., KV blocks, BANDS], and visited [.., .., Q blocks]; templates/block_rows.py.jinja and block_ranks.py.jinja
    have their format. In segments, rows and steps have a row for each segment of a block of keys."""

    rows: TensorBox
    steps: TensorBox
    visited: TensorBox
    q_tiles: int  # of a block of Q
    kv_tiles: int  # of a block of keys
    bands: int = 1
    bits: TensorBox | None = None  # which elements of partial tiles are visible: templates/mask_bits.py.jinja
    matrix: TensorBox | None = None  # of blocks, with bits: int8 [MASK_Z, MASK_H, KV blocks, Q blocks], 0 where all is hidden

    @property
    def ints(self) -> sympy.Expr:
        """Ints of memory, with the matrix and the ranks."""
        z, h, kv_blocks, q_blocks = map(sympy.sympify, self.rows.get_size())
        lists = z * h * (2 * kv_blocks * q_blocks + kv_blocks * self.bands + q_blocks) + CeilDiv(z * h * kv_blocks * q_blocks, 4)
        return lists + (0 if self.bits is None else sympy_product(self.bits.get_size()))

    def is_visited(self, b: sympy.Expr, h: sympy.Expr, i: sympy.Expr) -> OpsValue:
        """Whether any key is listed for Q tile i of head h of batch element b."""
        z_size, h_size, _ = map(sympy.sympify, self.visited.get_size())
        index = [ModularIndexing(b, 1, z_size), ModularIndexing(h, 1, h_size), FloorDiv(i, self.q_tiles)]
        return self.visited.make_loader()(index)


@dataclass(frozen=True)
class Lists:
    """What each block of keys meets, and each block of Q, for two passes: rows int32 [MASK_Z, MASK_H, KV blocks, Q blocks], steps
    [.., .., KV blocks]; columns [.., .., Q blocks, KV blocks], column_steps [.., .., Q blocks]."""

    rows: TensorBox
    steps: TensorBox
    columns: TensorBox
    column_steps: TensorBox
    q_block: int  # rows of a block
    kv_block: int  # keys of a block

    @property
    def constants(self) -> dict[str, object]:
        """What the kernel knows of them when it is compiled."""
        by_head = self.rows.get_size()[1] != 1
        return {"BLOCKS": True, "Q_BLOCK": self.q_block, "KV_BLOCK": self.kv_block, "MASK_HEADS": by_head}

    @property
    def tensors(self) -> list[TensorBox]:
        """In the order in which the kernel takes them."""
        return [self.rows, self.steps, self.columns, self.column_steps]

    @property
    def ints(self) -> sympy.Expr:
        """Ints of memory, with the matrix."""
        z, h, kv_blocks, q_blocks = map(sympy.sympify, self.rows.get_size())
        return z * h * (2 * kv_blocks * q_blocks + kv_blocks + q_blocks) + CeilDiv(z * h * kv_blocks * q_blocks, 4)


def rows_of_mask(
    inputs: Inputs, mask: MaskArguments, mods: Mods, tile: Tile, *, in_parts: bool = False, with_bits: bool = False
) -> Rows:
    """The rows of one pass, made once for all attentions of a graph with the same mask, tile and lengths.

    in_parts: in bands, but where query heads of a group have masks of their own. Segments of an attention are rows of their own.
    with_bits: of all KV tiles, or with room for those of a slice, for `write_bits`.
    """
    group, segments = inputs.resolution.problem.group, max(1, inputs.resolution.problem.segments)

    def made(matrix: TensorBox, q_block: int, kv_block: int) -> Rows:
        q_tiles, kv_tiles = q_block // tile.block_m, kv_block // tile.block_n
        bands = BANDS if in_parts and (group == 1 or matrix.get_size()[1] == 1) else 1
        rows = _written(matrix, q_tiles, kv_tiles, inputs.n_q, CeilDiv(inputs.kv_len, tile.block_n), bands, segments)
        if not with_bits:
            return rows
        rows = replace(rows, matrix=matrix, bits=room_for_bits(inputs, tile, matrix.get_size()[:2], inputs.resolution.slices))
        if inputs.resolution.slices == 1:
            write_bits(inputs, mods, tile, rows)
        return rows

    return _of_mask(inputs, mask, mods, tile, made, (in_parts, group > 1, segments), of_elements=with_bits)


def room_for_bits(inputs: Inputs, tile: Tile, heads: Sequence[sympy.Expr], slices: int = 1) -> TensorBox:
    """int32 [*heads, KV tiles of a slice, Q tiles, parts of 64 queries, threads]: of a tile a word for each thread of the Gluon
    kernel, as templates/mask_bits.py.jinja has them. heads: two sizes."""
    kv_tiles = CeilDiv(CeilDiv(inputs.kv_len, tile.block_n), slices)
    of_tile = map(sympy.Integer, (tile.block_m // 64, 2 * tile.block_n))
    return empty([*map(sympy.sympify, heads), kv_tiles, inputs.n_q, *of_tile], torch.int32, inputs.device)


def write_bits(inputs: Inputs, mods: Mods, tile: Tile, rows: Rows, first: sympy.Expr | int = 0) -> None:
    """Fills the bits of rows: which elements of partial tiles the mask function lets a query see. first: their first KV tile."""
    assert rows.matrix and rows.bits
    z, h, kv_tiles, n_q, *_ = map(sympy.sympify, rows.bits.get_size())
    output = kernels.call(
        kernels.MASK_BITS,
        grid=z * h * kv_tiles * n_q,
        inputs=[inputs.query, rows.matrix],
        mutated=[rows.bits],
        num_warps=8,
        scalars=[inputs.q_len, inputs.kv_len, *([first] if inputs.resolution.slices > 1 else [])],
        constants={
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "Q_TILES": rows.q_tiles,
            "KV_TILES": rows.kv_tiles,
            "MASK_MOD": mods.mask_mod,
            "SLICED": inputs.resolution.slices > 1,
        },
        subgraphs=mods.subgraphs,
    )
    mods.note(output)


def lists_of_mask(inputs: Inputs, mask: MaskArguments, mods: Mods, tile: TwoPassTile) -> Lists:
    """The lists of two passes, made as `rows_of_mask` makes its own."""

    def made(matrix: TensorBox, q_block: int, kv_block: int) -> Lists:
        rows, steps = _listed_by(matrix, inputs.n_q, q_block // tile.block_m, of_queries=False)
        columns, column_steps = _listed_by(matrix, CeilDiv(inputs.kv_len, tile.block_n), kv_block // tile.block_n, of_queries=True)
        return Lists(rows, steps, columns, column_steps, q_block, kv_block)

    return _of_mask(inputs, mask, mods, tile, made)


def _of_mask(
    inputs: Inputs,
    mask: MaskArguments,
    mods: Mods,
    tile: AnyTile,
    made: Callable[[TensorBox, int, int], Made],
    variant: tuple[int, ...] = (),
    *,
    of_elements: bool = False,
) -> Made:
    """What is made of a mask's matrix of blocks, and of the rows and keys of a block; once for each mask, tile, lengths and
    `variant` of what is made. of_elements: it depends on the mask function too."""
    sources: list[Any] = [in_memory(x) for name in LISTS if (x := getattr(mask, name)) is not None]
    # Where there is nothing that lists blocks, no score_mod captures anything either.
    asked = [str(mask.mask_mod.graph_module.graph), *mods.captures] if of_elements or not sources else []
    source = tuple(x.get_name() if isinstance(x, IRNode) else str(x) for x in (*sources, *asked))
    q_block, kv_block = (V.graph.sizevars.guard_int(size) for size in (mask.q_block, mask.kv_block))
    known = V.graph.__dict__.setdefault("dash_block_rows", {})
    key = (source, q_block, kv_block, tile, inputs.q_len, inputs.kv_len, variant, of_elements)
    if key not in known:
        if not sources:
            matrix = _asked(inputs, mask, mods, q_block, kv_block)
        elif mask.matrix is not None:
            matrix = TensorBox(ExternKernel.require_contiguous(sources[0]))
        else:
            matrix = _listed(sources, CeilDiv(inputs.n_q, q_block // tile.block_m))
        known[key] = made(matrix, q_block, kv_block)
    return known[key]


def _asked(inputs: Inputs, mask: MaskArguments, mods: Mods, q_block: int, kv_block: int) -> TensorBox:
    """The matrix of blocks by the mask function alone, asked of every element."""
    by_batch, by_head, *_ = (bool(x.users) for x in mask.mask_mod.graph_module.graph.nodes)
    batch, heads = inputs.query.get_size()[:2]
    blocks = [CeilDiv(inputs.kv_len, kv_block), CeilDiv(inputs.q_len, q_block)]
    size = [batch if by_batch else sympy.Integer(1), heads if by_head else sympy.Integer(1), *blocks]
    matrix = empty(size, torch.int8, inputs.device)
    output = kernels.call(
        kernels.MASK_MATRIX,
        grid=sympy_product(size),
        inputs=[inputs.query],
        mutated=[matrix],
        num_warps=8,
        scalars=[inputs.q_len, inputs.kv_len],
        constants={"Q_BLOCK": q_block, "KV_BLOCK": kv_block},
        subgraphs=mods.subgraphs,
    )
    mods.note(output)
    return matrix


def _listed(lists: list[IRNode], q_blocks: sympy.Expr) -> TensorBox:
    """The matrix of blocks by the lists of a BlockMask."""
    z, h, kv_blocks = map(sympy.sympify, lists[0].get_size())
    # Of the attention. Extra entries are out of range; missing ones are unseen.
    device, has_full = lists[0].get_device_or_error(), len(lists) == len(LISTS)
    matrix = empty([z, h, kv_blocks, q_blocks], torch.int8, device)
    kernels.call(
        kernels.BLOCK_MATRIX,
        grid=z * h * kv_blocks,
        inputs=lists if has_full else [*lists, *lists],
        mutated=[matrix],
        constants={"CHUNK": CHUNK, "HAS_FULL": has_full},
    )
    return matrix


def _written(matrix: TensorBox, q_tiles: int, kv_tiles: int, n_q: sympy.Expr, n_kv: sympy.Expr, bands: int, segments: int) -> Rows:
    device = matrix.get_device_or_error()
    z, h, kv_blocks, q_blocks = map(sympy.sympify, matrix.get_size())
    ranks, visited = empty([z, h, kv_blocks, q_blocks], torch.int32, device), empty([z, h, q_blocks], torch.int32, device)
    kernels.call(
        kernels.BLOCK_RANKS,
        grid=z * h * q_blocks,
        inputs=[matrix],
        mutated=[ranks, visited],
        scalars=[n_kv],
        constants={"CHUNK": CHUNK, "KV_TILES": kv_tiles},
    )
    of_bands = (bands, CeilDiv(n_kv, kv_tiles)) if bands > 1 else None
    if segments > 1:  # a row of the matrix, cut: each piece is the row of a segment
        matrix, ranks = (view(x, [z, h, kv_blocks * segments, FloorDiv(q_blocks, segments)]) for x in (matrix, ranks))
        n_q = FloorDiv(n_q, segments)
    rows, steps = _listed_by(matrix, n_q, q_tiles, of_queries=False, ranks=ranks, of_bands=of_bands, segments=segments)
    return Rows(rows, steps, visited, q_tiles, kv_tiles, bands)


def _listed_by(
    matrix: TensorBox,
    tiles: sympy.Expr,
    of_block: int,
    *,
    of_queries: bool,
    ranks: TensorBox | None = None,
    of_bands: tuple[int, sympy.Expr] | None = None,
    segments: int = 1,
) -> tuple[TensorBox, TensorBox]:
    """The blocks that each block of keys, or of Q, meets, and how many tiles they have: `of_block` a block, `tiles` in all. With
    `of_bands`, (bands, blocks that hold keys), how many up to the end of each band."""
    device = matrix.get_device_or_error()
    z, h, kv_blocks, q_blocks = map(sympy.sympify, matrix.get_size())
    size = [z, h, q_blocks, kv_blocks] if of_queries else [z, h, kv_blocks, q_blocks]
    bands, kv_blocks_seen = of_bands or (1, None)
    rows = empty(size, torch.int32, device)
    steps = empty([*size[:3], sympy.Integer(bands)] if bands > 1 else size[:3], torch.int32, device)
    constants = {"CHUNK": CHUNK, "BLOCK_TILES": of_block, "OF_QUERIES": of_queries, "RANKED": ranks is not None}
    kernels.call(
        kernels.BLOCK_ROWS,
        grid=sympy_product(size[:3]),
        inputs=[matrix, *([] if ranks is None else [ranks])],
        mutated=[rows, steps],
        scalars=[tiles] if kv_blocks_seen is None else [tiles, kv_blocks_seen],
        constants=constants | ({"BANDS": bands} if bands > 1 else {}) | ({"SEGMENTS": segments} if segments > 1 else {}),
    )
    return rows, steps
