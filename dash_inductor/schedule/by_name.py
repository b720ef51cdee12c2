"""Schedules and plans by the name of a family."""

from __future__ import annotations

from .families import FAMILIES, MONO, ROUND_ROBIN, TABLE, Ascending, Descending, Schedule, Shift
from .geometry import Geometry, check_count
from .list_scheduling import tabulate
from .plan import Plan, Straddling
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


def place(
    family: str,
    geometry: Geometry,
    roles: int,
    *,
    heads: int,
    heads_in_flight: int,
    group: int = 1,
    stride: int | None = None,
    boustrophedon: bool = False,
) -> Plan | Straddling:
    """A plan of `heads` kv heads, each of `group` query heads. Of a round robin, `roles` are the workers of its one line.

    >>> place("shift_round_robin", Geometry(6, 6, 1, 2, "full"), 2, heads=2, heads_in_flight=1).schedule_of(1).parts
    (range(0, 1), range(1, 3))
    """
    if family not in ROUND_ROBIN:
        schedule = make(family, geometry, roles, stride=stride, boustrophedon=boustrophedon)
        return Plan(schedule, heads, heads_in_flight, group)
    if heads_in_flight != 1:
        raise ValueError(f"heads_in_flight must be 1 for {family}, whose heads stand in one line, got {heads_in_flight}")
    check_count("roles", roles)
    units = geometry.n_kv if family == "shift_round_robin" else -(-geometry.n_kv // 2)
    schedule = make(ROUND_ROBIN[family], geometry, min(units, roles), stride=stride, boustrophedon=boustrophedon)
    return Straddling(schedule, heads, roles, group)
