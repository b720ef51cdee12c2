"""Chains under a block mask cut into parts, where chains are so few that the longest of them would run alone at the end.

A part of a chain is a CTA's work: of one *set* of the group's query heads, the tiles of one *band*. Bands lie along the diagonal of
the mask, each half as wide as the one before it. dK and dV of a KV tile are the sum of its parts.

Parts take tickets band by band, in each band the last KV tile of every head first. The band of a tile falls, or stays, as the KV
tile rises. So the chains that add to a dQ tile before a part does have lower tickets, and so have the parts of its own chain before
it: whoever waits, waits for lower tickets, and the launch ends with any number of resident CTAs, under any mask.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

from .costs import Costs
from .geometry import Geometry

# What follows is set by the simulations of benchmarks/block_masks and of tests/unit/schedule/test_parts.py, for 100 to 150 CTAs.
FEW_CHAINS = 1024  # up to which chains are cut; a power of two, which a block of Triton can hold
HEAD_SETS = 16  # sets of query heads that a batch should have at least
LEAST_PARTS = 128  # chains of sets that it should have at least
LEAST_BANDED = 192  # chains of sets from which on there are bands: with fewer nearly all run at once, and the longest decides
BANDS = 4
LEAST_STEPS = 24  # of the longest chain of a set, for bands


@dataclass(frozen=True)
class Parts:
    """Into how many bands a chain is cut, at most, and into how many sets its query heads are, all as large."""

    bands: int = 1
    sets: int = 1

    @property
    def whole(self) -> bool:
        """Whether no chain is cut."""
        return self.bands == self.sets == 1

    def units(self, kv_heads: int, n_kv: int, kv_tiles: int) -> int:
        """Tickets of a launch; `kv_tiles` are those of a block of the mask."""
        return kv_heads * self.sets * sum(min(n_kv, tiles) for tiles in self.kv_tiles_of_bands(n_kv, kv_tiles))

    def kv_tiles_of_bands(self, n_kv: int, kv_tiles: int) -> list[int]:
        """How many KV tiles may have tiles in each band: the first ones, a whole number of blocks.

        >>> Parts(bands=4).kv_tiles_of_bands(n_kv=10, kv_tiles=1)
        [10, 5, 3, 2]
        """
        blocks = -(-n_kv // kv_tiles)
        return [-(-blocks // 2**band) * kv_tiles for band in range(self.bands)]

    def band(self, q_block: int, kv_block: int, q_blocks: int, kv_blocks: int) -> int:
        """The band of a block of the mask: by how far it lies above the diagonal, in halves of what is left.

        >>> [Parts(bands=4).band(i, 0, 8, 8) for i in range(8)], [Parts(bands=4).band(i, 3, 8, 8) for i in range(8)]
        ([0, 0, 0, 0, 1, 1, 2, 3], [0, 0, 0, 0, 0, 0, 0, 1])
        """
        above = q_block - kv_block * q_blocks // kv_blocks
        return max(band for band in range(self.bands) if band == 0 or above >= q_blocks - (q_blocks >> band))


WHOLE = Parts()
as_if_parts: ContextVar[Parts | None] = ContextVar("as_if_parts", default=None)  # whatever the sizes; set by trials


def parts_for(kv_heads: int, group: int, n_kv: int) -> Parts:
    """Into what the chains of `kv_heads` kv heads of the whole batch are cut. It knows no device and no length of queries.

    Sets are as many as give the batch HEAD_SETS of them and LEAST_PARTS chains, or the whole group. There are bands where chains
    are few, not very few.

    >>> parts_for(8, 4, 16), parts_for(16, 1, 32), parts_for(1, 32, 8), parts_for(32, 1, 64)
    (Parts(bands=4, sets=2), Parts(bands=4, sets=1), Parts(bands=1, sets=16), Parts(bands=1, sets=1))
    """
    if forced := as_if_parts.get():
        return forced
    chains = kv_heads * n_kv
    if chains > FEW_CHAINS:
        return WHOLE
    least = max(-(-HEAD_SETS // kv_heads), -(-LEAST_PARTS // chains))
    sets = next((sets for sets in range(least, group) if group % sets == 0), group)
    return Parts(BANDS if chains * sets >= LEAST_BANDED else 1, sets)


@dataclass(frozen=True)
class RunTimeParts:
    """`parts_for` sizes known at run time only, which generated code calls with an index of FIELDS and the sizes."""

    group: int
    block_n: int
    kv_tiles: int  # of a block of the mask

    FIELDS = ("bands", "sets", "units")

    def __call__(self, index: int, kv_len: int, kv_heads: int) -> int:
        """FIELDS[index].

        >>> [RunTimeParts(group=4, block_n=128, kv_tiles=1)(index, 2048, 8) for index in range(3)]
        [4, 2, 480]
        """
        n_kv = -(-kv_len // self.block_n)
        parts = parts_for(kv_heads, self.group, n_kv)
        return (parts.bands, parts.sets, parts.units(kv_heads, n_kv, self.kv_tiles))[index]


@dataclass(frozen=True)
class PartCosts:
    """In the time of a step: a hop of dQ's or dK's order; what a part takes beside its steps; its share in the sum of dK and dV; a
    ticket without work.

    The last three are guesses from the replay of the main loop at head dim 128, where a step takes 3,900 clocks: 4,000 clocks
    for a prologue; 128 KiB that a part adds to fp32 scratch, at 32 bytes a clock; a launch, an atomic operation and two loads.
    """

    hop: float = 0.63
    prologue: float = 1.0
    summed: float = 1.0
    empty: float = 0.4

    @classmethod
    def of(cls, costs: Costs) -> PartCosts:
        """Hop and prologue by a device's costs of a kernel."""
        return cls(costs.hop_ns / costs.step_ns, costs.chain_ns / costs.step_ns)


