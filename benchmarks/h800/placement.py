"""How FlashAttention-3 with the authors' schedules places its chains: tiles, order of dispatch, what one CTA runs.

Chain j of a head is KV tile j with all its Q tiles. A dynamic dispatch gives the next unit to the first free CTA, a static
one gives unit u to CTA u mod `workers`. What the causal dispatch does is inferred, not documented.
"""

from __future__ import annotations

from dataclasses import dataclass

from dash_inductor.schedule import Geometry

from .measurements import Cell

WORKERS = 132  # one CTA per SM
BLOCK_N = 128
L2_BYTES = 40 * 2**20  # what the causal dispatch takes for the L2 cache
L2_BYTES_PER_ELEMENT = 8  # q and grad_out in bf16, dq in fp32


@dataclass(frozen=True)
class Placement:
    """A schedule of `heads` equal heads on `workers` CTAs.

    family: ascending, descending, or ring (shift; for a causal mask symmetric, stride 1). dynamic: see above. paired: a
    unit is the chains (u, n_kv - 1 - u), else one chain. section: heads that are dispatched together, head fastest;
    1 for head by head.
    """

    family: str
    geometry: Geometry
    heads: int
    dynamic: bool
    paired: bool
    section: int = 1
    workers: int = WORKERS

    def __post_init__(self) -> None:
        if self.paired and self.geometry.n_kv % 2:
            raise ValueError(f"pairs need an even number of KV tiles, got {self.geometry.n_kv}")

    @property
    def units_per_head(self) -> int:
        """Pairs or chains of one head."""
        return self.geometry.n_kv // 2 if self.paired else self.geometry.n_kv

    @property
    def units(self) -> list[tuple[int, ...]]:
        """Chains of each unit of one head, in the order they run."""
        n = self.geometry.n_kv
        return [(u, n - 1 - u) if self.paired else (u,) for u in range(self.units_per_head)]

    def chains(self) -> list[tuple[int, int]]:
        """(head, chain) of every chain, each after the one before it in its head and on its CTA."""
        n = self.geometry.n_kv
        sections = [range(x, min(x + self.section, self.heads)) for x in range(0, self.heads, self.section)]
        return [(x, j) for heads in sections for j in range(n) for x in heads]

    def worker(self, head: int, chain: int) -> int:
        """The CTA of a chain under static dispatch."""
        n = self.geometry.n_kv
        unit = min(chain, n - 1 - chain) if self.paired else chain
        return (head * self.units_per_head + unit) % self.workers

    def ring(self) -> list[list[int]]:
        """Q tiles of each unit in visiting order, for the ring family.

        Shift: chain j goes once round all tiles, starting at tile j. Symmetric: the big chains of all pairs go round the tiles
        that they all see, then up the rest of their own; then the small chains go down.

        >>> full = Placement("ring", Geometry(3, 3, 1, 1, "full"), 1, dynamic=False, paired=False)
        >>> full.ring()
        [[0, 1, 2], [1, 2, 0], [2, 0, 1]]
        >>> causal = Placement("ring", Geometry(4, 4, 1, 1, "causal"), 1, dynamic=False, paired=True)
        >>> causal.ring()
        [[1, 2, 3, 0, 3], [2, 3, 1, 3, 2]]
        """
        g = self.geometry
        first = g.first_q_tile(self.units[-1][0])
        turn = g.n_q - first
        return [
            [first + (u + t) % turn for t in range(turn)]
            + list(range(g.first_q_tile(unit[0]), first))
            + [i for j in unit[1:] for i in range(g.n_q - 1, g.first_q_tile(j) - 1, -1)]
            for u, unit in enumerate(self.units)
        ]


def place(cell: Cell) -> Placement:
    """The placement behind a row of the file. Under a full mask, descending is ascending with the tiles renamed."""
    block_m = 128 if cell.head_dim == 64 else 64 if cell.causal else 80
    geometry = Geometry(cell.seqlen, cell.seqlen, block_m, BLOCK_N, "causal" if cell.causal else "full")
    ring, dynamic = cell.schedule.startswith("shift"), not cell.schedule.endswith("persistent")
    section = 1
    if cell.causal and dynamic and not ring:
        fit = L2_BYTES // (L2_BYTES_PER_ELEMENT * cell.seqlen * cell.head_dim)
        section = 1 << (fit.bit_length() - 1)
    return Placement(
        family="ring" if ring else "ascending" if not cell.causal else cell.schedule.removesuffix("_persistent"),
        geometry=geometry,
        heads=cell.heads,
        dynamic=dynamic,
        paired=cell.causal and (ring or not dynamic),
        section=section,
    )
