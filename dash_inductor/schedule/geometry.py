"""The grid of one attention head: which Q tiles each KV tile may see.

Q tile i holds rows [i * block_m, (i + 1) * block_m), KV tile j columns [j * block_n, (j + 1) * block_n). Full, causal and
sliding-window masks are staircases: KV tile j sees the Q tiles first_q_tile(j) <= i < end_q_tile(j), and neither
bound ever decreases with j. A block mask (`Geometry.of_blocks`) allows any set of tiles, given one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

MASKS = ("full", "causal")
_BLOCKS = "blocks"  # the mask of a geometry that has blocks


@dataclass(frozen=True)
class Geometry:
    """Tiles of one head. Lengths and blocks in rows; ValueError names the parameter that is wrong.

    window, in rows and under a causal mask only: how far before its diagonal a row still sees, None for all the way.
    blocks, by `of_blocks` only: [n_kv][n_q], true where KV tile j and Q tile i meet.

    Three KV tiles, six Q tiles, causal, two Q tiles per KV tile; then the same with a window of two rows:

    >>> g = Geometry(q_len=6, kv_len=6, block_m=1, block_n=2, mask="causal")
    >>> [(g.first_q_tile(j), g.end_q_tile(j)) for j in range(g.n_kv)]
    [(0, 6), (2, 6), (4, 6)]
    >>> [list(g.contributors(i)) for i in range(g.n_q)]
    [[0], [0], [0, 1], [0, 1], [0, 1, 2], [0, 1, 2]]
    >>> g = Geometry(q_len=6, kv_len=6, block_m=1, block_n=2, mask="causal", window=2)
    >>> [list(g.tiles(j)) for j in range(g.n_kv)]
    [[0, 1, 2, 3], [2, 3, 4, 5], [4, 5]]
    """

    q_len: int
    kv_len: int
    block_m: int
    block_n: int
    mask: str
    window: int | None = None
    blocks: tuple[tuple[bool, ...], ...] | None = None

    @classmethod
    def of_blocks(cls, blocks: Sequence[Sequence[bool]]) -> Geometry:
        """The grid of a block mask, [n_kv][n_q], with tiles of one row and one column.

        >>> g = Geometry.of_blocks([[True, False, True], [False, False, True]])
        >>> [g.tiles(j) for j in range(g.n_kv)], [g.contributors(i) for i in range(g.n_q)]
        ([(0, 2), (2,)], [[0], [], [0, 1]])
        """
        if not len(blocks) or not len(blocks[0]):
            raise ValueError("blocks must hold at least one KV tile and one Q tile")
        return cls(len(blocks[0]), len(blocks), 1, 1, _BLOCKS, blocks=blocks)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        for name in ("q_len", "kv_len", "block_m", "block_n"):
            check_count(name, getattr(self, name))
        if self.mask not in (*MASKS, _BLOCKS):
            raise ValueError(f"mask must be one of {', '.join(MASKS)}, got {self.mask!r}")
        if self.window is not None:
            check_count("window", self.window, least=0)
            if self.mask != "causal":
                raise ValueError(f"window needs a causal mask, got mask={self.mask!r}")
        if (self.mask == _BLOCKS) != (self.blocks is not None):
            raise ValueError(f"blocks go with mask={_BLOCKS!r} and with no other, got mask={self.mask!r}")
        if self.blocks is not None:
            rows = tuple(tuple(bool(allowed) for allowed in row) for row in self.blocks)
            object.__setattr__(self, "blocks", rows)
            if len(rows) != self.n_kv or any(len(row) != self.n_q for row in rows):
                raise ValueError(f"blocks must be [{self.n_kv}][{self.n_q}] (KV tiles x Q tiles)")
            if not any(map(any, rows)):
                raise ValueError("blocks must allow at least one tile")

    @property
    def n_q(self) -> int:
        """Number of Q tiles."""
        return -(-self.q_len // self.block_m)

    @property
    def n_kv(self) -> int:
        """Number of KV tiles, each of them one chain."""
        return -(-self.kv_len // self.block_n)

    @property
    def ratio(self) -> int:
        """k = block_n // block_m: Q tiles beside one KV tile, at least 1."""
        return max(1, self.block_n // self.block_m)

    @property
    def is_causal(self) -> bool:
        """Whether a causal mask without a window: every chain ends with the last Q tile."""
        return self.mask == "causal" and self.window is None

    @property
    def is_triangle(self) -> bool:
        """Whether first_q_tile(j) = ratio * j and every chain has a step: the causal formulas need both."""
        return self.is_causal and self.block_n % self.block_m == 0 and self.n_q > self.ratio * (self.n_kv - 1)

    def first_q_tile(self, j: int) -> int:
        """First Q tile that KV tile j may see; can lie at or past end_q_tile(j), the chain is then empty."""
        if self.blocks is not None:
            return min(self._tiles[j], default=0)
        if self.mask == "full":
            return 0
        return j * self.block_n // self.block_m

    def end_q_tile(self, j: int) -> int:
        """One past the last Q tile that KV tile j may see, where the mask is not of blocks."""
        if self.window is None:
            return self.n_q
        # The last row that sees the last column of the tile; tiles count whole, padding included.
        return min(self.n_q, ((j + 1) * self.block_n - 1 + self.window) // self.block_m + 1)

    def tiles(self, j: int) -> Sequence[int]:
        """Q tiles that KV tile j sees, ascending."""
        return self._tiles[j]

    def steps(self, j: int) -> int:
        """Length of chain j."""
        return len(self.tiles(j))

    def contributors(self, i: int) -> Sequence[int]:
        """KV tiles that add to dq of Q tile i, ascending; without gaps unless the mask is of blocks."""
        return self._contributors[i]

    @cached_property
    def _tiles(self) -> tuple[Sequence[int], ...]:
        if self.blocks is None:
            return tuple(range(self.first_q_tile(j), self.end_q_tile(j)) for j in range(self.n_kv))
        return tuple(tuple(i for i, allowed in enumerate(row) if allowed) for row in self.blocks)

    @cached_property
    def _contributors(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(self.n_q)]
        for j, tiles in enumerate(self._tiles):
            for i in tiles:
                found[i].append(j)
        return found


def check_count(name: str, value: object, least: int = 1) -> None:
    """Raise ValueError, naming the parameter, unless value is an int of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be {'a positive int' if least == 1 else f'an int of at least {least}'}, got {value!r}")


def check_range(name: str, value: object, most: int, why: str) -> None:
    """Raise ValueError, naming the parameter, unless value is an int in 1..most."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ValueError(f"{name} must be in 1..{most} ({why}), got {value!r}")
