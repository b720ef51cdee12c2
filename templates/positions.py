"""Where a chain's steps are, by formulas. The kernel that writes tables computes them, and the workers of a round robin.

Each function takes scalars, and blocks in the place of t (and of j, for tables). Triton and Gluon compile them from their source.
"""

import triton
import triton.language as tl


# (Q tile, rank) of step t of chain j. A pass covers the chains, or under symmetric the pairs of chains (u, n - 1 - u), from `first`
# on: `active` roles a = 0, 1, ... Role a starts a*stride tiles on in a ring of `length` tiles.
@triton.jit
def ring_rank(a, t, stride, length, active):
    # How many roles reach the tile of role a in step t before it: those ahead of it, and those behind the point where it wrapped.
    wrapped = stride * a + t - length
    return tl.minimum(active - 1 - a, t // stride) + tl.where(wrapped >= 0, wrapped // stride + 1, 0)


@triton.jit
def shift_step(j, t, n_q, stride, first, active):
    # Ascending and descending need no formula: the tiles in their order, and rank j. Here the chains of earlier passes come first.
    a = j - first
    return (stride * a + t) % n_q, first + ring_rank(a, t, stride, n_q, active)


@triton.jit
def symmetric_step(j, t, n_q, n, K: tl.constexpr, first, active):
    # The big chain of a pair: a ring of the tiles that all big chains of the pass see, then the triangle below it. Then the small
    # chain, from the last tile up; the role with the shortest triangle is the first, and the last pair of an odd n has none.
    pairs = (n + 1) // 2
    a = tl.minimum(j, n - 1 - j) - first
    ring_start = K * (first + active - 1)
    ring = tl.maximum(1, n_q - ring_start)  # clamped: lanes past the table divide by it; they are masked at the store
    stride = tl.maximum(1, tl.minimum(K, ring // active))
    on_ring = t < ring
    big_i = tl.where(on_ring, ring_start + (stride * a + t) % ring, K * j + t - ring)
    big_rank = tl.where(on_ring, ring_rank(a, t, stride, ring, active), big_i // K - j)
    alone = tl.where((n % 2 == 1) & (first + active == pairs), 1, 0)
    i = tl.where(j < pairs, big_i, n_q - 1 - t)
    rank = tl.where(j < pairs, big_rank, active + (active - alone - 1 - a))
    # From earlier passes: their big chains, and those of their small chains that see tile i.
    earlier = first + tl.maximum(0, first - tl.maximum(0, n - 1 - i // K))
    return i, earlier + rank


# A head that straddles rounds: its units (chains; under a causal mask pairs of them) stand in one queue with those of the other
# heads, and worker w has unit w of each round. Where in a round a head starts decides its passes, and with them orders and ranks.
# begin: the round's first unit, counted from the head's first one; negative where the head begins in this round. queue: units of a
# head.
@triton.jit
def straddling_chain(begin, role, slot, n, CAUSAL: tl.constexpr):
    # The chain of a worker, -1 where its pair is a single chain and has run.
    unit = begin + role
    if CAUSAL:
        return tl.where(slot == 0, unit, tl.where(n - 1 - unit == unit, -1, n - 1 - unit))
    else:
        return unit


@triton.jit
def straddling_step(j, t, begin, queue, roles, n_q, n, RATIO: tl.constexpr, CAUSAL: tl.constexpr):
    # (Q tile, rank) of step t of chain j; of no meaning if queue is 0.
    first = tl.maximum(0, begin)
    active = tl.maximum(1, tl.minimum(queue, begin + roles) - first)
    if CAUSAL:
        return symmetric_step(j, t, n_q, n, RATIO, first, active)
    else:
        return shift_step(j, t, n_q, tl.maximum(1, n_q // tl.maximum(1, tl.minimum(queue, roles))), first, active)
