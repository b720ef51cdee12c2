"""The symmetric family: a long chain and a short one make a pair; all pairs of a causal triangle are equally long."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from . import closed_forms
from .geometry import Geometry


@dataclass(frozen=True)
class Symmetric:
    """Roles take pairs of chains (u, n_kv - 1 - u), an odd n_kv's middle chain alone. For causal masks.

    The big chains of a pass first go round the rectangle of tiles that they all see, as a ring, then up their own part
    below it; then the small chains go down. The step on the worker, through both chains and all passes, is the clock.

    >>> s = Symmetric(Geometry(6, 6, 1, 2, "causal_top_left"), roles=2)
    >>> s.slots
    ((0, 1), (2, -1))
    >>> [s.order(j) for j in range(3)]
    [(2, 3, 4, 5, 0, 1), (4, 5, 2, 3), (5, 4)]
    >>> [[s.rank(i, j) for i in range(s.geometry.lo(j), 6)] for j in range(3)]
    [[0, 0, 0, 0, 1, 1], [1, 1, 0, 0], [2, 2]]
    """

    geometry: Geometry
    roles: int
    name = "symmetric"
    boustrophedon = False

    def __post_init__(self) -> None:
        if self.geometry.mask == "full":
            raise ValueError("symmetric needs a causal mask, got mask='full': use shift")
        if not 1 <= self.roles <= self.pairs:
            raise ValueError(f"roles must be in 1..{self.pairs} (one per pair of KV tiles at most), got {self.roles}")

    @property
    def pairs(self) -> int:
        """Number of pairs, the single middle chain included."""
        return -(-self.geometry.n_kv // 2)

    @property
    def passes(self) -> int:
        """Pairs that a role runs for one head, at most."""
        return -(-self.pairs // self.roles)

    @property
    def slots(self) -> tuple[tuple[int, ...], ...]:
        """Chain of each (slot, role); slot 2p holds the big chains of pass p, slot 2p + 1 the small ones; -1 for
        none."""
        n, rows = self.geometry.n_kv, []
        for first in range(0, self.pairs, self.roles):
            units = range(first, first + self.roles)
            rows.append(tuple(u if u < self.pairs else -1 for u in units))
            rows.append(tuple(n - 1 - u if n - 1 - u >= self.pairs else -1 for u in units))
        return tuple(rows)

    def place(self, j: int) -> tuple[int, int]:
        """(pass, role) of chain j."""
        return divmod(min(j, self.geometry.n_kv - 1 - j), self.roles)

    def order(self, j: int) -> tuple[int, ...]:
        """Q tiles of chain j in visiting order."""
        g = self.geometry
        if j >= self.pairs:
            return tuple(closed_forms.descending_tile(t, g.n_q) for t in range(g.steps(j)))
        p, a = self.place(j)
        active = min(self.roles, self.pairs - p * self.roles)
        r0 = min(g.n_q, g.lo(p * self.roles + active - 1))
        rect = g.n_q - r0
        stride = max(1, min(g.ratio, rect // active))
        ring = tuple(r0 + closed_forms.ring_tile(a, t, stride, rect) for t in range(rect))
        return ring + tuple(range(g.lo(j), r0))

    def clock(self, i: int, j: int) -> int:
        """Virtual time of (i, j): its step on the worker, counted through the passes."""
        return self._clocks[i, j]

    def rank(self, i: int, j: int) -> int:
        """Position of chain j in the order of additions into tile i."""
        return self._ranks[i, j]

    @cached_property
    def _clocks(self) -> dict[tuple[int, int], int]:
        g = self.geometry
        steps = [g.steps(j) + (g.steps(g.n_kv - 1 - j) if g.n_kv - 1 - j >= self.pairs else 0) for j in range(self.pairs)]
        width = max(steps)  # the same start of a pass for every role
        return {
            (i, j): self.place(j)[0] * width + (g.steps(g.n_kv - 1 - j) if j >= self.pairs else 0) + t
            for j in range(g.n_kv)
            for t, i in enumerate(self.order(j))
        }

    @cached_property
    def _ranks(self) -> dict[tuple[int, int], int]:
        g = self.geometry
        if g.is_triangle:
            pairs = [
                (j, closed_forms.symmetric_step(j, t, g.n_q, g.n_kv, g.ratio, self.roles))
                for j in range(g.n_kv)
                for t in range(g.steps(j))
            ]
            return {(i, j): rank for j, (i, rank) in pairs}
        return self.ranks_by_clock()

    def ranks_by_clock(self) -> dict[tuple[int, int], int]:
        """Rank of every (i, j) as the order of (clock, role): the definition, valid for every geometry."""
        ranks = {}
        for i in range(self.geometry.n_q):
            line = sorted(self.geometry.contributors(i), key=lambda j: (self._clocks[i, j], self.place(j)[1]))
            ranks.update({(i, j): position for position, j in enumerate(line)})
        return ranks
