"""A schedule by the name of its family."""

from __future__ import annotations

from .families import FAMILIES, MONO, TABLE, Ascending, Descending, Schedule, Shift
from .geometry import Geometry, check_count
from .list_scheduling import tabulate
from .symmetric import Symmetric


def make(
    family: str,
    geometry: Geometry,
    roles: int,
    *,
    stride: int | None = None,
    boustrophedon: bool = False,
    step_ns: int = 1,
    hop_ns: int = 1,
) -> Schedule:
    """The schedule of a family; ValueError when there is none, or it does not take the argument or mask.

    step_ns and hop_ns (tau and lam; under GQA the step of the whole group) shape the family "table" alone.

    >>> make("descending", Geometry(6, 6, 1, 2, "causal_top_left"), 2, boustrophedon=True).passes
    2
    """
    if family not in (*FAMILIES, TABLE):
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, {TABLE}, got {family!r}")
    if stride is not None and family != "shift":
        raise ValueError(f"stride is for shift, not for {family}")
    if stride is not None:
        check_count("stride", stride)
    if boustrophedon and family not in MONO:
        raise ValueError(f"boustrophedon is for {' and '.join(MONO)}, not for {family}")
    if family == "ascending":
        return Ascending(geometry, roles, boustrophedon)
    if family == "descending":
        return Descending(geometry, roles, boustrophedon)
    if family == "shift":
        return Shift(geometry, roles) if stride is None else Shift(geometry, roles, stride)
    if family == "symmetric":
        return Symmetric(geometry, roles)
    return tabulate(geometry, roles, step_ns, hop_ns)
