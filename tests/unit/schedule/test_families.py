from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dash_inductor.schedule import Geometry, Schedule, Shift, Symmetric, make, slack
from dash_inductor.schedule.closed_forms import shift_step, symmetric_step
from dash_inductor.schedule.families import FAMILIES

from .strategies import schedules, triangles

EXAMPLES = settings(max_examples=100, deadline=None)
CAUSAL = Geometry(6, 6, 1, 2, "causal_top_left")
FULL = Geometry(6, 6, 1, 2, "full")


@EXAMPLES
@given(schedules())
def test_order_and_rank_are_permutations(s: Schedule) -> None:
    g = s.geometry
    for j in range(g.n_kv):
        assert sorted(s.order(j)) == list(range(g.lo(j), g.hi(j)))
    for i in range(g.n_q):
        assert sorted(s.rank(i, j) for j in g.contributors(i)) == list(range(len(g.contributors(i))))


@EXAMPLES
@given(schedules())
def test_rank_is_the_order_of_clock_then_role(s: Schedule) -> None:
    """The definition; the families themselves compute rank in closed form where they have one."""
    for i in range(s.geometry.n_q):
        line = sorted(s.geometry.contributors(i), key=lambda j: (s.clock(i, j), s.place(j)[1]))
        assert [s.rank(i, j) for j in line] == list(range(len(line)))


@EXAMPLES
@given(schedules())
def test_the_clock_increases_along_every_role(s: Schedule) -> None:
    """With the test above: no schedule has a cycle."""
    for a in range(s.roles):
        clocks = [s.clock(i, j) for row in s.slots if (j := row[a]) >= 0 for i in s.order(j)]
        assert clocks == sorted(set(clocks))


@EXAMPLES
@given(schedules())
def test_slots_hold_every_chain_once_at_its_place(s: Schedule) -> None:
    assert sorted(j for row in s.slots for j in row if j >= 0) == list(range(s.geometry.n_kv))
    per_pass = len(s.slots) // s.passes
    assert per_pass * s.passes == len(s.slots)
    for slot, row in enumerate(s.slots):
        assert len(row) == s.roles
        assert all(s.place(j) == (slot // per_pass, a) for a, j in enumerate(row) if j >= 0)


@EXAMPLES
@given(schedules("shift"))
def test_shift_has_its_stride_as_slack(s: Shift) -> None:
    found = slack(s)
    assert found is None or found >= s.stride
    if s.passes == 1 and s.roles > 1:
        assert found == s.stride


@EXAMPLES
@given(triangles(), st.data())
def test_symmetric_has_slack_on_a_triangle(g: Geometry, data: st.DataObject) -> None:
    found = slack(Symmetric(g, data.draw(st.integers(1, -(-g.n_kv // 2)))))
    assert found is None or found >= 1


@EXAMPLES
@given(schedules("shift"))
def test_shift_step_is_order_and_rank_by_the_clock(s: Shift) -> None:
    g = s.geometry
    lines = [sorted(range(g.n_kv), key=lambda j, i=i: (s.clock(i, j), s.place(j)[1])) for i in range(g.n_q)]
    for j in range(g.n_kv):
        steps = [shift_step(j, t, g.n_q, g.n_kv, s.roles, s.stride) for t in range(g.n_q)]
        assert steps == [(i, lines[i].index(j)) for i in s.order(j)]


@EXAMPLES
@given(triangles(), st.data())
def test_symmetric_step_is_order_and_rank_by_the_clock(g: Geometry, data: st.DataObject) -> None:
    s = Symmetric(g, data.draw(st.integers(1, -(-g.n_kv // 2))))
    ranks = s.ranks_by_clock()
    for j in range(g.n_kv):
        steps = [symmetric_step(j, t, g.n_q, g.n_kv, g.ratio, s.roles) for t in range(g.steps(j))]
        assert steps == [(i, ranks[i, j]) for i in s.order(j)]


@pytest.mark.parametrize(
    ("family", "geometry", "roles", "kwargs", "message"),
    [
        ("ascending", FULL, 0, {}, "roles must be in 1..3 (one per KV tile at most), got 0"),
        ("descending", CAUSAL, 4, {}, "roles must be in 1..3 (one per KV tile at most), got 4"),
        ("symmetric", CAUSAL, 3, {}, "roles must be in 1..2 (one per pair of KV tiles at most), got 3"),
        ("symmetric", FULL, 1, {}, "symmetric needs a causal mask"),
        ("shift", CAUSAL, 1, {}, "shift needs mask='full'"),
        ("shift", Geometry(2, 6, 1, 2, "full"), 3, {}, "roles must be at most the 2 Q tiles for shift, got 3"),
        ("shift", FULL, 3, {"stride": 3}, "stride must be in 1..2 (n_q // roles), got 3"),
        ("ascending", FULL, 1, {"stride": 2}, "stride is for shift, not for ascending"),
        ("shift", FULL, 1, {"boustrophedon": True}, "boustrophedon is for descending, not for shift"),
        ("zigzag", FULL, 1, {}, "family must be one of ascending, descending, shift, symmetric, got 'zigzag'"),
    ],
)
def test_what_a_family_cannot_do_is_said(
    family: str, geometry: Geometry, roles: int, kwargs: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make(family, geometry, roles, **kwargs)


def test_make_returns_the_named_family() -> None:
    for family in FAMILIES:
        assert make(family, FULL if family == "shift" else CAUSAL, 1).name == family
