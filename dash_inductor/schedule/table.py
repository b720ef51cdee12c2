"""A schedule as the flat int32 table that the kernel reads.

[0] roles  [1] heads in flight  [2] slots  [3] 1 if boustrophedon  [4] n_kv  [5] steps  [6] line  [7] kv_len
slots * roles   chain of (slot, role), row-major by slot, -1 for none
n_kv            number of steps of chain j
n_kv * steps    Q tile | rank << 16 of step t of chain j, 0 past the chain's end

steps is the length of a row: that of the longest chain, at least 1. line is 0; under a round robin it is the number of units of a
head, roles are the workers, slots the chains of a unit, and the header is all there is: a head's order depends on where
in a round it begins, so that the workers compute their rows (templates/positions.py.jinja) as they need them.
"""

from __future__ import annotations

from typing import Any

from .families import Schedule
from .geometry import Geometry
from .plan import Plan, Straddling

HEADER = 8
MAX_N_KV = 32767  # a rank takes the upper half of a signed 32-bit entry
MAX_N_Q = 65535  # a Q tile takes the lower half
STRADDLING_N_Q = 4096  # a worker of a round robin computes its row at once


def most_ints(n_q: Any, n_kv: Any) -> Any:
    """Ints that the table of any closed-form family has at most, whatever its roles; sizes may be symbolic.

    The (slot, role) cells: n_kv + A - 1 at most, and under symmetric twice the pairs plus 2 (A - 1), where A <= pairs.

    >>> most_ints(n_q=6, n_kv=3)
    37
    """
    return HEADER + 2 * (n_kv + 1) + n_kv + n_kv * n_q


def pack_plan(plan: Plan | Straddling) -> list[int]:
    """The table of a plan; ValueError when an entry would not fit, or for a round robin that the workers could not compute.

    >>> from .by_name import place
    >>> from .geometry import Geometry
    >>> pack_plan(place("shift_round_robin", Geometry(6, 6, 1, 2, "full"), 2, heads=2, heads_in_flight=1))
    [2, 1, 1, 0, 3, 6, 3, 6]
    """
    if isinstance(plan, Plan):
        return pack(plan.schedule, plan.heads_in_flight)
    g = plan.schedule.geometry
    _check(g)
    if g.n_q > STRADDLING_N_Q:
        raise ValueError(
            f"q_len {g.q_len} makes {g.n_q} Q tiles of block_m {g.block_m}; {plan.family} takes at most {STRADDLING_N_Q}"
        )
    if plan.schedule.name == "symmetric" and not g.is_triangle:
        raise ValueError(f"symmetric_round_robin needs a triangle: equal lengths and block_n a multiple of block_m, got {g}")
    slots = 2 if plan.schedule.name == "symmetric" else 1
    return [plan.workers, plan.heads_in_flight, slots, 0, g.n_kv, g.steps(0), plan.units, g.kv_len]


def table_ints(plan: Plan | Straddling) -> int:
    """How many ints `pack_plan` gives, without making them."""
    if isinstance(plan, Straddling):
        return HEADER
    schedule, g = plan.schedule, plan.schedule.geometry
    return HEADER + len(schedule.slots) * schedule.roles + g.n_kv * (1 + max(1, *map(g.steps, range(g.n_kv))))


def row_ints(plan: Plan | Straddling) -> int:
    """Ints beside the table for the rows that the workers of a round robin compute."""
    return plan.workers * plan.schedule.geometry.n_q if isinstance(plan, Straddling) else 0


def pack(schedule: Schedule, heads_in_flight: int) -> list[int]:
    """The table of `schedule` for heads that stay whole; ValueError when an entry would not fit.

    >>> from .geometry import Geometry
    >>> from .families import Descending
    >>> t = pack(Descending(Geometry(6, 6, 1, 2, "causal_top_left"), roles=2, boustrophedon=True), heads_in_flight=4)
    >>> t[:8], t[8:12], t[12:15]
    ([2, 4, 2, 1, 3, 6, 0, 6], [0, 1, 2, -1], [6, 4, 2])
    >>> [(e & 0xFFFF, e >> 16) for e in t[21:27]]
    [(5, 1), (4, 1), (3, 1), (2, 1), (0, 0), (0, 0)]
    """
    g = schedule.geometry
    _check(g)
    if heads_in_flight < 1:
        raise ValueError(f"heads_in_flight must be at least 1, got {heads_in_flight}")
    slots = schedule.slots
    lengths = [g.steps(j) for j in range(g.n_kv)]
    steps = max(1, *lengths)
    table = [schedule.roles, heads_in_flight, len(slots), int(schedule.boustrophedon), g.n_kv, steps, 0, g.kv_len]
    for row in slots:
        table += row
    table += lengths
    for j in range(g.n_kv):
        entries = [i | rank << 16 for i, rank in zip(schedule.order(j), schedule.ranks(j), strict=True)]
        table += entries + [0] * (steps - len(entries))
    return table


def _check(g: Geometry) -> None:
    """Raises ValueError where a Q tile or a rank would not fit its half of an entry."""
    if g.n_kv > MAX_N_KV:
        raise ValueError(f"kv_len {g.kv_len} makes {g.n_kv} KV tiles of block_n {g.block_n}; at most {MAX_N_KV} fit a table")
    if g.n_q > MAX_N_Q:
        raise ValueError(f"q_len {g.q_len} makes {g.n_q} Q tiles of block_m {g.block_m}; at most {MAX_N_Q} fit a table")
