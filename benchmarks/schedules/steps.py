"""A plan unrolled: every tile step of every worker, in order, and the step that each has to wait for."""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise, repeat
from typing import NamedTuple

from dash_inductor.schedule.orders.base import Order
from dash_inductor.schedule.placement import Plan


class ScheduleError(ValueError):
    """A schedule that cannot run, or that does not cover its tiles."""


class Step(NamedTuple):
    """One reduction into Q tile `q` of query head `head`, from KV tile `kv`, after `rank` others."""

    head: int
    kv: int
    q: int
    rank: int

    def __str__(self) -> str:
        return f"(head {self.head}, Q tile {self.q}, chain {self.kv})"


@dataclass(frozen=True)
class Steps:
    """The steps of all workers, one worker after the other; a step is known by its index.

    first: the first step of each worker, then the number of steps.
    cause: the step with the rank before, -1 for rank 0 and where the same worker has done it earlier.
    """

    plan: Plan
    first: list[int]
    cause: list[int]

    def __len__(self) -> int:
        return len(self.cause)

    def worker(self, index: int) -> int:
        """Who does a step."""
        return bisect_right(self.first, index) - 1

    def __getitem__(self, index: int) -> Step:
        return self._all[index]

    def of_worker(self, worker: int) -> list[Step]:
        """The steps of a worker in order."""
        return self._all[self.first[worker] : self.first[worker + 1]]

    @property
    def chain_begins(self) -> Iterator[int]:
        """The first step of every chain that has one."""
        order_of, group = self.plan.order_of, self.plan.group
        for worker, step in enumerate(self.first[:-1]):
            for head, j in self.plan.tasks(worker):
                if length := order_of(head).geometry.steps(j) * group:
                    yield step
                step += length

    @cached_property
    def _all(self) -> list[Step]:
        group = self.plan.group
        rows: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (Q tile, rank) of a chain, by schedule and chain
        steps: list[Step] = []
        for worker in range(self.plan.workers):
            for head, j in self.plan.tasks(worker):
                schedule = self.plan.order_of(head)
                key = id(schedule), j
                if key not in rows:
                    rows[key] = list(zip(schedule.visits(j), schedule.ranks(j), strict=True))
                heads = range(head * group, (head + 1) * group)
                steps += [Step(x, j, q, rank) for q, rank in rows[key] for x in heads]
        return steps


def unroll(plan: Plan) -> Steps:
    """The steps of a plan; ScheduleError where a schedule's chains, orders or ranks are not permutations. O(steps).

    >>> from dash_inductor.schedule.orders.monotone import Ascending
    >>> from dash_inductor.schedule.geometry import Geometry
    >>> from dash_inductor.schedule.placement import GroupedPlan
    >>> steps = unroll(GroupedPlan(Ascending(Geometry(2, 3, 1, 1, "full"), roles=2), heads=1, heads_in_flight=1))
    >>> steps.first, steps.cause
    ([0, 4, 6], [-1, -1, 4, 5, 0, 1])
    >>> steps.of_worker(1)
    [Step(head=0, kv=1, q=0, rank=1), Step(head=0, kv=1, q=1, rank=1)]
    """
    heads = plan.heads * plan.group
    rows: dict[int, list[list[int]]] = {}  # the cells of every chain, by schedule
    cells = tiles = 0  # of one query head
    keys: list[int] = []
    first = [0]
    for worker in range(plan.workers):
        for head, j in plan.tasks(worker):
            schedule = plan.order_of(head)
            if id(schedule) not in rows:
                tiles = schedule.geometry.n_q
                cells, rows[id(schedule)] = _cells(schedule, plan.group)
            start = head * plan.group * cells
            keys += [start + cell for cell in rows[id(schedule)][j]]
        first.append(len(keys))
    step_in = [-1] * (heads * cells)
    for index, key in enumerate(keys):
        step_in[key] = index
    if len(keys) != heads * (cells - tiles) or step_in.count(-1) != heads * tiles:
        for head in range(plan.heads):
            _check_ranks(plan.order_of(head))
        raise ScheduleError("the plan does not run every chain of every head once")
    # A worker's own earlier step keeps nobody waiting.
    own = chain.from_iterable(repeat(start, stop - start) for start, stop in pairwise(first))
    before = [step_in[key - 1] for key in keys]
    cause = [-1 if start <= last < step else last for step, (start, last) in enumerate(zip(own, before, strict=True))]
    return Steps(plan, first, cause)


def _cells(schedule: Order, group: int) -> tuple[int, list[list[int]]]:
    """(Cells of a query head, cells of every chain): one per step, the ranks of a tile side by side after an empty cell.

    Query heads of a group are innermost. ScheduleError unless every order is right and every rank within its tile.
    """
    g = schedule.geometry
    orders = [schedule.visits(j) for j in range(g.n_kv)]
    for j, order in enumerate(orders):
        if sorted(order) != list(g.tiles(j)):
            raise ScheduleError(f"{schedule.name}: chain {j} visits {order}, not each of {tuple(g.tiles(j))} once")
    tiles = list(chain.from_iterable(orders))
    sizes = list(map(Counter(tiles).__getitem__, range(g.n_q)))
    firsts = list(accumulate((size + 1 for size in sizes), initial=1))  # rank 0 of every tile
    count = firsts[-1] - 1
    ranks = list(chain.from_iterable(map(schedule.ranks, range(g.n_kv))))
    if min(ranks) < 0 or any(map(operator.ge, ranks, map(sizes.__getitem__, tiles))):
        _check_ranks(schedule)
    cells = list(map(operator.add, map(firsts.__getitem__, tiles), ranks))
    if group > 1:
        cells = [x * count + cell for cell in cells for x in range(group)]
    stops = accumulate((group * len(order) for order in orders), initial=0)
    return count, [cells[start:stop] for start, stop in pairwise(stops)]


def _check_ranks(schedule: Order) -> None:
    """Raise ScheduleError unless the ranks of every tile are a permutation."""
    lines: list[list[int]] = [[] for _ in range(schedule.geometry.n_q)]
    for j in range(schedule.geometry.n_kv):
        for i, rank in zip(schedule.visits(j), schedule.ranks(j), strict=True):
            lines[i].append(rank)
    for i, line in enumerate(lines):
        if sorted(line) != list(range(len(line))):
            raise ScheduleError(f"{schedule.name}: Q tile {i} has ranks {line}, not a permutation of 0..{len(line) - 1}")
