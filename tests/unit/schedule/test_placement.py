from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.schedules.simulator import simulate
from dash_inductor.schedule import Ascending, Descending, Geometry, GroupedPlan, RoundRobinPlan, Shift, Symmetric

from .strategies import plans, residency, round_robin

FULL = Geometry(6, 6, 1, 2, "full")


@given(plans())
def test_every_chain_of_every_head_is_placed_once(plan: GroupedPlan) -> None:
    tasks = [task for worker in range(plan.workers) for task in plan.tasks(worker)]
    assert sorted(tasks) == [(x, j) for x in range(plan.heads) for j in range(plan.order.geometry.n_kv)]


@given(st.one_of(plans("descending"), plans()))
def test_a_head_stays_in_its_slot_and_turns_mirror(plan: GroupedPlan) -> None:
    s = plan.order
    for worker in range(plan.workers):
        for head, j in plan.tasks(worker):
            p, a = s.pass_and_role(j)
            if s.mirrored and ((head // plan.heads_in_flight) * s.passes + p) % 2:
                a = s.roles - 1 - a
            assert worker == head % plan.heads_in_flight * s.roles + a


@pytest.mark.parametrize(
    ("plan", "ctas", "least"),
    [
        (GroupedPlan(Ascending(FULL, 3), 4, 4), 1, 1),
        (GroupedPlan(Ascending(FULL, 3), 4, 2), 1, 1),
        (GroupedPlan(Ascending(FULL, 2), 4, 4), 2, 2),
        (GroupedPlan(Descending(FULL, 3, mirrored=True), 4, 4), 3, 1),
        (GroupedPlan(Descending(Geometry(6, 6, 1, 2, "causal"), 3, mirrored=True), 2, 1), 3, 3),
        (GroupedPlan(Shift(FULL, 3), 4, 4), 3, 3),
        (GroupedPlan(Shift(Geometry(128, 128, 1, 1, "full"), 128, 1), 1, 1), 128, 128),  # of DASH's authors: all its CTAs
    ],
)
def test_residency(plan: GroupedPlan, ctas: int, least: int) -> None:
    assert (residency(plan), simulate(plan, compute_ns=1, reduce_ns=0, sync_ns=0).residency) == (ctas, least)


@given(round_robin())
def test_round_robin_deals_units_in_turn(plan: RoundRobinPlan) -> None:
    s = plan.order
    units = []
    for head in range(plan.heads):
        for p in range(s.passes):
            for a in range(s.roles):
                chains = [j for j in range(s.geometry.n_kv) if s.pass_and_role(j) == (p, a)]
                units += [[(head, j) for j in sorted(chains, key=lambda j: [j in row for row in s.slots].index(True))]]
    units = [unit for unit in units if unit]
    for worker in range(plan.workers):
        assert list(plan.tasks(worker)) == [task for unit in units[worker :: plan.workers] for task in unit]


def test_heads_that_straddle_rounds_begin_with_a_smaller_pass() -> None:
    plan = RoundRobinPlan(Shift(Geometry(6, 5, 1, 1, "full"), 5), heads=3, workers=7)
    assert [plan.order_of(head).parts for head in range(3)] == [(range(5),), (range(2), range(2, 5)), (range(4), range(4, 5))]
    plan = RoundRobinPlan(Shift(Geometry(6, 5, 1, 1, "full"), 2), heads=2, workers=2)
    assert [plan.order_of(head).parts for head in range(2)] == [
        (range(2), range(2, 4), range(4, 5)),
        (range(1), range(1, 3), range(3, 5)),
    ]
    causal = Geometry(10, 10, 1, 2, "causal")
    plan = RoundRobinPlan(Symmetric(causal, 3), heads=2, workers=4)  # 5 chains in 3 pairs
    assert list(plan.tasks(3)) == [(1, 0), (1, 4)] and plan.order_of(1).parts == (range(1), range(1, 3))


@pytest.mark.parametrize(("n", "lam"), [(16, 20), (16, 75), (16, 150), (24, 75)])
def test_heads_that_straddle_rounds_close_into_a_ring(n: int, lam: int) -> None:
    """Ascending, n x n tiles, P = 132: a round takes (kap * n_q * tau + P * lam) / (kap + 1), kap = P / (n - P mod n)."""
    s, costs = Ascending(Geometry(n, n, 1, 1, "full"), n), {"compute_ns": 100, "reduce_ns": 0, "sync_ns": lam}
    kap = 132 // (n - 132 % n)
    few, many = (simulate(RoundRobinPlan(s, rounds * 132 // n, 132), **costs).makespan_ns for rounds in (kap + 1, 3 * (kap + 1)))
    assert (many - few) / (2 * (kap + 1)) == pytest.approx(max(n * 100, (kap * n * 100 + 132 * lam) / (kap + 1)), rel=0.002)


@given(round_robin("shift") | round_robin("symmetric"))
def test_a_round_robin_needs_all_its_workers(plan: RoundRobinPlan) -> None:
    assert simulate(plan, compute_ns=1, reduce_ns=0, sync_ns=0, resident=residency(plan)).residency <= residency(plan)
