"""The schedule families: for each chain the order of its Q tiles, for each Q tile the order of its additions.

A schedule spreads the n_kv chains of one head over `roles` CTAs in `passes` passes. Its virtual clock increases along
every role, and rank is the order of (clock, role) among the contributors of a tile: that makes every family acyclic,
whatever the clock (schedules.md, section 2; the names are those of DASH, arXiv 2601.21824).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from . import closed_forms
from .geometry import Geometry

FAMILIES = ("ascending", "descending", "shift", "symmetric")
MONO = ("ascending", "descending")


class Schedule(Protocol):
    """What the table, the placement, the replay and the checks ask of a family."""

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
    def place(self, j: int) -> tuple[int, int]: ...
    def order(self, j: int) -> tuple[int, ...]: ...
    def clock(self, i: int, j: int) -> int: ...
    def rank(self, i: int, j: int) -> int: ...


@dataclass(frozen=True)
class RoundRobin:
    """Shared by the families in which chain j is role j % roles of pass j // roles."""

    geometry: Geometry
    roles: int

    def __post_init__(self) -> None:
        if not 1 <= self.roles <= self.geometry.n_kv:
            raise ValueError(f"roles must be in 1..{self.geometry.n_kv} (one per KV tile at most), got {self.roles}")

    @property
    def boustrophedon(self) -> bool:
        """Whether roles are mirrored in odd rounds."""
        return False

    @property
    def passes(self) -> int:
        """Chains that a role runs for one head, at most."""
        return -(-self.geometry.n_kv // self.roles)

    @property
    def slots(self) -> tuple[tuple[int, ...], ...]:
        """Chain of each (slot, role), in the order the role runs them; -1 for none."""
        n, roles = self.geometry.n_kv, self.roles
        return tuple(tuple(j if j < n else -1 for j in range(p * roles, (p + 1) * roles)) for p in range(self.passes))

    def place(self, j: int) -> tuple[int, int]:
        """(pass, role) of chain j."""
        return divmod(j, self.roles)


@dataclass(frozen=True)
class Ascending(RoundRobin):
    """Every chain visits its Q tiles upwards, and tiles add up in the order of j. For the full mask.

    >>> s = Ascending(Geometry(6, 6, 1, 2, "full"), roles=3)
    >>> s.order(1), s.slots
    ((0, 1, 2, 3, 4, 5), ((0, 1, 2),))
    >>> [[s.rank(i, j) for i in range(6)] for j in range(3)]
    [[0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1], [2, 2, 2, 2, 2, 2]]
    """

    name = "ascending"

    def order(self, j: int) -> tuple[int, ...]:
        """Q tiles of chain j in visiting order."""
        lo = self.geometry.lo(j)
        return tuple(closed_forms.ascending_tile(t, lo) for t in range(self.geometry.steps(j)))

    def clock(self, i: int, j: int) -> int:
        """Virtual time of (i, j): all roles of a pass sweep the tiles together."""
        return (j // self.roles) * self.geometry.n_q + i

    def rank(self, i: int, j: int) -> int:
        """Position of chain j in the order of additions into tile i."""
        return closed_forms.mono_rank(j)


@dataclass(frozen=True)
class Descending(RoundRobin):
    """Every chain visits its Q tiles downwards, and tiles add up in the order of j. For causal masks.

    >>> s = Descending(Geometry(6, 6, 1, 2, "causal_top_left"), roles=2, boustrophedon=True)
    >>> [s.order(j) for j in range(3)]
    [(5, 4, 3, 2, 1, 0), (5, 4, 3, 2), (5, 4)]
    >>> s.slots, [s.rank(5, j) for j in range(3)]
    (((0, 1), (2, -1)), [0, 1, 2])
    """

    boustrophedon: bool = False
    name = "descending"

    def order(self, j: int) -> tuple[int, ...]:
        """Q tiles of chain j in visiting order."""
        hi = self.geometry.hi(j)
        return tuple(closed_forms.descending_tile(t, hi) for t in range(self.geometry.steps(j)))

    def clock(self, i: int, j: int) -> int:
        """Virtual time of (i, j): all roles of a pass sweep the tiles together."""
        return (j // self.roles) * self.geometry.n_q + self.geometry.n_q - 1 - i

    def rank(self, i: int, j: int) -> int:
        """Position of chain j in the order of additions into tile i."""
        return closed_forms.mono_rank(j)


@dataclass(frozen=True)
class Shift(RoundRobin):
    """Role a starts `stride` tiles after role a - 1, so that no two want a tile within `stride` steps.

    For the full mask; needs n_q >= roles. stride defaults to the largest, n_q // roles.

    >>> s = Shift(Geometry(6, 6, 1, 2, "full"), roles=3)
    >>> s.stride, [s.order(j) for j in range(3)]
    (2, [(0, 1, 2, 3, 4, 5), (2, 3, 4, 5, 0, 1), (4, 5, 0, 1, 2, 3)])
    >>> [[s.rank(i, j) for i in range(6)] for j in range(3)]
    [[0, 0, 1, 1, 2, 2], [2, 2, 0, 0, 1, 1], [1, 1, 2, 2, 0, 0]]
    """

    stride: int = 0  # resolved in __post_init__; 0 or None asks for the default
    name = "shift"

    def __post_init__(self) -> None:
        super().__post_init__()
        n_q = self.geometry.n_q
        if self.geometry.mask != "full":
            raise ValueError(f"shift needs mask='full', got {self.geometry.mask!r}: use symmetric under a causal mask")
        if n_q < self.roles:
            raise ValueError(f"roles must be at most the {n_q} Q tiles for shift, got {self.roles}")
        if not self.stride:
            object.__setattr__(self, "stride", max(1, n_q // self.roles))
        if not 1 <= self.stride <= n_q // self.roles:
            raise ValueError(f"stride must be in 1..{n_q // self.roles} (n_q // roles), got {self.stride}")

    def order(self, j: int) -> tuple[int, ...]:
        """Q tiles of chain j in visiting order."""
        n_q = self.geometry.n_q
        return tuple(closed_forms.ring_tile(j % self.roles, t, self.stride, n_q) for t in range(n_q))

    def clock(self, i: int, j: int) -> int:
        """Virtual time of (i, j): its step, counted through the passes."""
        p, a = self.place(j)
        return p * self.geometry.n_q + self._step(i, a)

    def rank(self, i: int, j: int) -> int:
        """Position of chain j in the order of additions into tile i."""
        step = self._step(i, j % self.roles)
        return closed_forms.shift_step(j, step, self.geometry.n_q, self.geometry.n_kv, self.roles, self.stride)[1]

    def _step(self, i: int, a: int) -> int:
        return (i - self.stride * a) % self.geometry.n_q


def make(family: str, geometry: Geometry, roles: int, *, stride: int | None = None, boustrophedon: bool = False) -> Schedule:
    """The schedule of a family by name; ValueError when there is none, or it does not take the argument or mask."""
    from .symmetric import Symmetric

    if family not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {family!r}")
    if stride and family != "shift":
        raise ValueError(f"stride is for shift, not for {family}")
    if boustrophedon and family != "descending":
        raise ValueError(f"boustrophedon is for descending, not for {family}")
    if family == "shift":
        return Shift(geometry, roles, stride or 0)
    if family == "descending":
        return Descending(geometry, roles, boustrophedon)
    simple: dict[str, Callable[[Geometry, int], Schedule]] = {"ascending": Ascending, "symmetric": Symmetric}
    return simple[family](geometry, roles)
