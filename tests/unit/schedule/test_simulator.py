from __future__ import annotations

import random
from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.schedules.explicit import Explicit
from benchmarks.schedules.simulator import Deadlock, simulate
from benchmarks.schedules.steps import ScheduleError, Steps, unroll
from dash_inductor.schedule import Ascending, Descending, Geometry, GroupedPlan, Plan, Shift, Symmetric

from .strategies import check, plans, residency, round_robin, schedules, wild

FULL = Geometry(6, 6, 1, 2, "full")
CASES = 2000
Costs = dict[str, list[int]]


def random_costs(rng: random.Random, count: int) -> Costs:
    """One of each per step; a sync is anything from nothing to many steps."""
    most = {"compute_ns": 9, "reduce_ns": 5, "sync_ns": rng.choice([0, 5, 40])}
    return {name: [rng.randint(0, top) for _ in range(count)] for name, top in most.items()}


def ends_of(plan: Plan, costs: Costs, overlap: bool, begin: dict[int, float]) -> list[float] | None:
    """End of every step as the longest path to it, infinite behind a worker that never begins; None for a cycle.

    A node per step, its turn; edges to the next turn of the worker and of the Q tile. Written from the model, with nothing of the
    simulator's.
    """
    dag, at, index = nx.DiGraph(), {}, 0
    compute, reduce, sync = costs["compute_ns"], costs["reduce_ns"], costs["sync_ns"]
    for worker in range(plan.workers):
        before: int | None = None
        for head, j in plan.tasks(worker):
            schedule = plan.order_of(head)
            for i in schedule.visits(j):
                for x in range(plan.group):
                    at[head, x, i, schedule.rank(i, j)] = index, worker
                    if before is None:
                        dag.add_edge("start", index, weight=begin[worker] + compute[index])
                    else:
                        done = max(reduce[before], compute[index]) if overlap else reduce[before] + compute[index]
                        dag.add_edge(before, index, weight=done)
                    before, index = index, index + 1
    for (head, x, i, rank), (step, worker) in at.items():
        if rank:
            last, other = at[head, x, i, rank - 1]
            weight = reduce[last] + (sync[step] if other != worker else 0)
            if not dag.has_edge(last, step) or dag[last][step]["weight"] < weight:
                dag.add_edge(last, step, weight=weight)
    if not nx.is_directed_acyclic_graph(dag):
        return None
    turn = {"start": 0.0}
    for node in nx.topological_sort(dag):
        if node != "start":
            turn[node] = max(turn[u] + data["weight"] for u, _, data in dag.in_edges(node, data=True))
    return [turn[step] + reduce[step] for step in range(index)]


def with_resident(plan: Plan, costs: Costs, overlap: bool, resident: int) -> list[float] | None:
    """The same with so many CTAs: worker t begins when t - resident + 1 others have ended."""
    first = unroll(plan).first
    begin = dict.fromkeys(range(plan.workers), float("inf"))
    for worker in range(plan.workers + 1):
        ends = ends_of(plan, costs, overlap, begin)
        if ends is None or worker == plan.workers:
            return ends if ends is None or max(ends) < float("inf") else None
        done = sorted(ends[first[w + 1] - 1] if first[w] < first[w + 1] else begin[w] for w in range(worker))
        begin[worker] = 0 if worker < resident else done[worker - resident]
        if begin[worker] == float("inf"):
            return None
    raise AssertionError


def is_cycle(steps: Steps, found: Deadlock, started: bool) -> bool:
    """Each awaited step stands behind the next waiting one on its worker, or on a worker that cannot start."""
    waiting = [step for step, _ in found.cycle]
    if any(steps.cause[step] != awaited for step, awaited in found.cycle):
        return False
    links = list(zip(found.cycle, [*waiting[1:], waiting[0]], strict=True))
    behind = [steps.worker(awaited) == steps.worker(then) and awaited >= then for (_, awaited), then in links]
    return all(behind) if started else all(behind[:-1]) and not behind[-1]


