"""The grid of shapes, and the times on it: the chosen schedule's, the paper's three, the lower bound. All by the paper's model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from benchmarks.schedules.bounds import lower_bound
from benchmarks.schedules.simulator import Simulation, simulate
from dash_inductor.schedule import MONOTONE, Costs, Geometry, Plan, RoundRobinPlan, Shift, Symmetric, TiledProblem, make_order
from dash_inductor.schedule.choice import ScheduleChoice, choose
from dash_inductor.schedule.formulas import time_of
from dash_inductor.schedule.formulas.chained import monotone_makespan

MASKS = ("full", "causal")
KV_TILES = (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
HEADS = (1, 4, 8, 16, 32, 64, 96, 128, 256, 512)
WORKERS = (108, 132, 148, 264)
HOP_PERCENT = (20, 75, 150)  # lam / tau
BLOCK_M, BLOCK_N = 64, 128
STEP_NS = 2000
L2_BYTES = 50 * 2**20
HEAD_DIM = 64


@dataclass(frozen=True)
class Point:
    """One shape on one device; lengths are n KV tiles of 128."""

    mask: str
    n: int
    heads: int
    workers: int
    hop_percent: int

    @property
    def hop_ns(self) -> int:
        return STEP_NS * self.hop_percent // 100

    @property
    def problem(self) -> TiledProblem:
        length = self.n * BLOCK_N
        return TiledProblem(length, length, self.heads, 1, HEAD_DIM, BLOCK_M, BLOCK_N, self.mask)

    @property
    def costs(self) -> Costs:
        """The paper's own model: a step costs the same in every family, and the model is never off."""
        return Costs("model", "model", STEP_NS, self.hop_ns, 0, self.workers, L2_BYTES, True, margin_percent=0)


@dataclass(frozen=True)
class Row:
    """Times in ns; ring is shift for the full mask and symmetric for the causal one, `cautious` what is chosen with the margin
    that devices get."""

    point: Point
    family: str
    roles: int
    heads_in_flight: int
    chosen: int
    cautious: int
    bound: int
    ascending: int
    descending: int
    ring: int

    @property
    def paper(self) -> int:
        """The best of the paper's three."""
        return min(self.ascending, self.descending, self.ring)


def points() -> Iterator[Point]:
    """The whole grid."""
    return itertools.starmap(Point, itertools.product(MASKS, KV_TILES, HEADS, WORKERS, HOP_PERCENT))


def row(point: Point) -> Row:
    """Time everything at a point."""
    choice = choose(point.problem, point.costs)
    cautious = choose(point.problem, replace(point.costs, margin_percent=Costs.margin_percent))
    ascending, descending, by_ring = round_robin(point, "ascending"), round_robin(point, "descending"), ring(point)
    paper = min(ascending, descending, by_ring)
    return Row(
        point,
        choice.family,
        choice.candidate.roles,
        choice.candidate.heads_in_flight,
        chosen(choice, paper),
        chosen(cautious, paper),
        bound(point),
        ascending,
        descending,
        by_ring,
    )


@lru_cache(maxsize=64)
def geometry(mask: str, n: int) -> Geometry:
    return Geometry(n * BLOCK_N, n * BLOCK_N, BLOCK_M, BLOCK_N, mask)


def bound(point: Point) -> int:
    """What no schedule can beat."""
    grid = geometry(point.mask, point.n)
    return lower_bound(grid, heads=point.heads, workers=point.workers, step_ns=STEP_NS, hop_ns=point.hop_ns)


@lru_cache(maxsize=2)
def chosen(choice: ScheduleChoice, enough: int) -> int:
    """The time of a choice, exact; or its formula, never less, where that is already `enough`."""
    plan, costs = choice.plan(), choice.costs
    if plan.order.name in MONOTONE:
        return monotone_makespan(plan, step_ns=costs.step_ns, hop_ns=costs.hop_ns)
    time = time_of(plan, step_ns=costs.step_ns, hop_ns=costs.hop_ns)
    return time.ns if time is not None and (time.exact or time.ns <= enough) else periodic_makespan(plan, costs)


def periodic_makespan(plan: Plan, costs: Costs) -> int:
    """The makespan of simulate(), from fewer heads where the schedule settles.

    After `period` heads the queue of units begins anew at worker 0, and when each worker is then free decides all that follows;
    the same delay for all delays it by that. So if one more period leaves all workers later by the same time, so does every other.
    """

    def run(heads: int) -> Simulation:
        shorter = replace(plan, heads=heads)  # type: ignore[type-var]  # both kinds of plans are dataclasses
        return simulate(shorter, compute_ns=costs.step_ns, reduce_ns=0, sync_ns=costs.hop_ns)

    def free(heads: int) -> list[int]:
        found = run(heads)
        return [found.end_ns[stop - 1] for stop in found.steps.first[1:]]

    period = plan.heads_in_flight
    if isinstance(plan, RoundRobinPlan):
        period = plan.workers // math.gcd(plan.workers, plan.units)
    for periods in range(1, plan.heads // period):
        later = {b - a for a, b in zip(free(periods * period), free((periods + 1) * period), strict=True)}
        if len(later) == 1:
            more = plan.heads // period - periods
            return run(plan.heads - more * period).makespan_ns + more * later.pop()
    return run(plan.heads).makespan_ns


def round_robin(point: Point, family: str) -> int:
    """Chain after chain, head after head, dealt out to the workers in turn; exact."""
    grid = geometry(point.mask, point.n)
    plan = RoundRobinPlan(make_order(family, grid, grid.n_kv), point.heads, point.workers)
    return monotone_makespan(plan, step_ns=STEP_NS, hop_ns=point.hop_ns)


def ring(point: Point) -> int:
    """Shift and symmetric as in the paper: neighbours a tile apart, dealt out in turn.

    Exact while a hop is within a step. Else a lower bound: the first two rounds simulated, the others as if nobody waited.
    """
    grid = geometry(point.mask, point.n)
    full = point.mask == "full"
    units = point.n if full else point.n // 2  # every n of the grid is even
    roles = min(units, point.workers)
    unit_ns = (grid.n_q if full else grid.steps(0) + grid.steps(point.n - 1)) * STEP_NS
    rounds = -(-point.heads * units // point.workers)
    if point.hop_ns <= STEP_NS:
        return rounds * unit_ns
    heads = min(point.heads, -(-2 * point.workers // units))
    first = RoundRobinPlan(Shift(grid, roles, 1) if full else Symmetric(grid, roles, most_stride=1), heads, point.workers)
    found = simulate(first, compute_ns=STEP_NS, reduce_ns=0, sync_ns=point.hop_ns)

    def end(worker: int) -> int:
        done = range(worker, heads * units, point.workers)
        left = len(range(worker, point.heads * units, point.workers)) - len(done)
        return (found.end_ns[found.steps.first[worker + 1] - 1] if done else 0) + left * unit_ns

    return max(map(end, range(point.workers)))
