"""Any placement and any order, given step by step. It is no family: benchmarks place steps with it, under any mask."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from dash_inductor.schedule.geometry import Geometry
from dash_inductor.schedule.orders.base import Order


@dataclass(frozen=True)
class Explicit(Order):
    """Orders and clocks as data.

    slots[s][a]: the chain that role a runs s-th, -1 for none. steps[j]: (Q tile, clock) of chain j in visiting order.

    A document mask of three KV and six Q tiles: chain 0 alone, chains 1 and 2 at the same tiles in opposite orders.

    >>> g = Geometry.of_blocks([[True, True, False, False, False, False]] + 2 * [[False, False, True, True, True, True]])
    >>> orders = (0, 1), (2, 3, 4, 5), (5, 4, 3, 2)
    >>> s = Explicit(g, slots=((1, 2), (0, -1)), steps=tuple(tuple((i, t) for t, i in enumerate(o)) for o in orders))
    >>> s.roles, s.pass_and_role(0), [s.ranks(j) for j in range(3)]
    (2, (1, 0), [(0, 0), (0, 0, 1, 1), (0, 0, 1, 1)])
    """

    geometry: Geometry
    slots: tuple[tuple[int, ...], ...]
    steps: tuple[tuple[tuple[int, int], ...], ...]
    name = "explicit"
    mirrored = False

    @cached_property
    def roles(self) -> int:
        """CTAs that work on one head."""
        return len(self.slots[0])

    @cached_property
    def passes(self) -> int:
        """Chains that a role runs for one head, at most."""
        return len(self.slots)

    def pass_and_role(self, j: int) -> tuple[int, int]:
        """(pass, role) of chain j."""
        return self._places[j]

    def visits(self, j: int) -> tuple[int, ...]:
        """Q tiles of chain j in visiting order."""
        return tuple(i for i, _ in self.steps[j])

    def commits(self) -> Iterator[tuple[int, int]]:
        """By (clock, role)."""
        every = [(clock, self.pass_and_role(j)[1], i, j) for j, steps in enumerate(self.steps) for i, clock in steps]
        return ((i, j) for _, _, i, j in sorted(every))

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        return {j: (s, a) for s, row in enumerate(self.slots) for a, j in enumerate(row) if j >= 0}