def test_it_is_the_longest_path_or_a_cycle() -> None:
    """Random plans with random costs per step, of which many deadlock; with all CTAs resident and with fewer."""
    deadlocks = fewer = 0
    for seed in range(CASES):
        rng = random.Random(seed)
        plan = wild(rng)
        steps = unroll(plan)
        costs, overlap = random_costs(rng, len(steps)), rng.random() < 0.5
        resident = rng.choice([None, rng.randint(1, plan.workers)])
        ends = with_resident(plan, costs, overlap, resident or plan.workers)
        fewer += resident is not None and ends is not None
        if ends is not None:
            found = simulate(plan, **costs, overlap=overlap, resident=resident)
            assert (found.end_ns, found.makespan_ns) == (ends, max(ends)), seed
        else:
            with pytest.raises(Deadlock, match=r"deadlock: worker \d+ at \(head") as caught:
                simulate(plan, **costs, overlap=overlap, resident=resident)
            assert is_cycle(steps, caught.value, started="which is later on worker" in str(caught.value)), seed
            deadlocks += 1
    assert CASES / 5 < deadlocks < CASES * 4 / 5 and fewer > CASES / 5


@given(plans() | round_robin(), st.randoms(use_true_random=False), st.booleans())
def test_the_families_too(plan: Plan, rng: random.Random, overlap: bool) -> None:
    """With their residency, and with one CTA less than they need."""
    costs = random_costs(rng, len(unroll(plan)))
    ends = with_resident(plan, costs, overlap, residency(plan))
    if ends is None:
        assert not isinstance(plan, GroupedPlan)  # roles of one head in different rounds may wait for each other
        with pytest.raises(Deadlock):
            simulate(plan, **costs, overlap=overlap, resident=residency(plan))
        return
    found = simulate(plan, **costs, overlap=overlap, resident=residency(plan))
    assert found.end_ns == ends
    assert found.residency == 1 or with_resident(plan, costs, overlap, found.residency - 1) is None


@given(plans(), st.integers(0, 9), st.integers(0, 9), st.integers(0, 25))
def test_overlapped_is_in_line_with_the_longer_of_both(plan: GroupedPlan, compute: int, reduce: int, sync: int) -> None:
    overlapped = simulate(plan, compute_ns=compute, reduce_ns=reduce, sync_ns=sync, overlap=True).makespan_ns
    longer = simulate(plan, compute_ns=max(compute, reduce) - reduce, reduce_ns=reduce, sync_ns=sync).makespan_ns
    assert overlapped == longer + min(compute, reduce)


@given(plans(), st.integers(0, 9), st.integers(0, 9), st.integers(0, 25))
def test_only_step_and_hop_matter(plan: GroupedPlan, compute: int, reduce: int, sync: int) -> None:
    found = simulate(plan, compute_ns=compute, reduce_ns=reduce, sync_ns=sync).makespan_ns
    assert found == simulate(plan, compute_ns=compute + reduce, reduce_ns=0, sync_ns=reduce + sync).makespan_ns


@given(plans(), st.randoms(use_true_random=False), st.booleans())
def test_times_fit_together(plan: GroupedPlan, rng: random.Random, overlap: bool) -> None:
    """Steps of a worker follow each other, waits are turns not yet come, and the critical path leaves no gap."""
    costs = random_costs(rng, len(unroll(plan)))
    resident = rng.choice([None, residency(plan)])
    found = simulate(plan, **costs, overlap=overlap, resident=resident)
    steps = found.steps
    for step in range(len(steps)):
        assert found.start_ns[step] + costs["compute_ns"][step] <= found.ready_ns[step] <= found.turn_ns[step]
        assert found.end_ns[step] == found.turn_ns[step] + costs["reduce_ns"][step]
    for step, cause, ns in found.waits:
        assert found.turn_ns[step] == found.end_ns[cause] + costs["sync_ns"][step] == found.ready_ns[step] + ns
        assert steps[cause]._replace(kv=0, rank=0) == steps[step]._replace(kv=0, rank=0)
        assert steps[cause].rank + 1 == steps[step].rank
    path = found.critical_path()
    assert found.end_ns[path[-1]] == found.makespan_ns
    assert found.start_ns[path[0]] == 0 == found.begin_ns[steps.worker(path[0])]
    for before, after in pairwise(path):
        if steps.worker(before) == steps.worker(after):
            assert after == before + 1 and found.ready_ns[after] == found.turn_ns[after]
        elif found.turn_ns[after] > found.ready_ns[after]:
            assert steps.cause[after] == before
        else:
            assert found.begin_ns[steps.worker(after)] == found.end_ns[before]


