from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dash_inductor.schedule import Ascending, Geometry, GroupedPlan, Plan, RoundRobinPlan, Shift, make_order, simulate
from dash_inductor.schedule.formulas.chained import monotone_makespan

from .strategies import block_masks, geometries

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


@given(monotone(), st.integers(0, 9), st.integers(0, 30))
def test_the_recursion_is_the_simulation(case: tuple[Plan, int | None], step: int, hop: int) -> None:
    plan, resident = case
    reduce = min(step, hop) // 2
    found = simulate(plan, compute_ns=step - reduce, reduce_ns=reduce, sync_ns=hop - reduce, resident=resident)
    assert monotone_makespan(plan, step_ns=step, hop_ns=hop, resident=resident) == found.makespan_ns


def test_its_cost_does_not_grow_with_the_q_tiles() -> None:
    s = Ascending(Geometry(65536, 128, 1, 1, "full"), 128)
    start = time.process_time()
    assert monotone_makespan(GroupedPlan(s, 16, 1), step_ns=10, hop_ns=7) == 16 * 655360 + 127 * 7
    assert time.process_time() - start < 0.2


@given(block_masks())
def test_block_masks_are_refused(g: Geometry) -> None:
    with pytest.raises(ValueError, match="no recursion for family 'ascending' with mask='blocks'"):
        monotone_makespan(GroupedPlan(Ascending(g, 1), 1, 1), step_ns=1, hop_ns=1)


@pytest.mark.parametrize(
    ("plan", "change", "message"),
    [
        (GroupedPlan(Shift(FULL, 3), 1, 1), {}, "no recursion for family 'shift' with mask='full', window=None"),
        (
            GroupedPlan(make_order("descending", Geometry(6, 6, 1, 2, "causal", window=2), 1), 1, 1),
            {},
            "no recursion for family 'descending' with mask='causal', window=2",
        ),
        (GroupedPlan(Ascending(FULL, 2), 1, 1), {"resident": 2}, "resident needs a plan with a worker per chain"),
        (GroupedPlan(Ascending(FULL, 3), 1, 1), {"resident": 0}, "resident must be a positive int, got 0"),
        (GroupedPlan(Ascending(FULL, 3), 1, 1), {"step_ns": 0.5}, "step_ns must be an int of at least 0, got 0.5"),
        (GroupedPlan(Ascending(FULL, 3), 1, 1), {"hop_ns": -1}, "hop_ns must be an int of at least 0, got -1"),
    ],
)
def test_what_it_does_not_cover_is_said(plan: GroupedPlan, change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        monotone_makespan(plan, **({"step_ns": 1, "hop_ns": 1} | change))
