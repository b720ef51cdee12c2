"""The time of a plan in closed form, where there is one."""

from __future__ import annotations

from typing import NamedTuple

from . import times
from .families import MONO, TABLE, Schedule, Shift
from .plan import Plan, Straddling
from .symmetric import Symmetric
from .times import INTEGER, Time


class Formula(NamedTuple):
    """Makespan in ns, exact or an upper bound."""

    ns: int
    exact: bool


def formula(plan: Plan | Straddling, *, step_ns: int, hop_ns: int) -> Formula | None:
    """The closed form of a plan's makespan, None where none holds; step_ns is tau of one query head, hop_ns lam.

    >>> from .families import Ascending
    >>> from .geometry import Geometry
    >>> plan = Plan(Ascending(Geometry(6, 6, 1, 2, "full"), roles=3), heads=1, heads_in_flight=1)
    >>> formula(plan, step_ns=10, hop_ns=4)
    Formula(ns=68, exact=True)
    >>> plan = Plan(Ascending(Geometry(6, 6, 1, 2, "causal_top_left"), roles=3), heads=1, heads_in_flight=1)
    >>> formula(plan, step_ns=10, hop_ns=4) is None
    True
    """
    s, g, tau = plan.schedule, plan.schedule.geometry, step_ns * plan.group
    if s.name == TABLE or (isinstance(plan, Straddling) and s.name in MONO):
        return None
    if isinstance(plan, Straddling):
        return _ring(s, times.round_robin_turns(plan.units, plan.heads, plan.workers, INTEGER), tau, hop_ns)
    if s.roles == 1:  # no hop anywhere
        return Formula(plan.rounds * (plan.steps // plan.heads) * step_ns, True)
    if isinstance(s, Shift | Symmetric):
        return _ring(s, plan.rounds * s.passes, tau, hop_ns)
    place = plan.heads, s.roles, plan.heads_in_flight, tau, hop_ns, INTEGER
    found = Time(0, 1)
    exact = True
    if g.mask == "full" and not s.boustrophedon:
        found, exact = times.full_mono(g.n_q, g.n_kv, *place), g.n_kv % s.roles == 0
    elif g.is_triangle and s.name == "descending" and (s.boustrophedon or s.passes == plan.rounds == 1):
        found = times.causal_mono(g.n_q, g.n_kv, g.ratio, *place)
        exact = g.n_kv % s.roles == 0 or plan.rounds == 1
    return None if found.penalty else Formula(found.ns, exact)


def _ring(schedule: Schedule, turns: int, tau: int, lam: int) -> Formula | None:
    """The form of shift or symmetric where a worker runs `turns` chains or pairs."""
    g = schedule.geometry
    if isinstance(schedule, Shift):
        time = times.full_shift(g.n_q, turns, schedule.roles, tau, lam, INTEGER)
        return Formula(time.ns, True) if lam <= schedule.stride * tau else None
    time = times.causal_symmetric(g.n_q, g.n_kv, g.ratio, turns, tau, lam, INTEGER)
    return Formula(time.ns, g.n_kv % 2 == 0 and lam <= tau) if g.is_triangle else None
