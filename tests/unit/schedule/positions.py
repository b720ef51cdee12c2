"""Q tiles and ranks by (chain, step), as `templates/positions.py` computes them on a device: an oracle for the families.

The families go through the steps of a head in the order of the clock instead, which holds for every geometry.

Every function uses nonnegative ints, +, -, *, //, %, min, max and selections only. Letters: n chains (KV tiles), n_q Q tiles,
k Q tiles per KV tile on the diagonal. A pass covers the chains (under symmetric the pairs (u, n - 1 - u)) first .. first +
active - 1, role a the chain (pair) first + a.
"""

from __future__ import annotations


def ring_tile(a: int, t: int, stride: int, length: int) -> int:
    """Q tile of step t of role a on a ring of `length` tiles: role a starts a * stride tiles on."""
    return (stride * a + t) % length


def ring_rank(a: int, t: int, stride: int, length: int, active: int) -> int:
    """How many of the `active` roles of a ring reach ring_tile(a, t) before role a; stride * (active - 1) < length.

    A role a' > a is (a' - a) * stride steps ahead on the tiles and so came by that much earlier, if it had started
    before them; a role a' < a comes later, unless it began beyond the point where role a has wrapped round to.
    """
    ahead = min(active - 1 - a, t // stride)
    wrapped = stride * a + t - length  # tiles past the wrap; negative before it
    behind = wrapped // stride + 1 if wrapped >= 0 else 0
    return ahead + behind


def shift_step(j: int, t: int, n_q: int, stride: int, first: int, active: int) -> tuple[int, int]:
    """(Q tile, rank) of step t of chain j under Shift; stride * active <= n_q."""
    a = j - first
    # Every chain of an earlier pass comes first.
    return ring_tile(a, t, stride, n_q), first + ring_rank(a, t, stride, n_q, active)


def symmetric_step(j: int, t: int, n_q: int, n: int, k: int, first: int, active: int) -> tuple[int, int]:
    """(Q tile, rank) of step t of chain j under Symmetric on a triangle: lo(j) = k * j and n_q > k * (n - 1)."""
    pairs = (n + 1) // 2
    a = min(j, n - 1 - j) - first
    r0 = k * (first + active - 1)  # first tile that all big chains of the pass see
    rect = n_q - r0
    stride = max(1, min(k, rect // active))
    if j < pairs:  # the big chain of its pair, or the single one in the middle
        if t < rect:  # the rectangle, as a ring
            i = r0 + ring_tile(a, t, stride, rect)
            rank = ring_rank(a, t, stride, rect, active)
        else:  # the triangle below it; the latest chain to begin a tile is the first to reach it
            i = k * j + t - rect
            rank = i // k - j
    else:  # the small chain, after all big ones; the role with the shortest triangle is the first
        i = n_q - 1 - t
        alone = 1 if n % 2 == 1 and first + active == pairs else 0  # the last pair of an odd n has no small chain
        rank = active + (active - alone - 1 - a)
    # From earlier passes: their `first` big chains, and those of their small chains n - first .. n - 1 that see tile i.
    earlier = first + max(0, first - max(0, n - 1 - i // k))
    return i, earlier + rank
