"""What must hold for every schedule before it becomes a table."""

from __future__ import annotations

from itertools import pairwise

from .families import Schedule
from .plan import Plan, Straddling
from .simulator import simulate
from .steps import ScheduleError


def slack(schedule: Schedule) -> int | None:
    """Smallest clock distance between consecutive contributors of a Q tile on different workers, in steps; None without any.

    With slack s the schedule never stalls while a hop costs at most s steps (lam <= s * tau).

    >>> from .geometry import Geometry
    >>> from .families import Ascending, Shift
    >>> full = Geometry(6, 6, 1, 2, "full")
    >>> slack(Ascending(full, roles=3)), slack(Shift(full, roles=3)), slack(Ascending(full, roles=1))
    (0, 2, None)
    """
    g = schedule.geometry
    smallest = None
    for i in range(g.n_q):
        line = sorted(g.contributors(i), key=lambda j: schedule.rank(i, j))
        for before, after in pairwise(line):
            if _worker(schedule, before) != _worker(schedule, after):
                distance = (schedule.clock(i, after) - schedule.clock(i, before)) // schedule.clock_unit
                smallest = distance if smallest is None else min(smallest, distance)
    return smallest


def check(plan: Plan | Straddling, resident: int | None = None) -> None:
    """Raise ScheduleError unless orders and ranks are permutations, waits are acyclic and `resident` CTAs are enough.

    A Deadlock names the cycle. Whether a plan ends does not depend on times.
    """
    if isinstance(plan, Straddling):
        simulate(plan, compute_ns=0, reduce_ns=0, sync_ns=0, resident=resident)
        return
    # Only chains of one head wait for each other. With all CTAs resident a cycle lies inside a head, and two heads in turn
    # show both phases of boustrophedon. With fewer, who waits in one head is missing in the next: it takes all heads of a slot.
    few = resident is not None and resident < plan.residency
    placed = sorted(j for row in plan.schedule.slots for j in row if j >= 0)
    if placed != list(range(plan.schedule.geometry.n_kv)):
        raise ScheduleError(f"{plan.schedule.name}: slots hold the chains {placed}, not each one once")
    one_slot = Plan(plan.schedule, heads=plan.rounds if few else min(2, plan.rounds), heads_in_flight=1)
    simulate(one_slot, compute_ns=0, reduce_ns=0, sync_ns=0, resident=resident)


def _worker(schedule: Schedule, j: int) -> int:
    """Worker of chain j within its head slot, in a head whose first round is even."""
    p, a = schedule.place(j)
    return schedule.roles - 1 - a if schedule.boustrophedon and p % 2 else a
