from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.schedules.bounds import lower_bound
from benchmarks.schedules.simulator import simulate
from dash_inductor.schedule import Ascending, Geometry, GroupedPlan, Plan, Shift

from .strategies import plans, schedules


@given(plans(), st.integers(1, 9), st.integers(0, 30), st.booleans())
def test_nothing_is_faster(plan: Plan, step: int, hop: int, overlap: bool) -> None:
    g, reduce = plan.order.geometry, min(step, hop) // 2
    bound = lower_bound(g, heads=plan.heads, workers=plan.workers, step_ns=step * plan.group, hop_ns=hop)
    costs = {"compute_ns": step if overlap else step - reduce, "reduce_ns": reduce, "sync_ns": hop - reduce}
    found = simulate(plan, **costs, overlap=overlap).makespan_ns
    assert found >= bound + (reduce if overlap else 0)


@given(schedules(), st.integers(1, 4), st.integers(1, 9))
def test_every_part_is_the_definition(schedule, heads: int, workers: int) -> None:
    """The packing written out: of the workers * m + 1 longest chains some worker gets m + 1."""
    g = schedule.geometry
    lengths = sorted((g.steps(j) for j in range(g.n_kv) for _ in range(heads)), reverse=True)
    packing = max(sum(lengths[workers * m - m : workers * m + 1]) for m in range((len(lengths) - 1) // workers + 1))
    work = -(-sum(lengths) // workers)
    busiest = max(sum(i in g.tiles(j) for j in range(g.n_kv)) for i in range(g.n_q))
    for step, hop in ((10, 4), (10, 40), (1, 0)):
        found = lower_bound(g, heads=heads, workers=workers, step_ns=step, hop_ns=hop)
        assert found == max(packing * step, work * step, step + (busiest - 1) * min(step, hop))


def test_what_decides() -> None:
    square = Geometry(4, 8, 1, 1, "full")  # 8 chains of 4 steps, 8 parts to a Q tile
    assert lower_bound(square, heads=1, workers=1, step_ns=10, hop_ns=9) == 320  # work
    assert lower_bound(square, heads=1, workers=7, step_ns=10, hop_ns=9) == 80  # two chains on one of seven workers
    assert lower_bound(square, heads=1, workers=8, step_ns=10, hop_ns=9) == 10 + 7 * 9  # a Q tile
    assert lower_bound(square, heads=1, workers=8, step_ns=10, hop_ns=99) == 80  # at least a step between parts


def test_shift_reaches_it() -> None:
    plan = GroupedPlan(Shift(Geometry(8, 4, 1, 1, "full"), 4), 6, 2)
    assert simulate(plan, compute_ns=7, reduce_ns=3, sync_ns=10).makespan_ns == 240
    assert lower_bound(plan.order.geometry, heads=6, workers=8, step_ns=10, hop_ns=13) == 240
    ascending = GroupedPlan(Ascending(Geometry(8, 4, 1, 1, "full"), 4), 6, 2)
    assert simulate(ascending, compute_ns=7, reduce_ns=3, sync_ns=10).makespan_ns == 279
