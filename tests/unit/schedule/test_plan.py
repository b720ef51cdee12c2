from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dash_inductor.schedule import Ascending, Descending, Geometry, Plan, Shift

from .strategies import plans

EXAMPLES = settings(max_examples=100, deadline=None)
FULL = Geometry(6, 6, 1, 2, "full")


def ends(plan: Plan, resident: int) -> bool:
    """Whether the plan ends with `resident` CTAs at a time, tickets taken in order. Untimed: who may add, adds."""
    s = plan.schedule
    work = [[(head, i, s.rank(i, j)) for head, j in plan.tasks(worker) for i in s.order(j)] for worker in range(plan.workers)]
    added: dict[tuple[int, int], int] = {}
    position = [0] * plan.workers
    running, ticket = [], 0
    while True:
        while len(running) < resident and ticket < plan.workers:
            running.append(ticket)
            ticket += 1
        moved = False
        for w in running:
            while position[w] < len(work[w]) and added.get(work[w][position[w]][:2], 0) == work[w][position[w]][2]:
                head, i, rank = work[w][position[w]]
                added[head, i] = rank + 1
                position[w] += 1
                moved = True
        left = [w for w in running if position[w] < len(work[w])]
        if not left and ticket == plan.workers:
            return True
        if not moved and len(left) == len(running):
            return False
        running = left


@EXAMPLES
@given(plans())
def test_every_chain_of_every_head_is_placed_once(plan: Plan) -> None:
    tasks = [task for worker in range(plan.workers) for task in plan.tasks(worker)]
    assert sorted(tasks) == [(x, j) for x in range(plan.heads) for j in range(plan.schedule.geometry.n_kv)]


@EXAMPLES
@given(st.one_of(plans("descending"), plans()))
def test_a_head_stays_in_its_slot_and_turns_mirror(plan: Plan) -> None:
    s = plan.schedule
    for worker in range(plan.workers):
        for head, j in plan.tasks(worker):
            p, a = s.place(j)
            if s.boustrophedon and ((head // plan.heads_in_flight) * s.passes + p) % 2:
                a = s.roles - 1 - a
            assert worker == head % plan.heads_in_flight * s.roles + a


@EXAMPLES
@given(plans())
def test_residency_is_enough(plan: Plan) -> None:
    assert ends(plan, plan.residency)


def test_fewer_than_the_residency_can_deadlock() -> None:
    assert not ends(Plan(Shift(FULL, 3), heads=1, heads_in_flight=1), 2)
    boustrophedon = Plan(Descending(Geometry(6, 6, 1, 2, "causal_top_left"), 3, boustrophedon=True), 2, 1)
    assert boustrophedon.residency == 3 and not ends(boustrophedon, 2)


@pytest.mark.parametrize(
    ("plan", "launch", "residency"),
    [
        (Plan(Ascending(FULL, 3), 4, 4), "chained", 1),
        (Plan(Ascending(FULL, 3), 4, 2), "grouped", 1),
        (Plan(Ascending(FULL, 2), 4, 4), "grouped", 2),
        (Plan(Descending(FULL, 3, boustrophedon=True), 4, 4), "grouped", 3),
        (Plan(Shift(FULL, 3), 4, 4), "grouped", 3),
    ],
)
def test_launch_and_residency(plan: Plan, launch: str, residency: int) -> None:
    assert (plan.launch, plan.residency) == (launch, residency)


@pytest.mark.parametrize(
    ("heads", "in_flight", "group", "message"),
    [
        (0, 1, 1, "heads must be at least 1"),
        (2, 3, 1, "heads_in_flight must be in 1..2"),
        (2, 1, 0, "group must be at least 1"),
    ],
)
def test_bad_counts_are_named(heads: int, in_flight: int, group: int, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Plan(Ascending(FULL, 3), heads, in_flight, group)
