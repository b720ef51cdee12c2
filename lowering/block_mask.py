"""One pass under a mask in blocks: rows and ranks made on the device, and the launch that walks them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch._inductor.ir import ExternKernel, IRNode, TensorBox
from torch._inductor.utils import sympy_product
from torch._inductor.virtualized import OpsValue, V
from torch.utils._sympy.functions import CeilDiv, FloorDiv, ModularIndexing

from dash_inductor.op import MaskArguments
from dash_inductor.templates.tiles import Tile

from . import kernels
from .buffers import contiguous, empty, in_memory
from .inputs import Inputs
from .mods import Mods
from .one_pass import launch, one_pass_tile
from .two_pass import none_kept_free

CHUNK = 128  # entries at a time
LISTS = ("q_num", "q_indices", "full_q_num", "full_q_indices")


@dataclass(frozen=True)
class Rows:
    """What each block of keys meets: rows int32 [MASK_Z, MASK_H, KV blocks, Q blocks], steps [.., .., KV blocks], and visited
    [.., .., Q blocks]; templates/block_rows.py.jinja and block_ranks.py.jinja have their format."""

    rows: TensorBox
    steps: TensorBox
    visited: TensorBox
    q_tiles: int  # of a block of Q
    kv_tiles: int  # of a block of keys

    @property
    def ints(self) -> sympy.Expr:
        """Of memory, with the matrix and the ranks."""
        z, h, kv_blocks, q_blocks = map(sympy.sympify, self.rows.get_size())
        return z * h * (3 * kv_blocks * q_blocks + kv_blocks + q_blocks)

    def is_visited(self, b: sympy.Expr, h: sympy.Expr, i: sympy.Expr) -> OpsValue:
        """Whether any key is listed for Q tile i of head h of batch element b."""
        z_size, h_size, _ = map(sympy.sympify, self.visited.get_size())
        index = [ModularIndexing(b, 1, z_size), ModularIndexing(h, 1, h_size), FloorDiv(i, self.q_tiles)]
        return self.visited.make_loader()(index)


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


def rows_of_mask(inputs: Inputs, mask: MaskArguments, mods: Mods, tile: Tile) -> Rows:
    """Made once for all attentions of a graph that have the same mask, tile and lengths."""
    sources: list[Any] = [in_memory(x) for name in LISTS if (x := getattr(mask, name)) is not None]
    # Where there is nothing that lists blocks, no score_mod captures anything either.
    asked = [str(mask.mask_mod.graph_module.graph), *mods.captures] if not sources else []
    source = tuple(x.get_name() if isinstance(x, IRNode) else str(x) for x in (*sources, *asked))
    q_block, kv_block = (V.graph.sizevars.guard_int(size) for size in (mask.q_block, mask.kv_block))
    n_q, n_kv = inputs.n_q, CeilDiv(inputs.kv_len, tile.block_n)
    known = V.graph.__dict__.setdefault("dash_block_rows", {})
    key = (source, q_block, kv_block, tile.block_m, tile.block_n, n_q, n_kv)
    if key not in known:
        if not sources:
            matrix = _asked(inputs, mask, mods, q_block, kv_block)
        elif mask.matrix is not None:
            matrix = TensorBox(ExternKernel.require_contiguous(sources[0]))
        else:
            matrix = _listed(sources, CeilDiv(n_q, q_block // tile.block_m))
        known[key] = _written(matrix, q_block // tile.block_m, kv_block // tile.block_n, n_q, n_kv)
    return known[key]


def _asked(inputs: Inputs, mask: MaskArguments, mods: Mods, q_block: int, kv_block: int) -> TensorBox:
    """The matrix of blocks by the mask function alone, asked of every element."""
    by_batch, by_head, *_ = (bool(x.users) for x in mask.mask_mod.graph_module.graph.nodes)
    batch, heads = inputs.query.get_size()[:2]
    blocks = [CeilDiv(inputs.kv_len, kv_block), CeilDiv(inputs.q_len, q_block)]
    size = [batch if by_batch else sympy.Integer(1), heads if by_head else sympy.Integer(1), *blocks]
    matrix = empty(size, torch.int32, inputs.device)
    output = kernels.call(
        kernels.MASK_MATRIX,
        grid=sympy_product(size),
        inputs=[inputs.query],
        mutated=[matrix],
        output=contiguous([sympy.Integer(0)], torch.int32, inputs.device),
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
    matrix = empty([z, h, kv_blocks, q_blocks], torch.int32, device)
    kernels.call(
        kernels.BLOCK_MATRIX,
        grid=z * h * kv_blocks,
        inputs=lists if has_full else [*lists, *lists],
        mutated=[matrix],
        output=contiguous([sympy.Integer(0)], torch.int32, device),
        num_warps=4,
        constants={"CHUNK": CHUNK, "HAS_FULL": has_full},
    )
    return matrix


def _written(matrix: TensorBox, q_tiles: int, kv_tiles: int, n_q: sympy.Expr, n_kv: sympy.Expr) -> Rows:
    device = matrix.get_device_or_error()
    z, h, kv_blocks, q_blocks = map(sympy.sympify, matrix.get_size())
    nothing = contiguous([sympy.Integer(0)], torch.int32, device)  # every template has an output
    ranks, rows = (empty([z, h, kv_blocks, q_blocks], torch.int32, device) for _ in range(2))
    steps, visited = empty([z, h, kv_blocks], torch.int32, device), empty([z, h, q_blocks], torch.int32, device)
    call = functools.partial(kernels.call, output=nothing, num_warps=4)
    call(
        kernels.BLOCK_RANKS,
        grid=z * h * q_blocks,
        inputs=[matrix],
        mutated=[ranks, visited],
        scalars=[n_kv],
        constants={"CHUNK": CHUNK, "KV_TILES": kv_tiles},
    )
    call(
        kernels.BLOCK_ROWS,
        grid=z * h * kv_blocks,
        inputs=[matrix, ranks],
        mutated=[rows, steps],
        scalars=[n_q],
        constants={"CHUNK": CHUNK, "Q_TILES": q_tiles},
    )
    return Rows(rows, steps, visited, q_tiles, kv_tiles)
