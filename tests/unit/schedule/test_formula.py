from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dash_inductor.schedule import FAMILIES, TABLE, Ascending, Descending, Geometry, Plan, Shift, Symmetric, formula, make, simulate

from .strategies import plans

CAUSAL = Geometry(8, 8, 1, 2, "causal_top_left")
FULL = Geometry(8, 4, 1, 1, "full")


@pytest.mark.parametrize("family", [*FAMILIES, TABLE])
@given(data=st.data(), step=st.integers(1, 20), most=st.sampled_from([1, 4]))
def test_a_formula_is_exact_or_a_bound_as_it_says(family: str, data: st.DataObject, step: int, most: int) -> None:
    plan = data.draw(plans(family))
    hop = data.draw(st.integers(0, most * step * plan.group))
    found = formula(plan, step_ns=step, hop_ns=hop)
    reduce = min(step, hop) // 2
    if found is not None:
        simulated = simulate(plan, compute_ns=step - reduce, reduce_ns=reduce, sync_ns=hop - reduce).makespan_ns
        assert found.ns == simulated if found.exact else found.ns >= simulated
    assert found is None or family != TABLE


def test_where_formulas_hold() -> None:
    def exact(schedule, hop_ns: int) -> bool | None:
        found = formula(Plan(schedule, 2, 1), step_ns=10, hop_ns=hop_ns)
        return None if found is None else found.exact

    assert exact(Ascending(FULL, 2), 99) and exact(Ascending(FULL, 3), 99) is False
    assert exact(Shift(FULL, 4), 20) and exact(Shift(FULL, 4), 21) is None
    assert exact(Shift(FULL, 4, 1), 10) and exact(Shift(FULL, 4, 1), 11) is None
    assert exact(Symmetric(CAUSAL, 2), 10) and exact(Symmetric(CAUSAL, 2), 11) is False
    assert exact(Descending(CAUSAL, 2, True), 99) and exact(Descending(CAUSAL, 3, True), 99) is False
    assert exact(Descending(CAUSAL, 2), 20) is None and exact(Ascending(CAUSAL, 2), 0) is None
    assert exact(make("ascending", Geometry.of_blocks([[True], [True]]), 1), 99)
    assert exact(make("table", FULL, 1), 0) is None
