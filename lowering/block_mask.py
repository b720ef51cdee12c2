"""One pass under a BlockMask: rows and ranks made on the device from its lists, and the launch that walks them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import sympy
import torch
from torch._inductor.ir import IRNode, TensorBox
from torch._inductor.virtualized import OpsValue, V
from torch.utils._sympy.functions import CeilDiv, FloorDiv, ModularIndexing

from dash_inductor.op import BlockMask
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


def gradients(inputs: Inputs, mask: BlockMask, mods: Mods) -> kernels.Gradients:
    """dq, dk, dv, and what to record of them."""
    tile = one_pass_tile(inputs)
    if reserved := inputs.resolution.target.reserved_sms:
        none_kept_free(reserved, "a BlockMask takes a CTA for each of its KV tiles")
    rows = rows_of_mask(inputs, mask, tile)
    launched = launch(
        inputs,
        mods,
        kernels.BLOCK_MASK,
        [rows.rows, rows.steps],
        grid=inputs.kv_heads_total * CeilDiv(inputs.kv_len, tile.block_n),
        cooperative=False,
        constants={"Q_TILES": rows.q_tiles, "KV_TILES": rows.kv_tiles, "MASK_HEADS": rows.rows.get_size()[1] != 1},
    )
    assert inputs.resolution.costs
    record = {"family": inputs.resolution.family, "launch": "chained", "step_ns": inputs.resolution.costs.step_ns}
    dq = launched.dq(inputs, rows.is_visited)
    return kernels.Gradients(dq, launched.dk, launched.dv, launched.ints + rows.ints, record)


def rows_of_mask(inputs: Inputs, mask: BlockMask, tile: Tile) -> Rows:
    """Made once for all attentions of a graph that have the same mask, tile and lengths."""
    lists: list[IRNode] = [in_memory(x) for name in LISTS if (x := getattr(mask, name)) is not None]
    q_block, kv_block = (V.graph.sizevars.guard_int(size) for size in (mask.q_block, mask.kv_block))
    n_q, n_kv = inputs.n_q, CeilDiv(inputs.kv_len, tile.block_n)
    known = V.graph.__dict__.setdefault("dash_block_rows", {})
    key = (*(x.get_name() for x in lists), q_block, kv_block, tile.block_m, tile.block_n, n_q, n_kv)
    if key not in known:
        known[key] = _written(lists, q_block // tile.block_m, kv_block // tile.block_n, n_q, n_kv)
    return known[key]


def _written(lists: list[IRNode], q_tiles: int, kv_tiles: int, n_q: sympy.Expr, n_kv: sympy.Expr) -> Rows:
    device = lists[0].get_device_or_error()
    z, h, kv_blocks = map(sympy.sympify, lists[0].get_size())
    q_blocks = CeilDiv(n_q, q_tiles)  # of the attention: whatever the lists have more is out of range, whatever they lack unseen
    has_full = len(lists) == len(LISTS)
    nothing = contiguous([sympy.Integer(0)], torch.int32, device)  # every template has an output
    matrix, ranks, rows = (empty([z, h, kv_blocks, q_blocks], torch.int32, device) for _ in range(3))
    steps, visited = empty([z, h, kv_blocks], torch.int32, device), empty([z, h, q_blocks], torch.int32, device)
    call = functools.partial(kernels.call, output=nothing, num_warps=4)
    call(
        kernels.BLOCK_MATRIX,
        grid=z * h * kv_blocks,
        inputs=lists if has_full else [*lists, *lists],
        mutated=[matrix],
        constants={"CHUNK": CHUNK, "HAS_FULL": has_full},
    )
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
