"""What an order is: for each chain the sequence of its Q tiles, for each Q tile the sequence of its additions.

An order spreads the n_kv chains of one head over `roles` CTAs in `passes` passes. Under shift and symmetric the first pass may have
fewer roles, for a head that begins in the middle of a round (`RoundRobinPlan`). An order has a virtual clock, which increases along
every role, and a rank is a place in the order of (clock, role) among the contributors of a tile: that makes every order acyclic,
whatever the clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

from ..geometry import Geometry, check_range


class Order(ABC):
    """What the table, the placement, the simulator and the checks ask of a family.

    slots[s][a]: the chain that role a runs s-th, -1 for none.
    """

    name: str
    geometry: Geometry
    roles: int
    mirrored: bool  # roles, in odd rounds
    passes: int  # chains, or pairs of them, that a role runs for one head, at most
    slots: tuple[tuple[int, ...], ...]

    @abstractmethod
    def pass_and_role(self, j: int) -> tuple[int, int]:
        """(pass, role) of chain j."""

    @abstractmethod
    def visits(self, j: int) -> tuple[int, ...]:
        """Q tiles of chain j in visiting order."""

    @abstractmethod
    def commits(self) -> Iterable[tuple[int, int]]:
        """(Q tile, chain) of every step; those of one tile by (clock, role), which gives the ranks."""

    @cached_property
    def _ranks(self) -> list[dict[int, int]]:
        added = [0] * self.geometry.n_q
        ranks: list[dict[int, int]] = [{} for _ in range(self.geometry.n_kv)]
        for i, j in self.commits():
            ranks[j][i] = added[i]
            added[i] += 1
        return ranks

    def rank(self, i: int, j: int) -> int:
        """Position of chain j in the order of additions into tile i."""
        return self._ranks[j][i]

    def ranks(self, j: int) -> tuple[int, ...]:
        """Rank of every step of chain j, in visiting order."""
        return tuple(map(self._ranks[j].__getitem__, self.visits(j)))


@dataclass(frozen=True)
class InPasses(Order):
    """Orders whose passes take consecutive units (chains, or pairs of them), a role each; the first pass may have fewer roles.

    first_pass_roles, where an order has it, is for a head that begins in the middle of a round; 0 stands for all roles.
    """

    geometry: Geometry
    roles: int
    mirrored = False
    first_pass_roles = 0
    unit = "KV tile"

    def __post_init__(self) -> None:
        check_range("roles", self.roles, self.units, f"one per {self.unit} at most")
        if self.first_pass_roles:
            check_range("first_pass_roles", self.first_pass_roles, self.roles, "roles")

    @property
    def units(self) -> int:
        """How many units a head has."""
        return self.geometry.n_kv

    def unit_of(self, j: int) -> int:
        """The unit that chain j belongs to."""
        return j

    def chains_of(self, unit: int) -> tuple[int, ...]:
        """The chains of a unit in the order they are run, as many for each; -1 for none."""
        return (unit,)

    @cached_property
    def parts(self) -> tuple[range, ...]:
        """Units of each pass.

        >>> from .shift import Shift
        >>> seven = Geometry(7, 7, 1, 1, "full")
        >>> Shift(seven, 3).parts, Shift(seven, 3, first_pass_roles=2).parts
        ((range(0, 3), range(3, 6), range(6, 7)), (range(0, 2), range(2, 5), range(5, 7)))
        """
        starts = range(-self._missing, self.units, self.roles)
        return tuple(range(max(0, start), min(self.units, start + self.roles)) for start in starts)

    @cached_property
    def passes(self) -> int:
        """Units that a role runs for one head, at most."""
        return len(self.parts)

    @cached_property
    def slots(self) -> tuple[tuple[int, ...], ...]:
        """Chain of each (slot, role), in the order the role runs them; -1 for none."""
        rows = []
        for part in self.parts:
            none = [-1] * (self.roles - len(part))
            rows += [(*chains, *none) for chains in zip(*map(self.chains_of, part), strict=True)]
        return tuple(rows)

    def pass_and_role(self, j: int) -> tuple[int, int]:
        """(pass, role) of chain j."""
        p, a = divmod(self.unit_of(j) + self._missing, self.roles)
        return p, a - self._missing if p == 0 else a

    def steps_of(self, unit: int) -> Iterator[tuple[int, int]]:
        """(Q tile, chain) of a unit, chain after chain."""
        return ((i, j) for j in self.chains_of(unit) if j >= 0 for i in self.visits(j))

    def commits(self) -> Iterator[tuple[int, int]]:
        """Step by step, pass by pass."""
        return (step for part in self.parts for step in in_step(map(self.steps_of, part)))

    @property
    def _missing(self) -> int:
        """Roles that the first pass lacks."""
        return self.roles - (self.first_pass_roles or self.roles)


def ring(a: int, stride: int, start: int, stop: int) -> tuple[int, ...]:
    """The tiles from start to stop, once round from where role a begins.

    >>> ring(2, 3, 10, 18)
    (16, 17, 10, 11, 12, 13, 14, 15)
    """
    first = start + (stride * a % (stop - start) if start < stop else 0)
    return (*range(first, stop), *range(start, first))


def in_step(roles: Iterable[Iterable[tuple[int, int]]]) -> Iterator[tuple[int, int]]:
    """The first step of every role, then the second of every role that has one, and so on.

    >>> list(in_step([[(0, 0), (1, 0)], [(1, 1)]]))
    [(0, 0), (1, 1), (1, 0)]
    """
    return (step for steps in zip_longest(*roles) for step in steps if step is not None)
