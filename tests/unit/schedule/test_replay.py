from __future__ import annotations

from dataclasses import dataclass

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dash_inductor.schedule import (
    Ascending,
    Descending,
    Geometry,
    Plan,
    ScheduleError,
    Shift,
    check,
    replay,
    slack,
)

from .strategies import geometries, plans

FULL = Geometry(6, 6, 1, 2, "full")


def longest_path(plan: Plan, compute_ns: int, reduce_ns: int, sync_ns: int) -> int:
    """Makespan as the longest path of the DAG of reductions, edges weighted by the time from end to end."""
    s, dag = plan.schedule, nx.DiGraph()
    author: dict[tuple[int, int, int, int], int] = {}  # (head, g, i, rank) -> worker
    for worker in range(plan.workers):
        before: object = "start"
        for head, j in plan.tasks(worker):
            for i in s.order(j):
                for g in range(plan.group):
                    node = (head, g, i, s.rank(i, j))
                    author[node] = worker
                    dag.add_edge(before, node, weight=compute_ns + reduce_ns)
                    before = node
    for node, worker in author.items():
        head, g, i, rank = node
        if rank and author[head, g, i, rank - 1] != worker:
            dag.add_edge((head, g, i, rank - 1), node, weight=sync_ns + reduce_ns)
    return nx.dag_longest_path_length(dag)


@settings(max_examples=100, deadline=None)
@given(plans(), st.integers(0, 9), st.integers(0, 9), st.integers(0, 25))
def test_replay_is_the_longest_path(plan: Plan, compute_ns: int, reduce_ns: int, sync_ns: int) -> None:
    found = replay(plan, compute_ns=compute_ns, reduce_ns=reduce_ns, sync_ns=sync_ns)
    assert found.makespan_ns == longest_path(plan, compute_ns, reduce_ns, sync_ns)
    assert found.steps == plan.steps
    assert found.busy_ns == plan.steps * (compute_ns + reduce_ns)


def test_waits_are_counted() -> None:
    found = replay(Plan(Ascending(FULL, 3), 1, 1), compute_ns=10, reduce_ns=0, sync_ns=4)
    # Chain 1 waits 4 ns for chain 0 once, chain 2 waits 8 ns; after that both are late enough.
    assert (found.makespan_ns, found.waits, found.wait_ns) == (68, 2, 12)
    assert found.utilization == 180 / (3 * 68)


@settings(max_examples=100, deadline=None)
@given(plans(), st.integers(1, 9))
def test_a_schedule_does_not_stall_within_its_slack(plan: Plan, tau: int) -> None:
    """Clock times tau bounds every step of the first head round, while a hop takes at most slack steps."""
    s = plan.schedule
    room = slack(s)
    one = Plan(s, 1, 1, plan.group)
    found = replay(one, compute_ns=tau, reduce_ns=0, sync_ns=(room or 0) * tau * plan.group)
    last = max((s.clock(i, j) for j in range(s.geometry.n_kv) for i in s.order(j)), default=-1)
    assert found.makespan_ns <= (last + 1) * tau * plan.group


@settings(max_examples=100, deadline=None)
@given(plans())
def test_every_family_passes_the_checks(plan: Plan) -> None:
    check(plan, resident=plan.residency)


def test_too_few_resident_ctas_are_refused() -> None:
    with pytest.raises(ScheduleError, match="shift needs 3 CTAs resident together, there are 2"):
        check(Plan(Shift(FULL, 3), 2, 1), resident=2)


@dataclass(frozen=True)
class Reversed(Descending):
    """Adds in the reverse order of chains: with fewer roles than chains, a role waits for its own next pass."""

    def rank(self, i: int, j: int) -> int:
        return len(self.geometry.contributors(i)) - 1 - j


@dataclass(frozen=True)
class Crossed(Ascending):
    """Chains 0 and 1 want each other's first tile first."""

    def rank(self, i: int, j: int) -> int:
        return {0: 1, 1: 0}.get(j, j) if i == 0 else j

    def order(self, j: int) -> tuple[int, ...]:
        return tuple(range(6)) if j == 0 else (5, 4, 3, 2, 1, 0)


@dataclass(frozen=True)
class Doubled(Ascending):
    """Two chains of the same rank."""

    def rank(self, i: int, j: int) -> int:
        return min(j, 1)


@dataclass(frozen=True)
class Short(Ascending):
    """Leaves out a tile."""

    def order(self, j: int) -> tuple[int, ...]:
        return super().order(j)[1:] if j == 1 else super().order(j)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (Reversed(FULL, 1), r"deadlock: worker 0 at .*chain 0\) waits for .*chain 2\), which is later on worker 0"),
        (
            Crossed(FULL, 2),
            r"deadlock: worker 0 at .*Q tile 0, chain 0.* waits .*chain 1\); worker 1 .*, which is later on worker 0",
        ),
        (Doubled(FULL, 3), r"Q tile 0 has ranks \[0, 1, 1\], not a permutation of 0..2"),
        (Short(FULL, 3), r"chain 1 visits \(1, 2, 3, 4, 5\), not each of 0..5 once"),
    ],
)
def test_a_broken_schedule_is_named(schedule: Ascending, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check(Plan(schedule, 2, 1))


def test_replay_names_a_rank_that_never_comes() -> None:
    with pytest.raises(ScheduleError, match=r"deadlock: .*rank 1, which does not come: 2 are added"):
        replay(Plan(Doubled(FULL, 3), 1, 1), compute_ns=1, reduce_ns=1, sync_ns=1)
    with pytest.raises(ScheduleError, match=r"which its worker 1 never visits"):
        replay(Plan(Short(FULL, 3), 1, 1), compute_ns=1, reduce_ns=1, sync_ns=1)


@given(geometries("full"), st.sampled_from([Ascending, Descending]), st.integers(2, 9))
def test_mono_has_no_slack_on_the_full_mask(g: Geometry, family: type[Ascending] | type[Descending], roles: int) -> None:
    assert slack(family(g, min(roles, g.n_kv))) == (0 if g.n_kv > 1 else None)
