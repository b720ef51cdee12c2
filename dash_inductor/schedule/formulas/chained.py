"""The makespan of a monotone order, chain by chain instead of step by step; and with it that of a chained launch."""

from __future__ import annotations

import heapq
from functools import lru_cache

from ..costs import Costs
from ..families import MONOTONE
from ..geometry import Geometry, check_count
from ..orders.monotone import Ascending
from ..placement import GroupedPlan, Plan, make_order
from ..tiled_problem import TiledProblem

MOST_CHAINS = 16_384  # up to this many are timed one by one; more heads in proportion


def monotone_makespan(plan: Plan, *, step_ns: int, hop_ns: int, chain_ns: int = 0, resident: int | None = None) -> int:
    """simulate(plan).makespan_ns for ascending or descending, exact, in O(h n log P) for h heads of n chains.

    A chain never waits after its first step, for the chain before it sweeps the same tiles at the same pace. So the first step
    of chain x ends at S[x] = max(free(worker) + tau, S[x-1] + d * tau + lam), where chain x-1 came by d steps after its own
    first: ascending, d is how many Q tiles later chain x begins; descending, how many earlier. step_ns, tau, is of one query head;
    chain_ns, eta, passes before a chain.

    resident: the workers are tickets, taken in order by this many CTAs; for plans with a worker per chain. ValueError for
    what the recursion does not cover: other families, block masks, descending in a window.

    >>> from ..orders.monotone import Ascending
    >>> plan = GroupedPlan(Ascending(Geometry(6, 6, 1, 2, "full"), roles=3), heads=1, heads_in_flight=1)
    >>> monotone_makespan(plan, step_ns=10, hop_ns=4), monotone_makespan(plan, step_ns=10, hop_ns=4, resident=2)
    (68, 120)
    """
    order = plan.order_of(0)
    g = order.geometry
    ascending = isinstance(order, Ascending)
    if order.name not in MONOTONE or g.blocks is not None or not (ascending or g.window is None):
        raise ValueError(f"no recursion for family {order.name!r} with mask={g.mask!r}, window={g.window}")
    group_step_ns = step_ns * plan.group
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
            start = chain_ns + (heapq.heappop(idle) if resident else free[worker])
            if row:
                began_before, began = began, start + group_step_ns
                if before >= 0 and tiles[before][-1] >= row[0] and worker_of[head, before] != worker:
                    later = row[0] - tiles[before][0] if ascending else tiles[before][-1] - row[-1]
                    began = max(began, began_before + later * group_step_ns + hop_ns)
                before = j
                start = began + (len(row) - 1) * group_step_ns
            free[worker] = start
            if resident:
                heapq.heappush(idle, start)
            makespan = max(makespan, start)
    return makespan


def chained_plan(geometry: Geometry, family: str, heads: int, group: int) -> GroupedPlan:
    """A monotone family with a worker, which is a ticket, for every chain."""
    return GroupedPlan(make_order(family, geometry, geometry.n_kv), heads, heads, group)


@lru_cache(1024)
def chained_time(problem: TiledProblem, costs: Costs, family: str) -> int:
    """The makespan in ns where `costs.workers` CTAs take the tickets.

    >>> from dash_inductor.devices.cost_files import load_costs
    >>> problem = TiledProblem(256, 256, 2, 1, 64, 16, 32, "full")
    >>> chained_time(problem, load_costs("emulated", block_m=16, block_n=32, head_dim=64), "ascending")
    50250
    """
    geometry = problem.geometry
    heads = min(problem.kv_heads_total, max(1, MOST_CHAINS // geometry.n_kv))
    plan = chained_plan(geometry, family, heads, problem.group)
    times = {"step_ns": costs.step_ns, "hop_ns": costs.hop_ns, "chain_ns": costs.chain_ns}
    ns = monotone_makespan(plan, **times, resident=costs.workers)
    return -(-ns * problem.kv_heads_total // heads) + costs.launches.beside_ns(problem.elements, two_pass=False)
