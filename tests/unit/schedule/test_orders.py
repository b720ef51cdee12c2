from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from dash_inductor.schedule import FAMILIES, SEARCHED, Geometry, GroupedPlan, Order, Shift, Symmetric, make_order, slack, unroll

from .positions import shift_step, symmetric_step
from .strategies import block_masks, geometries, schedules, triangles

CAUSAL = Geometry(6, 6, 1, 2, "causal")
FULL = Geometry(6, 6, 1, 2, "full")


@given(schedules())
def test_order_and_rank_are_permutations(s: Order) -> None:
    g = s.geometry
    for j in range(g.n_kv):
        assert sorted(s.visits(j)) == list(g.tiles(j))
        assert s.ranks(j) == tuple(s.rank(i, j) for i in s.visits(j))
    for i in range(g.n_q):
        assert sorted(s.rank(i, j) for j in g.contributors(i)) == list(range(len(g.contributors(i))))


@given(schedules())
def test_rank_is_the_order_of_clock_then_role(s: Order) -> None:
    """The definition; the families themselves go through the steps in that order."""
    for i in range(s.geometry.n_q):
        line = sorted(s.geometry.contributors(i), key=lambda j: (s.clock(i, j), s.pass_and_role(j)[1]))
        assert [s.rank(i, j) for j in line] == list(range(len(line)))


@given(schedules())
def test_the_clock_increases_along_every_role(s: Order) -> None:
    """With the test above: no schedule has a cycle."""
    for a in range(s.roles):
        clocks = [s.clock(i, j) for row in s.slots if (j := row[a]) >= 0 for i in s.visits(j)]
        assert clocks == sorted(set(clocks))


@given(schedules())
def test_slots_hold_every_chain_once_at_its_place(s: Order) -> None:
    assert sorted(j for row in s.slots for j in row if j >= 0) == list(range(s.geometry.n_kv))
    per_pass = len(s.slots) // s.passes
    assert per_pass * s.passes == len(s.slots)
    for slot, row in enumerate(s.slots):
        assert len(row) == s.roles
        assert all(s.pass_and_role(j) == (slot // per_pass, a) for a, j in enumerate(row) if j >= 0)


@given(geometries() | block_masks(), st.data())
def test_bits_of_monotone_families_do_not_change_with_roles_heads_in_flight_or_placement(g: Geometry, data: st.DataObject) -> None:
    """The order of every sum: of dq by rank, of dk and dv along a chain."""
    for family, upwards in (("ascending", True), ("descending", False)):
        sums = set()
        for roles in {1, g.n_kv, data.draw(st.integers(1, g.n_kv))}:
            for mirrored in (False, True):
                s = make_order(family, g, roles, mirrored=mirrored)
                dq = {(i, s.rank(i, j)): j for j in range(g.n_kv) for i in g.tiles(j)}
                assert all(dq[i, rank] == j for i in range(g.n_q) for rank, j in enumerate(g.contributors(i)))
                assert all(list(s.visits(j)) == sorted(g.tiles(j), reverse=not upwards) for j in range(g.n_kv))
                sums.add((tuple(dq.items()), tuple(s.visits(j) for j in range(g.n_kv))))
                for in_flight in (1, 3):  # what the kernels read is the same wherever it is placed
                    steps = unroll(GroupedPlan(s, 3, in_flight, 2))
                    read = {steps[index] for index in range(len(steps))}
                    assert read == {(x, j, i, rank) for x in range(6) for (i, rank), j in dq.items()}
        assert len(sums) == 1


@given(schedules("shift"))
def test_shift_has_its_stride_as_slack(s: Shift) -> None:
    found = slack(s)
    assert found is None or found >= s.stride
    if s.passes == 1 and s.roles > 1:
        assert found == s.stride


@given(triangles(), st.data())
def test_symmetric_has_slack_on_a_triangle(g: Geometry, data: st.DataObject) -> None:
    found = slack(Symmetric(g, data.draw(st.integers(1, -(-g.n_kv // 2)))))
    assert found is None or found >= 1


@given(geometries(("full",)), st.sampled_from(["ascending", "descending"]), st.integers(2, 9))
def test_monotone_has_no_slack_on_the_full_mask(g: Geometry, family: str, roles: int) -> None:
    assert slack(make_order(family, g, min(roles, g.n_kv))) == (0 if g.n_kv > 1 else None)


@given(schedules("shift"), st.integers(1, 9))
def test_shift_step_is_order_and_rank(s: Shift, first_pass_roles: int) -> None:
    g, s = s.geometry, replace(s, first_pass_roles=min(first_pass_roles, s.roles))
    for j in range(g.n_kv):
        part = s.parts[s.pass_and_role(j)[0]]
        steps = [shift_step(j, t, g.n_q, s.stride, part[0], len(part)) for t in range(g.n_q)]
        assert steps == list(zip(s.visits(j), s.ranks(j), strict=True))


@given(triangles(), st.data())
def test_symmetric_step_is_order_and_rank(g: Geometry, data: st.DataObject) -> None:
    roles = data.draw(st.integers(1, -(-g.n_kv // 2)))
    s = Symmetric(g, roles, first_pass_roles=data.draw(st.integers(1, roles)))
    for j in range(g.n_kv):
        part = s.parts[s.pass_and_role(j)[0]]
        steps = [symmetric_step(j, t, g.n_q, g.n_kv, g.ratio, part[0], len(part)) for t in range(g.steps(j))]
        assert steps == list(zip(s.visits(j), s.ranks(j), strict=True))


def test_make_returns_the_named_family() -> None:
    for family in (*FAMILIES, SEARCHED):
        assert make_order(family, FULL if family == "shift" else CAUSAL, 1).name == family
