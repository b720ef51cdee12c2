"""One attention cut into tiles: what a schedule is chosen for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .geometry import Geometry


@dataclass(frozen=True)
class TiledProblem:
    """Lengths in rows, kv heads of the whole batch, query heads of each, head dim as padded, the mean of all matmuls."""

    q_len: int
    kv_len: int
    kv_heads_total: int
    group: int
    head_dim: int
    block_m: int
    block_n: int
    mask: str

    @property
    def elements(self) -> int:
        """Those of dQ, of all query heads."""
        return self.q_len * self.kv_heads_total * self.group * self.head_dim

    @cached_property
    def geometry(self) -> Geometry:
        """The grid of one head; ValueError for sizes that are no positive ints."""
        return Geometry(self.q_len, self.kv_len, self.block_m, self.block_n, self.mask)
