from __future__ import annotations

from hypothesis import given

from dash_inductor.schedule import Ascending, Geometry, GroupedPlan, pack
from dash_inductor.schedule.packing import most_ints, table_ints

from .strategies import plans


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
