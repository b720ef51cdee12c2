"""Ascending and descending: every chain sweeps its Q tiles in one direction, and tiles add up in the order of KV tiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..family import Family, Formulas
from .base import InPasses


@dataclass(frozen=True)
class Monotone(InPasses):
    """Tiles add up in the order of j: the rank is the number of chains before j that contribute.

    Bits then depend on the geometry alone.
    """

    mirrored: bool = False

    def commits(self) -> Iterator[tuple[int, int]]:
        """Chain by chain: all roles of a pass sweep the tiles together, the lower one first, pass after pass."""
        return ((i, j) for j in range(self.geometry.n_kv) for i in self.visits(j))

    def ranks(self, j: int) -> tuple[int, ...]:
        """Rank of every step of chain j, in visiting order."""
        g = self.geometry
        if g.blocks is None and g.window is None:  # who sees a tile of chain j sees those of all chains before it
            return (j,) * g.steps(j)
        return super().ranks(j)


@dataclass(frozen=True)
class Ascending(Monotone):
    """Every chain visits its Q tiles upwards, and tiles add up in the order of j. For the full mask.

    >>> from ..geometry import Geometry
    >>> s = Ascending(Geometry(6, 6, 1, 2, "full"), roles=3)
    >>> s.visits(1), s.slots
    ((0, 1, 2, 3, 4, 5), ((0, 1, 2),))
    >>> [s.ranks(j) for j in range(3)]
    [(0, 0, 0, 0, 0, 0), (1, 1, 1, 1, 1, 1), (2, 2, 2, 2, 2, 2)]
    """

    name = "ascending"

    def visits(self, j: int) -> tuple[int, ...]:
        """Q tiles of chain j in visiting order."""
        return tuple(self.geometry.tiles(j))


@dataclass(frozen=True)
class Descending(Monotone):
    """Every chain visits its Q tiles downwards, and tiles add up in the order of j. For causal masks and windows.

    >>> from ..geometry import Geometry
    >>> s = Descending(Geometry(6, 6, 1, 2, "causal"), roles=2, mirrored=True)
    >>> [s.visits(j) for j in range(3)]
    [(5, 4, 3, 2, 1, 0), (5, 4, 3, 2), (5, 4)]
    >>> s.slots, [s.rank(5, j) for j in range(3)]
    (((0, 1), (2, -1)), [0, 1, 2])
    """

    name = "descending"

    def visits(self, j: int) -> tuple[int, ...]:
        """Q tiles of chain j in visiting order."""
        return tuple(reversed(self.geometry.tiles(j)))


def _formulas() -> Formulas:
    from ..formulas import monotone

    return {
        ("ascending", "full"): monotone.FULL,
        ("descending", "full"): monotone.FULL,
        ("descending", "causal"): monotone.MIRRORED,
    }


ASCENDING = Family(
    "ascending",
    Ascending,
    masks=("full", "causal"),
    colour="#4c78a8",
    default_under=("full",),
    is_monotone=True,
    on_device=True,
    formulas=_formulas,
)
DESCENDING = Family(
    "descending",
    Descending,
    masks=("full", "causal"),
    colour="#54a24b",
    default_under=("causal",),
    is_monotone=True,
    mirrors_under=("causal",),
    on_device=True,
    formulas=_formulas,
)
