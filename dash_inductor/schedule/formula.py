"""The time of a plan in closed form, where there is one."""

from __future__ import annotations

from typing import NamedTuple

from . import times
from .families import TABLE, Shift
from .plan import Plan
from .times import INTEGER, Time


class Formula(NamedTuple):
    """Makespan in ns, exact or an upper bound."""

    ns: int
    exact: bool


def formula(plan: Plan, *, step_ns: int, hop_ns: int) -> Formula | None:
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
    if s.name == TABLE:
        return None
    if s.roles == 1:  # no hop anywhere
        return Formula(plan.rounds * (plan.steps // plan.heads) * step_ns, True)
    place = plan.heads, s.roles, plan.heads_in_flight, tau, hop_ns, INTEGER
    found = Time(0, 1)
    exact = True
    if isinstance(s, Shift):
        found = Time(times.full_shift(g.n_q, g.n_kv, *place).ns, hop_ns // (s.stride * tau + 1))
    elif g.mask == "full" and not s.boustrophedon:
        found, exact = times.full_mono(g.n_q, g.n_kv, *place), g.n_kv % s.roles == 0
    elif g.is_triangle and s.name == "symmetric":
        found, exact = times.causal_symmetric(g.n_q, g.n_kv, g.ratio, *place), g.n_kv % 2 == 0 and hop_ns <= tau
    elif g.is_triangle and s.name == "descending" and (s.boustrophedon or s.passes == plan.rounds == 1):
        found = times.causal_mono(g.n_q, g.n_kv, g.ratio, *place)
        exact = g.n_kv % s.roles == 0 or (plan.rounds == 1 and s.passes % 2 == 1)
    return None if found.penalty else Formula(found.ns, exact)
