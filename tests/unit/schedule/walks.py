"""Who takes which steps under a mask in blocks: an oracle for block_mask.py.jinja and the Gluon kernel's `chain_in_lists`.

The kernels find that by arithmetic, in lists that other kernels have made of the mask. Here it is counted from the mask itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dash_inductor.schedule.parts import WHOLE, Parts

Blocks = Sequence[Sequence[bool]]  # [block of keys][block of Q]: whether any query of one sees any key of the other


@dataclass(frozen=True)
class Work:
    """What one CTA does: a chain, or the `place`-th of its `parts`.

    head: kv head of the whole batch. j: KV tile. steps: (query head of the whole batch, Q tile, rank), in order.
    """

    head: int
    j: int
    steps: tuple[tuple[int, int, int], ...]
    place: int
    parts: int


@dataclass(frozen=True)
class Walks:
    """A launch: masks [MASK_Z][MASK_H] of its batch entries and query heads, and its sizes.

    n_q, n_kv: tiles of a head. q_tiles, kv_tiles: those of a block. least_steps: of a set's longest chain, for bands. by_head: the
    tickets of a head follow one another, those of its sets too; else those of a band do.
    """

    masks: Sequence[Sequence[Blocks]]
    batch: int
    kv_heads: int
    group: int
    n_q: int
    n_kv: int
    q_tiles: int
    kv_tiles: int
    parts: Parts = WHOLE
    least_steps: int = 1
    by_head: bool = False

    def mask(self, query_head: int) -> Blocks:
        z, hq = divmod(query_head, self.kv_heads * self.group)
        of_batch = self.masks[z % len(self.masks)]
        return of_batch[hq % len(of_batch)]

    def row(self, mask: Blocks, j: int) -> list[int]:
        """The Q tiles that see KV tile j."""
        return [i for i in range(self.n_q) if mask[j // self.kv_tiles][i // self.q_tiles]]

    def rank(self, mask: Blocks, i: int, j: int) -> int:
        """How many KV tiles add to Q tile i before j does: the later ones that it sees."""
        return sum(mask[later // self.kv_tiles][i // self.q_tiles] for later in range(j + 1, self.n_kv))

    def band(self, i: int, j: int) -> int:
        blocks = -(-self.n_q // self.q_tiles), -(-self.n_kv // self.kv_tiles)
        return self.parts.band(i // self.q_tiles, j // self.kv_tiles, *blocks)

    def lists(self, mask: Blocks) -> list[list[tuple[int, int]]]:
        """(Block of Q, rank of the block's last KV tile) for each block of keys, as block_rows.py.jinja writes them."""
        ends = [min(self.n_kv, (block + 1) * self.kv_tiles) - 1 for block in range(len(mask))]
        return [
            [(i, self.rank(mask, i * self.q_tiles, end)) for i, sees in enumerate(row) if sees]
            for row, end in zip(mask, ends, strict=True)
        ]

    def steps(self, mask: Blocks) -> list[list[int]]:
        """How many Q tiles a block of keys has up to the end of each band."""
        rows = [(block * self.kv_tiles, self.row(mask, block * self.kv_tiles)) for block in range(len(mask))]
        return [[sum(self.band(i, j) <= band for i in row) for band in range(self.parts.bands)] for j, row in rows]

    def works(self) -> list[Work | None]:
        """By ticket; None for a CTA that has nothing to do."""
        bands = self.parts.kv_tiles_of_bands(self.n_kv, self.kv_tiles)
        heads, sets = range(self.batch * self.kv_heads), range(self.parts.sets)
        units = [
            (band, j, head, s)
            for band, tiles in enumerate(bands)
            for j in range(min(self.n_kv, tiles))
            for head in heads
            for s in sets
        ]
        # The last KV tile first.
        by_head, by_band = (lambda unit: (unit[2], -unit[1], unit[3])), (lambda unit: (unit[0], -unit[1], *unit[2:]))
        return [self._work(*unit) for unit in sorted(units, key=by_head if self.by_head else by_band)]

    def _work(self, band: int, j: int, head: int, of_set: int) -> Work | None:
        size = self.group // self.parts.sets
        query_heads = [head * self.group + of_set * size + n for n in range(size)]
        mask = self.mask(query_heads[0])
        longest = max(len(self.row(mask, block * self.kv_tiles)) for block in range(len(mask)))
        is_banded = self.parts.bands > 1 and longest * size >= self.least_steps
        filled = sorted({self.band(i, j) if is_banded else 0 for i in self.row(mask, j)}) or [0]  # zeros are written once
        if band not in filled:
            return None
        rows = [(hq, [i for i in self.row(self.mask(hq), j) if not is_banded or self.band(i, j) == band]) for hq in query_heads]
        steps = [(hq, i, self.rank(self.mask(hq), i, j)) for hq, row in rows for i in row]
        if len(self.masks[0]) == 1:  # one row for all heads, which take turns at each of its tiles
            steps.sort(key=lambda step: (step[1], step[0]))
        place = filled.index(band) * self.parts.sets + of_set
        return Work(head, j, tuple(steps), place, len(filled) * self.parts.sets)
