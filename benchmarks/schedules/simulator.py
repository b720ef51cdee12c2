"""Event simulation of a plan, exact, in integers: a worker runs its steps one by one, additions of a tile come in their order."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from dash_inductor.schedule.geometry import check_count
from dash_inductor.schedule.placement import Plan

from .steps import ScheduleError, Steps, unroll


class Deadlock(ScheduleError):
    """Steps that wait for each other: `cycle` holds their indices as (waiting, awaited), worker by worker."""

    def __init__(self, message: str, cycle: tuple[tuple[int, int], ...]) -> None:
        super().__init__(message)
        self.cycle = cycle


class Wait(NamedTuple):
    """A step whose reduction was ready `ns` before its turn, because of the step `cause`."""

    step: int
    cause: int
    ns: int


@dataclass(frozen=True)
class Simulation:
    """What a simulation found. Times in ns; lists by worker, or by step as Steps numbers them.

    begin_ns: when each worker began, after the worker `follows` (-1 for none) had left its CTA.
    turn_ns, end_ns: when each step began to reduce, and ended. ready_ns: when it could have begun, but for its turn.
    residency: minimum resident CTAs that avoid deadlock; independent of times.
    """

    steps: Steps
    compute_ns: list[int]
    reduce_ns: list[int]
    overlap: bool
    begin_ns: list[int]
    follows: list[int]
    ready_ns: list[int]
    turn_ns: list[int]
    end_ns: list[int]
    residency: int
    ctas: int

    @cached_property
    def makespan_ns(self) -> int:
        """When the last step ended."""
        return max(self.end_ns)

    @cached_property
    def start_ns(self) -> list[int]:
        """When each step began to compute: after the reduction before it, or with that if they overlap."""
        if not self.overlap:
            return list(map(operator.sub, self.ready_ns, self.compute_ns))
        start = [0, *self.turn_ns[:-1]]
        for worker, first in enumerate(self.steps.first[:-1]):
            if first < self.steps.first[worker + 1]:
                start[first] = self.begin_ns[worker]
        return start

    @cached_property
    def waits(self) -> list[Wait]:
        """Who waited for whom, in the order of steps."""
        turns = enumerate(zip(self.ready_ns, self.turn_ns, strict=True))
        return [Wait(step, self.steps.cause[step], turn - ready) for step, (ready, turn) in turns if turn > ready]

    @property
    def wait_ns(self) -> int:
        """Time lost in waits, over all workers."""
        return sum(wait.ns for wait in self.waits)

    @property
    def utilization(self) -> float:
        """Share of the CTAs' time in which they compute or reduce."""
        spans = zip(self.begin_ns, pairwise(self.steps.first), strict=True)
        held = sum(self.end_ns[stop - 1] - begin for begin, (start, stop) in spans if start < stop)
        return (held - self.wait_ns) / (self.ctas * self.makespan_ns) if self.makespan_ns else 1.0

    def critical_path(self) -> list[int]:
        """Steps from time 0 to the makespan, each begun when the one before it allowed."""
        step = self.end_ns.index(self.makespan_ns)
        path = [step]
        while (step := self._predecessor(step)) >= 0:
            path.append(step)
        return path[::-1]

    def _predecessor(self, step: int) -> int:
        first = self.steps.first
        if self.turn_ns[step] > self.ready_ns[step]:
            return self.steps.cause[step]
        worker = self.steps.worker(step)
        if step > first[worker]:
            return step - 1
        worker = self.follows[worker]
        while worker >= 0 and first[worker] == first[worker + 1]:
            worker = self.follows[worker]
        return first[worker + 1] - 1 if worker >= 0 else -1


