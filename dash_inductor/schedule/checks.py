"""What must hold for every schedule before it becomes a table."""

from __future__ import annotations

from itertools import pairwise

from .families import Schedule
from .plan import Plan
from .replay import ScheduleError, replay


def slack(schedule: Schedule) -> int | None:
    """Smallest clock distance between consecutive contributors of a Q tile on different workers; None without any.

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
                distance = schedule.clock(i, after) - schedule.clock(i, before)
                smallest = distance if smallest is None else min(smallest, distance)
    return smallest


def check(plan: Plan, resident: int | None = None) -> None:
    """Raise ScheduleError unless orders and ranks are permutations, waits are acyclic and `resident` is enough."""
    if resident is not None and plan.residency > resident:
        raise ScheduleError(f"{plan.schedule.name} needs {plan.residency} CTAs resident together, there are {resident}")
    _check_orders(plan.schedule)
    # A worker runs its heads one after another and only chains of one head wait for each other: a cycle lies inside a
    # head. Two heads in turn show both phases of boustrophedon.
    replay(Plan(plan.schedule, heads=min(2, plan.rounds), heads_in_flight=1), compute_ns=0, reduce_ns=0, sync_ns=0)


def _check_orders(schedule: Schedule) -> None:
    g = schedule.geometry
    placed = sorted(j for row in schedule.slots for j in row if j >= 0)
    if placed != list(range(g.n_kv)):
        raise ScheduleError(f"{schedule.name}: slots hold the chains {placed}, not each of 0..{g.n_kv - 1} once")
    for j in range(g.n_kv):
        order = schedule.order(j)
        if sorted(order) != list(range(g.lo(j), g.hi(j))):
            raise ScheduleError(f"{schedule.name}: chain {j} visits {order}, not each of {g.lo(j)}..{g.hi(j) - 1} once")
    for i in range(g.n_q):
        line = g.contributors(i)
        ranks = [schedule.rank(i, j) for j in line]
        if sorted(ranks) != list(range(len(line))):
            raise ScheduleError(f"{schedule.name}: Q tile {i} has ranks {ranks}, not a permutation of 0..{len(line) - 1}")


def _worker(schedule: Schedule, j: int) -> int:
    """Worker of chain j within its head slot, in a head whose first round is even."""
    p, a = schedule.place(j)
    return schedule.roles - 1 - a if schedule.boustrophedon and p % 2 else a
