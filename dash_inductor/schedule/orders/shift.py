"""The shift order: each role goes round the Q tiles from a place of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..family import Family, Formulas
from ..geometry import check_range
from .base import InPasses, ring


@dataclass(frozen=True)
class Shift(InPasses):
    """Role a starts `stride` tiles after role a - 1, so that no two want a tile within `stride` steps.

    For the full mask; needs n_q >= roles. stride defaults to the largest, n_q // roles.

    >>> from ..geometry import Geometry
    >>> s = Shift(Geometry(6, 6, 1, 2, "full"), roles=3)
    >>> s.stride, [s.visits(j) for j in range(3)]
    (2, [(0, 1, 2, 3, 4, 5), (2, 3, 4, 5, 0, 1), (4, 5, 0, 1, 2, 3)])
    >>> [[s.rank(i, j) for i in range(6)] for j in range(3)]
    [[0, 0, 1, 1, 2, 2], [2, 2, 0, 0, 1, 1], [1, 1, 2, 2, 0, 0]]
    """

    stride: int = 0  # resolved in __post_init__; 0 asks for the default
    first_pass_roles: int = 0
    name = "shift"

    def __post_init__(self) -> None:
        super().__post_init__()
        n_q = self.geometry.n_q
        if self.geometry.mask != "full":
            raise ValueError(f"family shift needs mask='full', got {self.geometry.mask!r}: use symmetric or descending")
        check_range("roles", self.roles, n_q, "one per Q tile at most for shift")
        if not self.stride:
            object.__setattr__(self, "stride", n_q // self.roles)
        check_range("stride", self.stride, n_q // self.roles, "n_q // roles")

    def visits(self, j: int) -> tuple[int, ...]:
        """Q tiles of chain j in visiting order."""
        return ring(self.pass_and_role(j)[1], self.stride, 0, self.geometry.n_q)


def _formulas() -> Formulas:
    from ..formulas import shift

    return {("shift", "full"): shift.GROUPED, ("shift_round_robin", "full"): shift.ROUND_ROBIN}


SHIFT = Family(
    "shift",
    Shift,
    masks=("full",),
    colour="#f2a541",
    tried_under=("full",),
    roles_at_most_q_tiles=True,
    has_stride=True,
    on_device=True,
    formulas=_formulas,
)
SHIFT_ROUND_ROBIN = replace(SHIFT, name="shift_round_robin", queue_of="shift")