def part_makespan(
    geometry: Geometry, kv_heads: int, group: int, parts: Parts, workers: int, costs: PartCosts = PartCosts()
) -> float:
    """The makespan in steps of a query head, `workers` CTAs taking tickets in order. Exact for the model, O(steps).

    Each block of the mask is a KV tile and the Q tiles beside it.

    >>> causal = Geometry(2048, 2048, 64, 128, "causal")
    >>> [round(part_makespan(causal, 8, 4, parts, 132)) for parts in (WHOLE, parts_for(8, 4, 16))]
    [129, 86]
    """
    free = [0.0] * workers
    added: dict[tuple[int, int, int], float] = {}  # when a dQ tile of a query head got its last part
    summed: dict[tuple[int, int], float] = {}  # when dK and dV of a KV tile did
    end = 0.0
    rows = _rows(geometry, group, parts)
    of_chain = [sum(1 for (j, *_), row in rows.items() if j == chain and row) for chain in range(geometry.n_kv)]
    for head, j, band, of_set in _tickets(geometry.n_kv, kv_heads, parts):
        time = heapq.heappop(free)
        row = rows.get((j, band, of_set), ())
        if not row and (of_chain[j] or band or of_set):
            heapq.heappush(free, time + costs.empty)
            continue
        time += costs.prologue
        heads = range(of_set * (group // parts.sets), (of_set + 1) * (group // parts.sets))
        for i in row:
            for query_head in heads:
                time = max(time + 1, added.get((head, query_head, i), -costs.hop) + costs.hop)
                added[head, query_head, i] = time
        if of_chain[j] > 1:
            time = max(time, summed.get((head, j), -costs.hop) + costs.hop) + costs.summed
            summed[head, j] = time
        end = max(end, time)
        heapq.heappush(free, time)
    return end


def _rows(g: Geometry, group: int, parts: Parts) -> dict[tuple[int, int, int], tuple[int, ...]]:
    """Q tiles of each (chain, band, set) that has any."""
    longest = max(g.steps(j) for j in range(g.n_kv))
    banded = parts if longest * group >= LEAST_STEPS * parts.sets else WHOLE
    q_blocks = -(-g.n_q // g.ratio)
    found: dict[tuple[int, int, int], tuple[int, ...]] = {}
    for j in range(g.n_kv):
        for i in g.tiles(j):
            band = banded.band(i // g.ratio, j, q_blocks, g.n_kv)
            for of_set in range(parts.sets):
                found[j, band, of_set] = (*found.get((j, band, of_set), ()), i)
    return found


def _tickets(n_kv: int, kv_heads: int, parts: Parts) -> Iterator[tuple[int, int, int, int]]:
    """(Head, KV tile, band, set) of every ticket in order; head by head where chains are whole, which keeps fewer heads in L2."""
    if parts.whole:
        yield from ((head, j, 0, 0) for head in range(kv_heads) for j in reversed(range(n_kv)))
        return
    for band, tiles in enumerate(parts.kv_tiles_of_bands(n_kv, 1)):
        for j in reversed(range(tiles)):
            for head in range(kv_heads):
                yield from ((head, j, band, of_set) for of_set in range(parts.sets))
