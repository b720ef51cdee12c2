"""The symmetric family: a long chain and a short one make a pair; all pairs of a causal triangle are equally long."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..family import Family, Formulas
from .base import InPasses, ring


@dataclass(frozen=True)
class Symmetric(InPasses):
    """Roles take pairs of chains (u, n_kv - 1 - u), an odd n_kv's middle chain alone. For causal masks.

    The big chains of a pass first go round the rectangle of tiles that they all see, as a ring, then up their own part
    below it; then the small chains go down.

    >>> from ..geometry import Geometry
    >>> s = Symmetric(Geometry(6, 6, 1, 2, "causal"), roles=2)
    >>> s.slots
    ((0, 1), (2, -1))
    >>> [s.visits(j) for j in range(3)]
    [(2, 3, 4, 5, 0, 1), (4, 5, 2, 3), (5, 4)]
    >>> [[s.rank(i, j) for i in range(s.geometry.first_q_tile(j), 6)] for j in range(3)]
    [[0, 0, 0, 0, 1, 1], [1, 1, 0, 0], [2, 2]]
    """

    first_pass_roles: int = 0
    most_stride: int = 0  # tiles between two roles on the ring; 0 for k, the most that serves
    name = "symmetric"
    unit = "pair of KV tiles"

    def __post_init__(self) -> None:
        if not self.geometry.is_causal:
            window = "" if self.geometry.window is None else f" with window={self.geometry.window}"
            use = "shift" if self.geometry.mask == "full" else "descending"
            raise ValueError(f"family symmetric needs a causal mask, got mask={self.geometry.mask!r}{window}: use {use}")
        super().__post_init__()

    @property
    def units(self) -> int:
        """Number of pairs, the single middle chain included."""
        return -(-self.geometry.n_kv // 2)

    def unit_of(self, j: int) -> int:
        """The pair that chain j belongs to."""
        return min(j, self.geometry.n_kv - 1 - j)

    def chains_of(self, unit: int) -> tuple[int, ...]:
        """The big chain of a pair, and its small one; -1 for the middle chain's."""
        small = self.geometry.n_kv - 1 - unit
        return unit, small if small != unit else -1

    def visits(self, j: int) -> tuple[int, ...]:
        """Q tiles of chain j in visiting order."""
        g = self.geometry
        if j >= self.units:
            return tuple(reversed(g.tiles(j)))
        p, a = self.pass_and_role(j)
        active = len(self.parts[p])
        r0 = min(g.n_q, g.first_q_tile(self.parts[p][-1]))
        rect = g.n_q - r0
        stride = max(1, min(self.most_stride or g.ratio, rect // active))
        return ring(a, stride, r0, g.n_q) + tuple(range(g.first_q_tile(j), r0))


def _formulas() -> Formulas:
    from ..formulas import symmetric

    return {("symmetric", "causal"): symmetric.GROUPED, ("symmetric_round_robin", "causal"): symmetric.ROUND_ROBIN}


SYMMETRIC = Family(
    "symmetric",
    Symmetric,
    masks=("causal",),
    colour="#c2185b",
    tried_under=("causal",),
    chains_of_unit=2,
    on_device=True,
    formulas=_formulas,
)
SYMMETRIC_ROUND_ROBIN = replace(SYMMETRIC, name="symmetric_round_robin", queue_of="symmetric")