def test_waits_are_counted() -> None:
    found = simulate(GroupedPlan(Ascending(FULL, 3), 1, 1), compute_ns=10, reduce_ns=0, sync_ns=4)
    # Chain 1 waits 4 ns for chain 0 once, chain 2 waits 8 ns; after that both are late enough.
    assert (found.makespan_ns, found.waits, found.wait_ns) == (68, [(6, 0, 4), (12, 6, 8)], 12)
    assert found.utilization == 180 / (3 * 68)


@given(plans())
def test_who_waits_ends_with_its_residency_and_with_no_fewer(plan: GroupedPlan) -> None:
    needed = simulate(plan, compute_ns=1, reduce_ns=1, sync_ns=1).residency
    assert needed <= residency(plan)
    check(plan, resident=residency(plan))
    assert simulate(plan, compute_ns=1, reduce_ns=1, sync_ns=1, resident=needed).residency == needed
    check(plan, resident=needed)
    if needed > 1:
        with pytest.raises(Deadlock):
            simulate(plan, compute_ns=3, reduce_ns=1, sync_ns=7, resident=needed - 1)
        with pytest.raises(Deadlock, match=f"cannot start: {needed - 1} CTAs are resident, and each of them waits"):
            check(plan, resident=needed - 1)


def test_a_new_cta_is_another_cta() -> None:
    """A hand-off between two workers that follow each other on a CTA takes a hop as well."""
    plan = GroupedPlan(Ascending(Geometry(1, 2, 1, 1, "full"), 2), 1, 1)
    assert simulate(plan, compute_ns=1, reduce_ns=1, sync_ns=9, resident=1).turn_ns == [1, 11]
    one = GroupedPlan(Ascending(Geometry(1, 2, 1, 1, "full"), 1), 1, 1)
    assert simulate(one, compute_ns=1, reduce_ns=1, sync_ns=9).turn_ns == [1, 3]


def test_too_few_resident_ctas_are_refused_with_the_cycle() -> None:
    message = (
        r"deadlock: worker 0 at \(head 0, Q tile 4, chain 0\) waits for \(head 0, Q tile 4, chain 1\); "
        r"worker 1 at \(head 0, Q tile 4, chain 1\) waits for \(head 0, Q tile 4, chain 2\), "
        r"whose worker 2 cannot start: 2 CTAs are resident, and each of them waits"
    )
    with pytest.raises(Deadlock, match=message):
        check(GroupedPlan(Shift(FULL, 3), 2, 1), resident=2)


def test_more_heads_can_need_more_ctas() -> None:
    """Worker 0 waits for worker 3 in head 0, worker 1 for worker 0 in head 1, worker 2 for worker 1 in head 2."""
    g = Geometry(7, 9, 3, 2, "causal", window=0)
    for heads, least in ((1, 2), (2, 3), (3, 4), (4, 4)):
        plan = GroupedPlan(Descending(g, 4), heads, 1)
        assert simulate(plan, compute_ns=1, reduce_ns=1, sync_ns=1).residency == least


def table(orders: list[list[int]], ranks: list[list[int]], slots: tuple[tuple[int, ...], ...]) -> Explicit:
    """The clock as wished: ranks in the place of clocks."""
    blocks = [[i in order for i in range(6)] for order in orders]
    steps = tuple(tuple(zip(order, row, strict=True)) for order, row in zip(orders, ranks, strict=True))
    return Explicit(Geometry.of_blocks(blocks), slots, steps)


