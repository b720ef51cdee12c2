"""The makespan of each family in closed form (docs/times.md says how exact): what its record's `formulas` makes."""

from __future__ import annotations

from functools import cache

from ..families import REGISTER, TWO_PASS
from ..placement import GroupedPlan, Plan
from .formula import Formula, Time


@cache
def formula_for(family: str, mask: str) -> Formula | None:
    """The formula of a family, or of two passes, under a mask; None where there is none. A causal descending order is mirrored."""
    from . import two_pass  # sympy takes long to make formulas, and nobody waits before a choice is made

    if family == TWO_PASS:
        return two_pass.FULL if mask == "full" else two_pass.CAUSAL
    return REGISTER[family].formulas().get((family, mask))


def time_of(plan: Plan, *, step_ns: int, hop_ns: int, chain_ns: int = 0) -> Time | None:
    """The makespan of a plan by its formula, None where none holds; step_ns is of one query head, chain_ns passes beside a chain.

    >>> from ..geometry import Geometry
    >>> from ..orders.monotone import Ascending
    >>> plan = GroupedPlan(Ascending(Geometry(6, 6, 1, 2, "full"), roles=3), heads=1, heads_in_flight=1)
    >>> time_of(plan, step_ns=10, hop_ns=4)
    Time(ns=68, exact=True)
    >>> plan = GroupedPlan(Ascending(Geometry(6, 6, 1, 2, "causal"), roles=3), heads=1, heads_in_flight=1)
    >>> time_of(plan, step_ns=10, hop_ns=4) is None
    True
    """
    order, g = plan.order, plan.order.geometry
    if isinstance(plan, GroupedPlan) and order.roles == 1:  # under any mask: nobody waits
        return Time(plan.rounds * ((plan.steps // plan.heads) * step_ns + g.n_kv * chain_ns), chain_ns == 0)
    if not (g.is_triangle or g.mask == "full"):
        return None
    if (family := REGISTER.get(plan.family)) is None:
        return None
    if family.is_monotone and isinstance(plan, GroupedPlan):
        alone = order.passes == plan.rounds == 1  # nothing that could be mirrored
        if order.mirrored if g.mask == "full" else not (order.mirrored or alone):
            return None
    if family.has_stride and hop_ns > getattr(order, "stride", 1) * step_ns * plan.group:  # which need not be the largest
        return None
    formula = formula_for(plan.family, g.mask)
    sizes = g.n_q, g.n_kv, g.ratio, plan.heads, plan.roles, plan.heads_in_flight
    return formula(*sizes, step_ns * plan.group, hop_ns, chain_ns) if formula else None
