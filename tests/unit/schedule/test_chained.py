from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.schedules.simulator import simulate
from dash_inductor.schedule import Ascending, Geometry, GroupedPlan, Plan, RoundRobinPlan, make_order
from dash_inductor.schedule.formulas.chained import monotone_makespan

from .strategies import geometries

FULL = Geometry(6, 6, 1, 2, "full")


@st.composite
def monotone(draw: st.DrawFn) -> tuple[Plan, int | None]:
    """A plan that the recursion covers, and with how many CTAs its tickets are taken, None for a static placement."""
    family = draw(st.sampled_from(["ascending", "descending"]))
    g = draw(geometries(window=None if family == "ascending" else False))
    heads, group = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    how = draw(st.sampled_from(["grouped", "tickets", "round robin"]))
    if how == "round robin":
        return RoundRobinPlan(make_order(family, g, g.n_kv), heads, draw(st.integers(1, 12)), group), None
    roles = g.n_kv if how == "tickets" else draw(st.integers(1, g.n_kv))
    schedule = make_order(family, g, roles, mirrored=draw(st.booleans()))
    if how == "tickets":
        return GroupedPlan(schedule, heads, heads, group), draw(st.integers(1, 9))
    return GroupedPlan(schedule, heads, draw(st.integers(1, heads)), group), None


@given(monotone(), st.integers(0, 9), st.integers(0, 30), st.sampled_from([0, 5, 100]))
def test_the_recursion_is_the_simulation(case: tuple[Plan, int | None], step: int, hop: int, chain: int) -> None:
    plan, resident = case
    g = plan.order_of(0).geometry
    if not all(map(g.steps, range(g.n_kv))):  # the simulator has no place for a chain without steps
        chain = 0
    reduce = min(step, hop) // 2
    costs = {"compute_ns": step - reduce, "reduce_ns": reduce, "sync_ns": hop - reduce, "chain_ns": chain}
    found = simulate(plan, **costs, resident=resident)
    assert monotone_makespan(plan, step_ns=step, hop_ns=hop, chain_ns=chain, resident=resident) == found.makespan_ns


def test_many_q_tiles() -> None:
    s = Ascending(Geometry(65536, 128, 1, 1, "full"), 128)
    assert monotone_makespan(GroupedPlan(s, 16, 1), step_ns=10, hop_ns=7) == 16 * 655360 + 127 * 7
