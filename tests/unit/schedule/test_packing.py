from __future__ import annotations

import pytest
from hypothesis import assume, given

from dash_inductor.schedule import Ascending, Geometry, GroupedPlan, Plan, pack, place_heads
from dash_inductor.schedule.packing import (
    MAX_N_KV,
    MAX_N_Q,
    MOST_CONSTANT_INTS,
    is_too_large,
    may_share_row,
    most_ints,
    pack_shared,
    schedule_ints,
    table_ints,
)

from .strategies import plans, round_robin


@given(plans())
def test_the_table_tells_what_the_schedule_says(plan: GroupedPlan) -> None:
    """Read as the kernel reads it."""
    s, g = plan.order, plan.order.geometry
    table = pack(s, plan.heads_in_flight)
    roles, in_flight, slots, mirrored, n_kv, steps = table[:6]
    assert (roles, in_flight, mirrored, n_kv) == (s.roles, plan.heads_in_flight, int(s.mirrored), g.n_kv)
    assert table[6:8] == [0, s.geometry.kv_len]
    assert slots == len(s.slots)
    chains = 8
    lengths = chains + slots * roles
    rows = lengths + n_kv
    assert [tuple(table[chains + slot * roles : chains + (slot + 1) * roles]) for slot in range(slots)] == list(s.slots)
    for j in range(n_kv):
        length = table[lengths + j]
        row = table[rows + j * steps : rows + (j + 1) * steps]
        assert [(e & 0xFFFF, e >> 16) for e in row[:length]] == [(i, s.rank(i, j)) for i in s.visits(j)]
        assert row[length:] == [0] * (steps - length)
    assert len(table) == rows + n_kv * steps == table_ints(plan)
    assert steps == max(1, *(g.steps(j) for j in range(n_kv)))
    if s.name != "explicit":
        assert len(table) <= most_ints(g.n_q, g.n_kv)
    assert all(-1 <= entry < 2**31 for entry in table)


def test_the_largest_rank_and_tile_fit_an_int32() -> None:
    assert (65534 | 32766 << 16) < 2**31
    assert pack(Ascending(Geometry(1, 32767, 1, 1, "full"), 1), 1)[-1] == 32766 << 16


@given(plans() | plans("ascending") | plans("descending"))
def test_one_row_says_of_each_chain_what_its_own_would(plan: GroupedPlan) -> None:
    """Read as the kernel reads it: chain j begins j * [5] entries into the row, and its rank is j."""
    assume(may_share_row(plan))
    order, g = plan.order, plan.order.geometry
    own, shared = pack(order, plan.heads_in_flight), pack_shared(plan)
    rows = 8 + own[2] * own[0] + g.n_kv
    assert shared[:5] + shared[6:rows] == own[:5] + own[6:rows] and len(shared) == rows + g.n_q == table_ints(plan, shared_row=True)
    for j in range(g.n_kv):
        begin = rows + j * shared[5]
        row = shared[begin : begin + g.steps(j)]
        assert [(i, j) for i in row] == list(zip(order.visits(j), order.ranks(j), strict=True))


@given(plans("shift") | plans("symmetric") | plans("explicit") | round_robin())
def test_others_have_rows_of_their_own(plan: Plan) -> None:
    assert not may_share_row(plan)


def of_tiles(family: str, n_q: int, n_kv: int) -> Plan:
    return place_heads(family, Geometry(n_q, n_kv, 1, 1, "full"), 4, heads=1, heads_in_flight=1)


@pytest.mark.parametrize("family", ["ascending", "shift"])
def test_from_the_limit_on_a_table_is_no_constant(family: str) -> None:
    """Behind 8 ints and those of the chains. A family whose ranks differ along a chain keeps its rows."""
    n_kv = 1024
    n_q = (MOST_CONSTANT_INTS - 8) // n_kv - 2
    fits, larger = of_tiles(family, n_q, n_kv), of_tiles(family, n_q + 1, n_kv)
    assert table_ints(fits) == schedule_ints(fits) == 8 + (n_q + 2) * n_kv <= MOST_CONSTANT_INTS < table_ints(larger)
    assert not is_too_large(fits) and is_too_large(larger)
    assert schedule_ints(larger) == (8 + 2 * n_kv + n_q + 1 if family == "ascending" else table_ints(larger))


def test_an_index_of_the_largest_table_fits_32_bits() -> None:
    """The kernel that writes one has programs of 1,024 ints."""
    assert most_ints(MAX_N_Q, MAX_N_KV) + 1024 < 2**31


def test_a_round_robin_is_never_too_large() -> None:
    """Its table is a header, and its rows are the workers'."""
    assert not is_too_large(of_tiles("shift_round_robin", 4096, 4096))