def simulate(
    plan: Plan | Steps,
    *,
    compute_ns: int | Sequence[int],
    reduce_ns: int | Sequence[int],
    sync_ns: int | Sequence[int],
    overlap: bool = False,
    resident: int | None = None,
    chain_ns: int = 0,
) -> Simulation:
    """Run the plan: each step computes, waits for the previous rank of its tile, and reduces.

    The wait ends when the previous rank was reduced, sync_ns later if that was on another worker. In the formulas a step takes
    tau = compute_ns + reduce_ns, a hop lam = reduce_ns + sync_ns. With overlap, a step computes while the one before it on
    the worker reduces, from that one's turn on: tau = max(compute_ns, reduce_ns). Costs hold for every step, or are given
    one by one in the order of unroll(plan); sync_ns then by the step that waits.

    chain_ns: how much longer the first step of a chain computes.

    resident: how many CTAs run at a time, at most (None: all); when one ends, the next worker starts in its place. Workers start in
    ticket order.

    Raises Deadlock naming the cycle if workers wait for each other, ValueError naming a cost that is no nonnegative int. O(steps).

    >>> from dash_inductor.schedule.geometry import Geometry
    >>> from dash_inductor.schedule.orders.monotone import Ascending
    >>> from dash_inductor.schedule.placement import GroupedPlan
    >>> plan = GroupedPlan(Ascending(Geometry(6, 6, 1, 2, "full"), roles=3), heads=1, heads_in_flight=1)
    >>> simulate(plan, compute_ns=10, reduce_ns=0, sync_ns=4).makespan_ns  # 6 steps of 10 and 2 hops of 4
    68
    >>> simulate(plan, compute_ns=10, reduce_ns=0, sync_ns=4, resident=2).makespan_ns  # a third chain follows the first
    120
    """
    steps = plan if isinstance(plan, Steps) else unroll(plan)
    first, cause, count = steps.first, steps.cause, len(steps)
    compute, reduce, sync = (
        _costs(name, cost, count) for name, cost in (("compute_ns", compute_ns), ("reduce_ns", reduce_ns), ("sync_ns", sync_ns))
    )
    if chain_ns:
        for step in steps.chain_begins:
            compute[step] += chain_ns
    workers = len(first) - 1
    if resident is not None:
        check_count("resident", resident)
    ctas = workers if resident is None else min(workers, resident)

    # From turn to turn: the reduction of the step before, and the own compute.
    gap = list(map(max if overlap else operator.add, [0, *reduce[:-1]], compute))  # type: ignore[arg-type]
    for start, stop in pairwise(first):
        if start < stop:
            gap[start] = compute[start]

    ready, turn, end = [0] * count, [0] * count, [-1] * count
    begin, follows = [0] * workers, [-1] * workers
    at = first[:-1]  # the next step of a worker
    waiter = [-1] * count  # the worker that waits for the step
    left: list[tuple[int, int]] = []  # heap of (time, worker that left its CTA)
    residency = live = 0
    started: list[int] = []
    for starting in range(workers):
        # Nobody gets on without another worker: what can be done with fewer has been done.
        if len(started) >= ctas:
            if not left:
                break
            begin[starting], follows[starting] = heapq.heappop(left)
        started.append(starting)
        live += 1
        if live > residency:
            residency = live
        runnable = [starting]
        while runnable:
            worker = runnable.pop()
            step, stop = at[worker], first[worker + 1]
            time = turn[step - 1] if step > first[worker] else begin[worker]
            while step < stop:
                time += gap[step]
                ready[step] = time
                before = cause[step]
                if before >= 0:
                    done = end[before]
                    if done < 0:
                        waiter[before] = worker
                        break
                    done += sync[step]
                    if done > time:
                        time = done
                turn[step] = time
                end[step] = time + reduce[step]
                if waiter[step] >= 0:
                    runnable.append(waiter[step])
                step += 1
            else:
                live -= 1
                if ctas < workers:
                    heapq.heappush(left, (end[step - 1] if step > first[worker] else begin[worker], worker))
            at[worker] = step
    if live:
        raise _deadlock(steps, set(started), at, ctas)
    return Simulation(steps, compute, reduce, overlap, begin, follows, ready, turn, end, residency, ctas)


def _costs(name: str, cost: int | Sequence[int], count: int) -> list[int]:
    if isinstance(cost, Sequence):
        costs = list(cost)
        if len(costs) != count:
            raise ValueError(f"{name} must be an int or one per step, {count} of them, got {len(costs)}")
        if set(map(type, costs)) != {int} or min(costs) < 0:
            wrong = next(value for value in costs if type(value) is not int or value < 0)
            raise ValueError(f"{name} must be nonnegative ints, got {wrong!r}")
        return costs
    check_count(name, cost, least=0)
    return [cost] * count


def _deadlock(steps: Steps, started: set[int], at: list[int], ctas: int) -> Deadlock:
    """Follow who waits for whom from a stuck worker, until one comes up again or has not even started."""
    worker = min(worker for worker in started if at[worker] < steps.first[worker + 1])
    seen: list[int] = []
    while worker in started and worker not in seen:
        seen.append(worker)
        worker = steps.worker(steps.cause[at[worker]])
    if worker in started:
        seen = seen[seen.index(worker) :]
        reason = f"which is later on worker {worker}"
    else:
        reason = f"whose worker {worker} cannot start: {ctas} CTAs are resident, and each of them waits"
    cycle = tuple((at[worker], steps.cause[at[worker]]) for worker in seen)
    lines = (f"worker {steps.worker(step)} at {steps[step]} waits for {steps[before]}" for step, before in cycle)
    return Deadlock(f"deadlock: {'; '.join(lines)}, {reason}", cycle)
