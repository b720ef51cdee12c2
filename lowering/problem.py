"""One attention as the lowering sees it: its sizes, its settings, and the compile-time values of its kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy

from dash_inductor.ops import LOG2E
from dash_inductor.schedule import Blocks
from dash_inductor.target import Resolved, Target, Tile, Tiles, TwoPassTile, resolve
from dash_inductor.templates.tiles import EMULATED

from .buffers import multiple


@dataclass(frozen=True)
class Problem:
    """Lengths, and `heads`, which is batch x kv heads, may be symbolic, unless the mask is one of blocks."""

    target: Target
    tiles: Tiles
    mask: str
    group: int
    head_dim: int
    scale: float
    q_len: Any
    kv_len: Any
    heads: Any
    blocks: Blocks | None = None

    def resolved(self) -> Resolved | None:
        """What it gets; None where that is known only at run time."""
        sizes = {"q_len": self.q_len, "kv_len": self.kv_len, "heads": self.heads}
        if not all(sympy.sympify(size).is_number for size in sizes.values()):
            return None
        known = {name: int(size) for name, size in sizes.items()}
        return resolve(self.target, self.tiles, **known, group=self.group, mask=self.mask, blocks=self.blocks)

    def constants(self, tile: Tile | TwoPassTile) -> dict[str, Any]:
        """What the kernels of one pass and of two know when they are compiled."""
        return {
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_D": tile.block_d,
            "HEAD_DIM": self.head_dim,
            "GROUP": self.group,
            "CAUSAL": self.mask.startswith("causal"),
            "EVEN_M": multiple(self.q_len, tile.block_m),
            "EVEN_N": multiple(self.kv_len, tile.block_n),
            "EVEN_D": self.head_dim == tile.block_d,
            "SCALE": self.scale,
            "SCALE_LOG2E": self.scale * LOG2E,
            "INTERPRET": self.target.arch == EMULATED,
        }

    def accumulator_order(self) -> dict[str, Any]:
        """In which order one pass keeps the elements of a dq tile."""
        tile = self.tiles.one_pass
        assert tile
        return {"DQ_TRANSPOSED": tile.dq_transposed, "WARPS_M": tile.warps_m, "INSTR_N": tile.instr_n}
