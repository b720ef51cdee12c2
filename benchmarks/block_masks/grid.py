"""The grid of block masks, heads and hops, and the makespan on it of orders that know no more of a mask than its own tiles.

Chains take tickets head by head, and a dq tile is added in the order of tickets: that ends with any number of resident CTAs.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np

from benchmarks.schedules.explicit import Explicit
from benchmarks.schedules.simulator import simulate
from dash_inductor.schedule import Geometry, GroupedPlan
from dash_inductor.schedule.parts import WHOLE, PartCosts, part_makespan, parts_for

TILES = 32  # each way
HEADS = (4, 16, 64)
WORKERS = 132
HOP_PERCENT = (20, 75, 150)  # lam / tau
STEP_NS = 2000

# kv heads of the batch, length, query heads of each: causal, in tiles of 64 x 128.
FEW_CHAINS = ((8, 2048, 4), (8, 4096, 4), (8, 8192, 4), (16, 4096, 1), (8, 16384, 4), (32, 8192, 1))
PARTS = ("whole", "in_parts")

Key = Callable[[Geometry, int], tuple[int, ...]]  # what the chains of a mask are sorted by

# Who takes the first ticket, and whether a chain walks its Q tiles downwards. spt is FlashAttention's name, "shortest processing
# time first": under a causal mask the last KV tile has the shortest chain.
ORDERS: dict[str, tuple[Key, bool]] = {
    "spt": (lambda g, j: (-j,), False),
    "ascending_up": (lambda g, j: (j,), False),
    "ascending_down": (lambda g, j: (j,), True),
    "descending_down": (lambda g, j: (-j,), True),
    "longest_first_up": (lambda g, j: (-g.steps(j), j), False),
    "last_begin_first_up": (lambda g, j: (-g.first_q_tile(j), -j), False),
}


def order_of(name: str, g: Geometry) -> Explicit:
    """One of ORDERS on a mask: role a is ticket a.

    >>> spt = order_of("spt", Geometry.of_blocks([[True, True, True], [False, True, True], [False, False, True]]))
    >>> spt.slots, [spt.visits(j) for j in range(3)], [spt.ranks(j) for j in range(3)]
    (((2, 1, 0),), [(0, 1, 2), (1, 2), (2,)], [(0, 1, 2), (0, 1), (0,)])
    """
    key, downwards = ORDERS[name]
    chains = sorted(range(g.n_kv), key=lambda j: key(g, j))
    # A clock that runs chain by chain makes ranks of tickets.
    starts = {j: ticket * g.n_q for ticket, j in enumerate(chains)}
    walks = (sorted(g.tiles(j), reverse=downwards) for j in range(g.n_kv))
    return Explicit(
        g, (tuple(chains),), tuple(tuple((i, starts[j] + t) for t, i in enumerate(walk)) for j, walk in enumerate(walks))
    )


def plan_of(name: str, g: Geometry, heads: int) -> GroupedPlan:
    """The order with a worker, which is a ticket, for every chain."""
    return GroupedPlan(order_of(name, g), heads, heads)


@cache
def masks() -> dict[str, Geometry]:
    """What attention is masked with, and two random ones."""
    n, rng = TILES, random.Random(0)
    i, j = np.ogrid[:n, :n]
    causal, everything = i >= j, np.ones((n, n), bool)

    def documents(lengths: list[int]) -> np.ndarray:
        document = np.repeat(range(len(lengths)), lengths)[:n]
        return document[:, None] == document

    def random_documents(typical: int) -> np.ndarray:
        lengths: list[int] = []
        while sum(lengths) < n:
            lengths.append(max(1, int(rng.lognormvariate(math.log(typical), 0.8))))
        return documents(lengths)

    def sparse(share: float, seed: int) -> np.ndarray:
        return (np.random.RandomState(seed).rand(n, n) < share) | (i == j)

    kinds = {
        "full": everything,
        "causal": causal,
        "window 4": causal & (i - j <= 4),
        "window 16": causal & (i - j <= 16),
        "two-sided window 4": abs(i - j) <= 4,
        "equal documents": causal & documents([4] * 8),
        "documents": causal & random_documents(5),
        "short documents": causal & random_documents(3),
        "bidirectional documents": random_documents(5),
        "prefix": causal | (j < 8),
        "sinks and window": causal & ((i - j <= 4) | (j < 2)),
        "dilated": causal & (((i - j) % 4 == 0) | (i - j < 2)),
        "random 20 %": sparse(0.2, seed=0),
        "causal, random 30 %": causal & sparse(0.3, seed=1),
    }
    return {name: Geometry.of_blocks(mask.T.tolist()) for name, mask in kinds.items()}


def points() -> Iterator[tuple[int, int, str]]:
    """The whole grid: heads, lam in percent of tau, mask."""
    return itertools.product(HEADS, HOP_PERCENT, masks())


def row(heads: int, hop_percent: int, mask: str) -> dict[str, int | str]:
    """The bound and the makespan of every order in ns; then that of spt where what a CTA takes beside its steps is priced too, its
    chains whole and cut into parts."""
    g, hop_ns = masks()[mask], STEP_NS * hop_percent // 100
    makespans = {
        name: simulate(plan_of(name, g, heads), compute_ns=STEP_NS, reduce_ns=0, sync_ns=hop_ns, resident=WORKERS).makespan_ns
        for name in ORDERS
    }
    costs = PartCosts(hop=hop_percent / 100)
    cut = (round(STEP_NS * part_makespan(g, heads, 1, parts, WORKERS, costs)) for parts in (WHOLE, parts_for(heads, 1, g.n_kv)))
    priced = dict(zip(PARTS, cut, strict=True))
    return {"mask": mask, "heads": heads, "hop_percent": hop_percent, "bound": bound(g, heads, hop_ns), **makespans, **priced}


def few_chains(kv_heads: int, length: int, group: int) -> dict[str, int | float]:
    """One of FEW_CHAINS: how many there are, and the makespan over the work shared out, chains whole and cut into parts."""
    g = Geometry(length, length, 64, 128, "causal")
    shared = kv_heads * group * sum(map(g.steps, range(g.n_kv))) / WORKERS
    cut = (part_makespan(g, kv_heads, group, parts, WORKERS) / shared for parts in (WHOLE, parts_for(kv_heads, group, g.n_kv)))
    sizes = {"kv_heads": kv_heads, "length": length, "group": group, "chains": kv_heads * g.n_kv}
    return sizes | {name: round(ratio, 3) for name, ratio in zip(PARTS, cut, strict=True)}


def bound(g: Geometry, heads: int, hop_ns: int) -> int:
    """What no order beats whose chains each have a CTA of their own: a hop then lies between any two parts of a dq tile."""
    lengths = [g.steps(j) for j in range(g.n_kv)]
    work_ns = -(-heads * sum(lengths) * STEP_NS // WORKERS)
    busiest = max(len(g.contributors(i)) for i in range(g.n_q))
    return max(work_ns, max(lengths) * STEP_NS, STEP_NS + (busiest - 1) * hop_ns)
