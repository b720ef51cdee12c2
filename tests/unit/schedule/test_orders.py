from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.schedules.explicit import Explicit
from benchmarks.schedules.steps import unroll
from dash_inductor.schedule import Ascending, Descending, Geometry, GroupedPlan, Order, Shift, Symmetric, make_order

from .positions import as_python
from .strategies import block_masks, geometries, schedules, triangles

CAUSAL = Geometry(6, 6, 1, 2, "causal")
FULL = Geometry(6, 6, 1, 2, "full")
KERNELS = as_python("positions.py")


def clocks_of(s: Order) -> dict[tuple[int, int], int]:
    """Virtual time of every (Q tile, chain), as each family defines it."""
    if isinstance(s, Explicit):
        return {(i, j): clock for j, steps in enumerate(s.steps) for i, clock in steps}
    n_q, clocks = s.geometry.n_q, {}
    if not isinstance(s, Ascending | Descending | Shift):  # the step on the worker, under symmetric through both chains of a pair
        pairs = [list(s.steps_of(u)) for u in range(s.units)]
        width = max(map(len, pairs))  # the same start of a pass for every role
        return {step: s.pass_and_role(u)[0] * width + t for u, steps in enumerate(pairs) for t, step in enumerate(steps)}
    for j in range(s.geometry.n_kv):
        p, a = s.pass_and_role(j)
        for i in s.geometry.tiles(j):  # the roles of a pass sweep them together; under shift, each from a place of its own
            at = (i - s.stride * a) % n_q if isinstance(s, Shift) else n_q - 1 - i if isinstance(s, Descending) else i
            clocks[i, j] = p * n_q + at
    return clocks


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
    clocks = clocks_of(s)
    for i in range(s.geometry.n_q):
        line = sorted(s.geometry.contributors(i), key=lambda j: (clocks[i, j], s.pass_and_role(j)[1]))
        assert [s.rank(i, j) for j in line] == list(range(len(line)))


@given(schedules())
def test_the_clock_increases_along_every_role(s: Order) -> None:
    """With the test above: no schedule has a cycle."""
    clocks = clocks_of(s)
    for a in range(s.roles):
        of_role = [clocks[i, j] for row in s.slots if (j := row[a]) >= 0 for i in s.visits(j)]
        assert of_role == sorted(set(of_role))


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


@given(schedules("shift"), st.integers(1, 9))
def test_shift_step_is_order_and_rank(s: Shift, first_pass_roles: int) -> None:
    g, s = s.geometry, replace(s, first_pass_roles=min(first_pass_roles, s.roles))
    for j in range(g.n_kv):
        part = s.parts[s.pass_and_role(j)[0]]
        steps = [KERNELS.shift_step(j, t, g.n_q, s.stride, part[0], len(part)) for t in range(g.n_q)]
        assert steps == list(zip(s.visits(j), s.ranks(j), strict=True))


@given(triangles(), st.data())
def test_symmetric_step_is_order_and_rank(g: Geometry, data: st.DataObject) -> None:
    roles = data.draw(st.integers(1, -(-g.n_kv // 2)))
    s = Symmetric(g, roles, first_pass_roles=data.draw(st.integers(1, roles)))
    for j in range(g.n_kv):
        part = s.parts[s.pass_and_role(j)[0]]
        steps = [KERNELS.symmetric_step(j, t, g.n_q, g.n_kv, g.ratio, part[0], len(part)) for t in range(g.steps(j))]
        assert steps == list(zip(s.visits(j), s.ranks(j), strict=True))
