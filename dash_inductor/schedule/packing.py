"""A plan as the flat int32 table that the kernel reads.

[0] roles  [1] heads in flight  [2] slots  [3] 1 if mirrored  [4] n_kv  [5] row length  [6] queue  [7] kv_len
slots * roles        chain of (slot, role), row-major by slot, -1 for none
n_kv                 number of steps of chain j
n_kv * row length    Q tile | rank << 16 of step t of chain j, 0 past the chain's end

The row length is the number of steps of the longest chain, at least 1. Where one row serves all chains (`pack_shared`), n_q entries
take the place of the rows, a rank is the number of its chain, and [5] is how many entries a chain begins after the one before it.

queue is 0; under a round robin it is the number of units of a head, roles are the workers, slots the chains of a unit, and the
header is all there is: a head's order depends on where in a round it begins, so that the workers compute their rows
(templates/positions.py) as they need them.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from .families import MONOTONE, REGISTER, TWO_PASS
from .geometry import Geometry
from .orders.base import Order
from .orders.monotone import Ascending
from .placement import GroupedPlan, Plan, RoundRobinPlan

HEADER = 8
MAX_N_KV = 32767  # a rank takes the upper half of a signed 32-bit entry
MAX_N_Q = 65534  # a Q tile takes the lower half; with so many of each an index of the table fits 32 bits
MOST_CONSTANT_INTS = 2**21  # of a constant table with a row for each chain
# Those whose table the kernel of templates/table.py.jinja writes, which takes a family by its place here; and two passes.
FAMILY_CODES = (*(name for name, family in REGISTER.items() if family.on_device), TWO_PASS)
ROUND_ROBIN_MAX_N_Q = 4096  # a worker of a round robin computes its row at once
as_if_long: ContextVar[bool] = ContextVar("as_if_long", default=False)  # whether every table counts as too large; set by trials


def most_ints(n_q: Any, n_kv: Any) -> Any:
    """Ints that the table of any closed-form family has at most, whatever its roles; sizes may be symbolic.

    The (slot, role) cells: n_kv + A - 1 at most, and under symmetric twice the pairs plus 2 (A - 1), where A <= pairs.

    >>> most_ints(n_q=6, n_kv=3)
    37
    """
    return HEADER + 2 * (n_kv + 1) + n_kv + n_kv * n_q


def pack_plan(plan: Plan) -> list[int]:
    """The table of a plan; ValueError when an entry would not fit, or for a round robin that the workers could not compute.

    >>> from .placement import place_heads
    >>> from .geometry import Geometry
    >>> pack_plan(place_heads("shift_round_robin", Geometry(6, 6, 1, 2, "full"), 2, heads=2, heads_in_flight=1))
    [2, 1, 1, 0, 3, 6, 3, 6]
    """
    if not isinstance(plan, RoundRobinPlan):
        return pack(plan.order, plan.heads_in_flight)
    g = plan.order.geometry
    _check(g)
    if reason := why_no_round_robin(g, plan.family):
        raise ValueError(reason)
    slots = REGISTER[plan.family].chains_of_unit
    return [plan.workers, plan.heads_in_flight, slots, 0, g.n_kv, g.steps(0), plan.units, g.kv_len]


def why_no_round_robin(g: Geometry, family: str) -> str | None:
    """Why the workers of a round robin could not compute their rows; None if they can."""
    if g.n_q > ROUND_ROBIN_MAX_N_Q:
        return f"q_len {g.q_len} makes {g.n_q} Q tiles of block_m {g.block_m}; {family} takes at most {ROUND_ROBIN_MAX_N_Q}"
    if "full" not in REGISTER[family].masks and not g.is_triangle:
        return f"{family} needs a triangle: equal lengths and block_n a multiple of block_m, got {g}"
    return None


def table_ints(plan: Plan, *, shared_row: bool = False) -> int:
    """How many ints `pack_plan` gives, or `pack_shared`, without making them."""
    if isinstance(plan, RoundRobinPlan):
        return HEADER
    g = plan.order.geometry
    before_rows = HEADER + len(plan.order.slots) * plan.roles + g.n_kv
    return before_rows + (g.n_q if shared_row else g.n_kv * max(1, *map(g.steps, range(g.n_kv))))


def may_share_row(plan: Plan) -> bool:
    """Whether one row serves all chains of a plan: under a full or a causal mask, each adds to its tiles after all before it."""
    g = plan.order.geometry
    return isinstance(plan, GroupedPlan) and plan.family in MONOTONE and (g.mask == "full" or g.is_triangle)


def is_too_large(plan: Plan) -> bool:
    """Whether a table with a row for each chain is more than a graph has as a constant."""
    return not isinstance(plan, RoundRobinPlan) and (as_if_long.get() or table_ints(plan) > MOST_CONSTANT_INTS)


def shares_row(plan: Plan) -> bool:
    """Whether one row serves all chains of a plan, by a kernel that takes such a row."""
    return is_too_large(plan) and may_share_row(plan)


def schedule_ints(plan: Plan, partitions: int = 1) -> int:
    """Ints of memory that the schedule takes under one pass, for sizes that are known. Of a round robin each of so many partitions
    of a worker writes its rows."""
    return table_ints(plan, shared_row=True) if shares_row(plan) else table_ints(plan) + partitions * row_ints(plan)


def row_ints(plan: Plan) -> int:
    """Ints beside the table for the rows that the workers of a round robin compute."""
    return plan.workers * plan.order.geometry.n_q if isinstance(plan, RoundRobinPlan) else 0


def pack(order: Order, heads_in_flight: int) -> list[int]:
    """The table of `order` for heads that stay whole; ValueError when an entry would not fit.

    >>> from .geometry import Geometry
    >>> from .orders.monotone import Descending
    >>> t = pack(Descending(Geometry(6, 6, 1, 2, "causal"), roles=2, mirrored=True), heads_in_flight=4)
    >>> t[:8], t[8:12], t[12:15]
    ([2, 4, 2, 1, 3, 6, 0, 6], [0, 1, 2, -1], [6, 4, 2])
    >>> [(e & 0xFFFF, e >> 16) for e in t[21:27]]
    [(5, 1), (4, 1), (3, 1), (2, 1), (0, 0), (0, 0)]
    """
    g = order.geometry
    _check(g)
    slots = order.slots
    lengths = [g.steps(j) for j in range(g.n_kv)]
    steps = max(1, *lengths)
    table = [order.roles, heads_in_flight, len(slots), int(order.mirrored), g.n_kv, steps, 0, g.kv_len]
    for row in slots:
        table += row
    table += lengths
    for j in range(g.n_kv):
        entries = [i | rank << 16 for i, rank in zip(order.visits(j), order.ranks(j), strict=True)]
        table += entries + [0] * (steps - len(entries))
    return table


def pack_shared(plan: Plan) -> list[int]:
    """The table of a plan of a monotone family with one row for all its chains: linear in the lengths.

    >>> from .geometry import Geometry
    >>> from .orders.monotone import Ascending
    >>> t = pack_shared(GroupedPlan(Ascending(Geometry(6, 6, 1, 2, "causal"), roles=2), heads=2, heads_in_flight=2))
    >>> t[5], t[8:12], t[12:15], t[15:]
    (2, [0, 1, 2, -1], [6, 4, 2], [0, 1, 2, 3, 4, 5])
    """
    order, g = plan.order, plan.order.geometry
    _check(g)
    begin = g.ratio if isinstance(order, Ascending) and g.is_causal else 0
    table = [order.roles, plan.heads_in_flight, len(order.slots), int(order.mirrored), g.n_kv, begin, 0, g.kv_len]
    return [*table, *(j for row in order.slots for j in row), *map(g.steps, range(g.n_kv)), *order.visits(0)]


def _check(g: Geometry) -> None:
    """Raises ValueError where a Q tile or a rank would not fit its half of an entry."""
    if g.n_kv > MAX_N_KV:
        raise ValueError(f"kv_len {g.kv_len} makes {g.n_kv} KV tiles of block_n {g.block_n}; at most {MAX_N_KV} fit a table")
    if g.n_q > MAX_N_Q:
        raise ValueError(f"q_len {g.q_len} makes {g.n_q} Q tiles of block_m {g.block_m}; at most {MAX_N_Q} fit a table")
