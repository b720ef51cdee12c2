"""A schedule as the flat int32 table that the kernel reads.

[0] roles  [1] heads in flight  [2] slots  [3] 1 if boustrophedon  [4] n_kv  [5] steps  [6] 0  [7] 0
slots * roles   chain of (slot, role), row-major by slot, -1 for none
n_kv            number of steps of chain j
n_kv * steps    Q tile | rank << 16 of step t of chain j, 0 past the chain's end

steps is the length of a row: that of the longest chain, at least 1.
"""

from __future__ import annotations

from .families import Schedule

HEADER = 8
MAX_N_KV = 32767  # a rank takes the upper half of a signed 32-bit entry
MAX_N_Q = 65535  # a Q tile takes the lower half


def table_size(n_q: int, n_kv: int, roles: int, *, symmetric: bool = False) -> int:
    """Ints in the table of a schedule whose longest chain has n_q steps (or 1), as every mask here has it at most.

    >>> table_size(n_q=6, n_kv=3, roles=2)
    33
    """
    pairs = (n_kv + 1) // 2
    slots = 2 * -(-pairs // roles) if symmetric else -(-n_kv // roles)
    return HEADER + slots * roles + n_kv + n_kv * max(1, n_q)


def pack(schedule: Schedule, heads_in_flight: int) -> list[int]:
    """The table of `schedule`; ValueError when an entry would not fit.

    >>> from .geometry import Geometry
    >>> from .families import Descending
    >>> t = pack(Descending(Geometry(6, 6, 1, 2, "causal_top_left"), roles=2, boustrophedon=True), heads_in_flight=4)
    >>> t[:8], t[8:12], t[12:15]
    ([2, 4, 2, 1, 3, 6, 0, 0], [0, 1, 2, -1], [6, 4, 2])
    >>> [(e & 0xFFFF, e >> 16) for e in t[21:27]]
    [(5, 1), (4, 1), (3, 1), (2, 1), (0, 0), (0, 0)]
    """
    g = schedule.geometry
    if g.n_kv > MAX_N_KV:
        raise ValueError(f"kv_len {g.kv_len} makes {g.n_kv} KV tiles of block_n {g.block_n}; at most {MAX_N_KV} fit a table")
    if g.n_q > MAX_N_Q:
        raise ValueError(f"q_len {g.q_len} makes {g.n_q} Q tiles of block_m {g.block_m}; at most {MAX_N_Q} fit a table")
    if heads_in_flight < 1:
        raise ValueError(f"heads_in_flight must be at least 1, got {heads_in_flight}")
    slots = schedule.slots
    lengths = [g.steps(j) for j in range(g.n_kv)]
    steps = max(1, *lengths)
    table = [schedule.roles, heads_in_flight, len(slots), int(schedule.boustrophedon), g.n_kv, steps, 0, 0]
    for row in slots:
        table += row
    table += lengths
    for j in range(g.n_kv):
        entries = [i | rank << 16 for i, rank in zip(schedule.order(j), schedule.ranks(j), strict=True)]
        table += entries + [0] * (steps - len(entries))
    return table
