"""Event replay of a plan: the model of schedules.md section 1, reduction in line, placement fixed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .plan import Plan

Semaphore = tuple[int, int, int]  # (kv head, query head of the group, Q tile)


class ScheduleError(ValueError):
    """A schedule that cannot run, or that does not cover its tiles."""


@dataclass(frozen=True)
class Replay:
    """What a replay found; times in ns."""

    makespan_ns: int
    steps: int  # tile steps replayed
    waits: int  # reductions that were ready before their turn
    wait_ns: int  # time lost in them, over all workers
    busy_ns: int  # compute and reduce, over all workers
    workers: int

    @property
    def utilization(self) -> float:
        """Share of the workers' time that is compute or reduce."""
        return self.busy_ns / (self.workers * self.makespan_ns) if self.makespan_ns else 1.0


class Step(NamedTuple):
    """One reduction: into Q tile i of query head g of kv head `head`, from chain j."""

    head: int
    g: int
    i: int
    j: int

    @property
    def semaphore(self) -> Semaphore:
        return self.head, self.g, self.i

    def __str__(self) -> str:
        return f"(head {self.head}, query head {self.g}, Q tile {self.i}, chain {self.j})"


def replay(plan: Plan, *, compute_ns: int, reduce_ns: int, sync_ns: int) -> Replay:
    """Run the plan: each step computes, waits for the previous rank of its tile, and reduces.

    The wait ends when the previous rank was reduced, sync_ns later if that was on another worker. A step of the design
    takes tau = compute_ns + reduce_ns, a hop lam = reduce_ns + sync_ns. Query heads of a group are the innermost loop.
    Raises ScheduleError naming the cycle if workers wait for each other. O(steps).

    >>> from .geometry import Geometry
    >>> from .families import Ascending
    >>> plan = Plan(Ascending(Geometry(6, 6, 1, 2, "full"), roles=3), heads=1, heads_in_flight=1)
    >>> replay(plan, compute_ns=10, reduce_ns=0, sync_ns=4).makespan_ns  # 6 steps of 10 and 2 hops of 4
    68
    """
    schedule = plan.schedule
    orders = [schedule.order(j) for j in range(schedule.geometry.n_kv)]
    ranks = [[schedule.rank(i, j) for i in order] for j, order in enumerate(orders)]

    def steps_of(worker: int) -> Iterator[tuple[Step, int]]:
        for head, j in plan.tasks(worker):
            for i, rank in zip(orders[j], ranks[j], strict=True):
                for g in range(plan.group):
                    yield Step(head, g, i, j), rank

    streams = [steps_of(worker) for worker in range(plan.workers)]
    pending = [next(stream, None) for stream in streams]
    free = [0] * plan.workers  # when the worker ended its last step
    added: dict[Semaphore, tuple[int, int, int]] = {}  # parts in a tile, when the last was done, and its worker
    blocked: dict[tuple[Semaphore, int], int] = {}  # the worker that waits for this count
    steps = waits = wait_ns = 0
    runnable = list(range(plan.workers))
    while runnable:
        worker = runnable.pop()
        while (item := pending[worker]) is not None:
            step, rank = item
            parts, done, author = added.get(step.semaphore, (0, 0, worker))
            if parts != rank:
                blocked[step.semaphore, rank] = worker
                break
            ready = free[worker] + compute_ns
            start = ready if author == worker else max(ready, done + sync_ns)
            waits += start > ready
            wait_ns += start - ready
            free[worker] = start + reduce_ns
            added[step.semaphore] = parts + 1, free[worker], worker
            steps += 1
            pending[worker] = next(streams[worker], None)
            waiter = blocked.pop((step.semaphore, parts + 1), None)
            if waiter is not None:
                runnable.append(waiter)

    stuck = {worker: item for worker, item in enumerate(pending) if item is not None}
    if stuck:
        raise ScheduleError(_describe_deadlock(plan, stuck, {semaphore: parts for semaphore, (parts, _, _) in added.items()}))
    return Replay(max(free), steps, waits, wait_ns, steps * (compute_ns + reduce_ns), plan.workers)


def _describe_deadlock(plan: Plan, stuck: dict[int, tuple[Step, int]], parts: dict[Semaphore, int]) -> str:
    """Follow who waits for whom from any stuck worker until one comes up again."""
    schedule = plan.schedule
    owner = {task: worker for worker in range(plan.workers) for task in plan.tasks(worker)}
    worker, seen, lines = min(stuck), [], []
    while worker not in seen:
        seen.append(worker)
        step, rank = stuck[worker]
        have = parts.get(step.semaphore, 0)
        missing = [j for j in schedule.geometry.contributors(step.i) if schedule.rank(step.i, j) == have]
        if len(missing) != 1:
            return f"deadlock: worker {worker} at {step} waits for rank {rank}, which does not come: {have} are added"
        cause = Step(step.head, step.g, step.i, missing[0])
        lines.append(f"worker {worker} at {step} waits for {cause}")
        worker = owner[step.head, missing[0]]
        if worker not in stuck:
            return "deadlock: " + "; ".join(lines) + f", which its worker {worker} never visits"
    cycle = lines[seen.index(worker) :]
    return "deadlock: " + "; ".join(cycle) + f", which is later on worker {worker}"
