"""The makespan of a monotone order, chain by chain instead of step by step."""

from __future__ import annotations

import heapq

from .families import MONO
from .geometry import TABLE_MASK, check_count
from .plan import Placement


def monotone_makespan(plan: Placement, *, step_ns: int, hop_ns: int, resident: int | None = None) -> int:
    """simulate(plan).makespan_ns for ascending or descending, exact, in O(h n log P) for h heads of n chains.

    A chain never waits after its first step, for the chain before it sweeps the same tiles at the same pace. So the first step
    of chain x ends at S[x] = max(free(worker) + tau, S[x-1] + d * tau + lam), where chain x-1 came by d steps after its own
    first: d = lo_x - lo_{x-1} ascending, hi_{x-1} - hi_x descending. step_ns is tau of one query head, hop_ns lam.

    resident: the workers are tickets, taken in order by so many CTAs; for plans with a worker per chain. ValueError for
    what the recursion does not cover: other families, block masks, descending in a window.

    >>> from .families import Ascending
    >>> from .geometry import Geometry
    >>> from .plan import Plan
    >>> plan = Plan(Ascending(Geometry(6, 6, 1, 2, "full"), roles=3), heads=1, heads_in_flight=1)
    >>> monotone_makespan(plan, step_ns=10, hop_ns=4), monotone_makespan(plan, step_ns=10, hop_ns=4, resident=2)
    (68, 120)
    """
    check_count("step_ns", step_ns, least=0)
    check_count("hop_ns", hop_ns, least=0)
    schedule = plan.schedule_of(0)
    g = schedule.geometry
    ascending = schedule.name == MONO[0]
    if schedule.name not in MONO or g.mask == TABLE_MASK or not (ascending or g.window is None):
        raise ValueError(f"no recursion for family {schedule.name!r} with mask={g.mask!r}, window={g.window}")
    tau = step_ns * plan.group
    tiles = [g.tiles(j) for j in range(g.n_kv)]
    worker_of = {task: worker for worker in range(plan.workers) for task in plan.tasks(worker)}
    if resident is not None:
        check_count("resident", resident)
        if len(worker_of) > plan.workers:
            raise ValueError("resident needs a plan with a worker per chain")
    free = dict.fromkeys(range(plan.workers), 0)
    idle = [0] * min(plan.workers, resident or 0)  # heap of the times from which CTAs are free
    makespan = 0
    for head in range(plan.heads):
        began, before = 0, -1  # the end of the first step of the chain before, and which it is
        for j, row in enumerate(tiles):
            worker = worker_of[head, j]
            start = heapq.heappop(idle) if resident else free[worker]
            if row:
                began_before, began = began, start + tau
                if before >= 0 and tiles[before][-1] >= row[0] and worker_of[head, before] != worker:
                    later = row[0] - tiles[before][0] if ascending else tiles[before][-1] - row[-1]
                    began = max(began, began_before + later * tau + hop_ns)
                before = j
                start = began + (len(row) - 1) * tau
            free[worker] = start
            if resident:
                heapq.heappush(idle, start)
            makespan = max(makespan, start)
    return makespan