def broken(**methods: object) -> Ascending:
    """With a method of its own: on the full mask, three chains of six steps."""
    return type("Broken", (Ascending,), methods)(FULL, 3)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            table([[0, 1], [0, 1]], [[1, 0], [0, 1]], ((0,), (1,))),
            r"deadlock: worker 0 at .*Q tile 0, chain 0\) waits for .*chain 1\), which is later on worker 0",
        ),
        (
            table([[0, 1], [1, 0]], [[1, 0], [1, 0]], ((0, 1),)),
            r"deadlock: worker 0 at .*Q tile 0, chain 0.* waits .*chain 1\); worker 1 .*, which is later on worker 0",
        ),
        (broken(ranks=lambda self, j: (min(j, 1),) * 6), r"Q tile 0 has ranks \[0, 1, 1\], not a permutation of 0..2"),
        (broken(ranks=lambda self, j: (j - 1,) * 6), r"Q tile 0 has ranks \[-1, 0, 1\], not a permutation of 0..2"),
        (broken(ranks=lambda self, j: (j + 1,) * 6), r"Q tile 0 has ranks \[1, 2, 3\], not a permutation of 0..2"),
        (
            broken(visits=lambda self, j: tuple(range(j == 1, 6))),
            r"chain 1 visits \(1, 2, 3, 4, 5\), not each of \(0, 1, 2, 3, 4, 5\) once",
        ),
        (table([[0], [0]], [[0], [1]], ((0, 0),)), r"slots hold the chains \[0, 0\], not each one once"),
    ],
)
def test_a_broken_schedule_is_named(schedule: Ascending, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check(GroupedPlan(schedule, 2, 1))


class Forgetful(GroupedPlan):
    """Leaves out the last chain."""

    def tasks(self, worker: int):
        return (task for task in super().tasks(worker) if task[1] != 2)


def test_a_plan_that_leaves_out_a_chain_is_refused() -> None:
    with pytest.raises(ScheduleError, match="the plan does not run every chain of every head once"):
        unroll(Forgetful(Ascending(FULL, 3), 2, 1))


@given(schedules())
def test_steps_are_the_orders_and_ranks(schedule) -> None:
    plan = GroupedPlan(schedule, 3, 2, 2)
    steps = unroll(plan)
    for worker in range(plan.workers):
        expected = [
            (head * 2 + x, j, i, schedule.rank(i, j))
            for head, j in plan.tasks(worker)
            for i in schedule.visits(j)
            for x in range(2)
        ]
        assert steps.of_worker(worker) == expected
        assert all(steps.worker(step) == worker for step in range(steps.first[worker], steps.first[worker + 1]))
    assert len(steps) == plan.steps


def test_an_empty_chain_takes_no_time() -> None:
    g = Geometry.of_blocks([[True, True], [False, False], [True, False]])
    for schedule in (Ascending(g, 3), Descending(g, 1)):
        found = simulate(GroupedPlan(schedule, 2, 1), compute_ns=2, reduce_ns=1, sync_ns=0, resident=1)
        assert len(found.steps) == 6
        assert [j for w in range(schedule.roles) for _, j in GroupedPlan(schedule, 2, 1).tasks(w)].count(1) == 2
    causal = Geometry(4, 8, 1, 2, "causal")  # KV tiles 2 and 3 see no Q tile
    assert simulate(GroupedPlan(Symmetric(causal, 2), 1, 1), compute_ns=1, reduce_ns=0, sync_ns=0).makespan_ns == 4


def test_on_windows_ascending_is_the_wrong_order() -> None:
    g = Geometry(64, 64, 1, 2, "causal", window=16)
    costs = {"compute_ns": 800, "reduce_ns": 200, "sync_ns": 550}
    ascending, descending = (simulate(GroupedPlan(order(g, 16), 4, 1), **costs).makespan_ns for order in (Ascending, Descending))
    assert descending <= 0.6 * ascending
