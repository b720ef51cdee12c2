"""The schedule families: for each chain the order of its Q tiles, for each Q tile the order of its additions.

A schedule spreads the n_kv chains of one head over `roles` CTAs in `passes` passes. Under shift and symmetric the first pass
may have `lead` roles only, for a head that begins in the middle of a round (plan.py, Straddling). The virtual clock of a
schedule increases along every role, and rank is the order of (clock, role) among the contributors of a tile: that makes
every family acyclic, whatever the clock. The names are those of DASH (arXiv 2601.21824).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat, zip_longest
from typing import Protocol

from .geometry import Geometry, check_range

FAMILIES = ("ascending", "descending", "shift", "symmetric")  # those with closed forms, which a device can compute
MONO = ("ascending", "descending")
# Shift and symmetric, with the heads dealt out to the CTAs in one line instead of in whole heads
ROUND_ROBIN = {"shift_round_robin": "shift", "symmetric_round_robin": "symmetric"}
TABLE = "table"  # the family of any other order
TWO_PASS = "two_pass"  # in the place of a family: dK/dV and dQ by CTAs of their own, which need none


class Schedule(Protocol):
    """What the table, the placement, the simulator and the checks ask of a family."""

    @property
    def name(self) -> str: ...
    @property
    def geometry(self) -> Geometry: ...
    @property
    def roles(self) -> int: ...
    @property
    def boustrophedon(self) -> bool: ...
    @property
    def passes(self) -> int: ...
    @property
    def slots(self) -> tuple[tuple[int, ...], ...]: ...
    @property
    def clock_unit(self) -> int: ...
    def place(self, j: int) -> tuple[int, int]: ...
    def order(self, j: int) -> tuple[int, ...]: ...
    def clock(self, i: int, j: int) -> int: ...
    def rank(self, i: int, j: int) -> int: ...
    def ranks(self, j: int) -> tuple[int, ...]: ...


class Clocked(ABC):
    """Ranks from the order in which the clock commits the steps of a head."""

    geometry: Geometry
    clock_unit = 1  # clock ticks of one step

    @abstractmethod
    def order(self, j: int) -> tuple[int, ...]:
        """Q tiles of chain j in visiting order."""

    @abstractmethod
    def commits(self) -> Iterable[tuple[int, int]]:
        """(Q tile, chain) of every step; those of one tile by (clock, role)."""

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
        return tuple(map(self._ranks[j].__getitem__, self.order(j)))


@dataclass(frozen=True)
class Consecutive(Clocked):
    """Shared by the families whose passes take consecutive chains, a role each."""

    geometry: Geometry
    roles: int

    def __post_init__(self) -> None:
        check_range("roles", self.roles, self.geometry.n_kv, "one per KV tile at most")

    @property
    def boustrophedon(self) -> bool:
        """Whether roles are mirrored in odd rounds."""
        return False

    @property
    def passes(self) -> int:
        """Chains that a role runs for one head, at most."""
        return len(self.parts)

    @cached_property
    def parts(self) -> tuple[range, ...]:
        """Chains of each pass."""
        return parts(self.geometry.n_kv, self.roles)

    @cached_property
    def slots(self) -> tuple[tuple[int, ...], ...]:
        """Chain of each (slot, role), in the order the role runs them; -1 for none."""
        return tuple((*part, *[-1] * (self.roles - len(part))) for part in self.parts)

    def place(self, j: int) -> tuple[int, int]:
        """(pass, role) of chain j."""
        return pass_and_role(j, self.roles)


@dataclass(frozen=True)
class Mono(Consecutive):
    """Tiles add up in the order of j: the rank is the number of chains before j that contribute.

    Bits then depend on the geometry alone.
    """

    boustrophedon: bool = False

    def commits(self) -> Iterator[tuple[int, int]]:
        """Chain by chain: at equal clocks the lower role comes first, and a pass after the one before it."""
        return ((i, j) for j in range(self.geometry.n_kv) for i in self.order(j))

    def ranks(self, j: int) -> tuple[int, ...]:
        """Rank of every step of chain j, in visiting order."""
        g = self.geometry
        if g.blocks is None and g.window is None:  # who sees a tile of chain j sees those of all chains before it
            return (j,) * g.steps(j)
        return super().ranks(j)


@dataclass(frozen=True)
class Ascending(Mono):
    """Every chain visits its Q tiles upwards, and tiles add up in the order of j. For the full mask.

    >>> s = Ascending(Geometry(6, 6, 1, 2, "full"), roles=3)
    >>> s.order(1), s.slots
    ((0, 1, 2, 3, 4, 5), ((0, 1, 2),))
    >>> [s.ranks(j) for j in range(3)]
    [(0, 0, 0, 0, 0, 0), (1, 1, 1, 1, 1, 1), (2, 2, 2, 2, 2, 2)]
    """

    name = "ascending"

    def order(self, j: int) -> tuple[int, ...]:
        """Q tiles of chain j in visiting order."""
        return tuple(self.geometry.tiles(j))

    def clock(self, i: int, j: int) -> int:
        """Virtual time of (i, j): all roles of a pass sweep the tiles together."""
        return (j // self.roles) * self.geometry.n_q + i


@dataclass(frozen=True)
class Descending(Mono):
    """Every chain visits its Q tiles downwards, and tiles add up in the order of j. For causal masks and windows.

    >>> s = Descending(Geometry(6, 6, 1, 2, "causal_top_left"), roles=2, boustrophedon=True)
    >>> [s.order(j) for j in range(3)]
    [(5, 4, 3, 2, 1, 0), (5, 4, 3, 2), (5, 4)]
    >>> s.slots, [s.rank(5, j) for j in range(3)]
    (((0, 1), (2, -1)), [0, 1, 2])
    """

    name = "descending"

    def order(self, j: int) -> tuple[int, ...]:
        """Q tiles of chain j in visiting order."""
        return tuple(reversed(self.geometry.tiles(j)))

    def clock(self, i: int, j: int) -> int:
        """Virtual time of (i, j): all roles of a pass sweep the tiles together."""
        return (j // self.roles) * self.geometry.n_q + self.geometry.n_q - 1 - i


@dataclass(frozen=True)
class Shift(Consecutive):
    """Role a starts `stride` tiles after role a - 1, so that no two want a tile within `stride` steps.

    For the full mask; needs n_q >= roles. stride defaults to the largest, n_q // roles, and lead to roles.

    >>> s = Shift(Geometry(6, 6, 1, 2, "full"), roles=3)
    >>> s.stride, [s.order(j) for j in range(3)]
    (2, [(0, 1, 2, 3, 4, 5), (2, 3, 4, 5, 0, 1), (4, 5, 0, 1, 2, 3)])
    >>> [[s.rank(i, j) for i in range(6)] for j in range(3)]
    [[0, 0, 1, 1, 2, 2], [2, 2, 0, 0, 1, 1], [1, 1, 2, 2, 0, 0]]
    """

    stride: int = 0  # this and lead are resolved in __post_init__; 0 asks for the default
    lead: int = 0
    name = "shift"

    def __post_init__(self) -> None:
        super().__post_init__()
        n_q = self.geometry.n_q
        if self.geometry.mask != "full":
            raise ValueError(f"family shift needs mask='full', got {self.geometry.mask!r}: use symmetric, descending or table")
        check_range("roles", self.roles, n_q, "one per Q tile at most for shift")
        if not self.stride:
            object.__setattr__(self, "stride", n_q // self.roles)
        check_range("stride", self.stride, n_q // self.roles, "n_q // roles")
        if not self.lead:
            object.__setattr__(self, "lead", self.roles)
        check_range("lead", self.lead, self.roles, "roles")

    @cached_property
    def parts(self) -> tuple[range, ...]:
        """Chains of each pass."""
        return parts(self.geometry.n_kv, self.roles, self.lead)

    def place(self, j: int) -> tuple[int, int]:
        """(pass, role) of chain j."""
        return pass_and_role(j, self.roles, self.lead)

    def order(self, j: int) -> tuple[int, ...]:
        """Q tiles of chain j in visiting order."""
        return ring(self.place(j)[1], self.stride, 0, self.geometry.n_q)

    def clock(self, i: int, j: int) -> int:
        """Virtual time of (i, j): its step, counted through the passes."""
        p, a = self.place(j)
        return p * self.geometry.n_q + (i - self.stride * a) % self.geometry.n_q

    def commits(self) -> Iterator[tuple[int, int]]:
        """Step by step, pass by pass."""
        for part in self.parts:
            yield from in_step(zip(self.order(j), repeat(j)) for j in part)


def parts(units: int, roles: int, lead: int = 0) -> tuple[range, ...]:
    """What each pass takes of `units` chains or pairs: `roles` of them, the first pass `lead` if that is given.

    >>> parts(7, 3), parts(7, 3, lead=2)
    ((range(0, 3), range(3, 6), range(6, 7)), (range(0, 2), range(2, 5), range(5, 7)))
    """
    first = (lead or roles) - roles  # where the first pass would begin if it were a whole one
    return tuple(range(max(0, start), min(units, start + roles)) for start in range(first, units, roles))


def pass_and_role(unit: int, roles: int, lead: int = 0) -> tuple[int, int]:
    """(pass, role) of a unit, see parts().

    >>> pass_and_role(1, 3, lead=2), pass_and_role(4, 3, lead=2)
    ((0, 1), (1, 2))
    """
    missing = roles - (lead or roles)
    p, a = divmod(unit + missing, roles)
    return p, a - missing if p == 0 else a


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
