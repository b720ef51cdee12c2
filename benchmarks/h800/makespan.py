"""Event simulation of a placement, for many sets of constants at once. Times are in steps: a step takes 1 on average.

Shapes: B sets of constants, T steps of a chain, W workers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .placement import Placement

Floats = NDArray[np.float64]
SEED = 0
LONG_AGO = -1e30


def makespan(placement: Placement, hop: Any, overhead: Any, jitter: Any) -> Floats:
    """Makespan of each set of constants, in steps; the three broadcast to shape [B].

    A step lasts 1 - jitter + jitter * an exponential deviate, the same one for every set, so that times are continuous in
    the constants. It adds to its Q tile `hop` after the tile's previous addition at the earliest, the order of additions
    being that of the schedule. Each chain starts with `overhead`.

    >>> from dash_inductor.schedule import Geometry
    >>> full = Placement("ascending", Geometry(6, 6, 1, 2, "full"), 1, dynamic=False, paired=False)
    >>> round(float(makespan(full, hop=0.4, overhead=0, jitter=0)[0]), 3)  # 6 steps and 2 hops
    6.8
    """
    hop_B, overhead_B, jitter_B = np.broadcast_arrays(*(np.atleast_1d(np.asarray(x, float)) for x in (hop, overhead, jitter)))
    simulate = _ring if placement.family == "ring" else _mono
    return simulate(placement, hop_B, overhead_B, jitter_B, np.random.default_rng(SEED))


def _mono(placement: Placement, hop_B: Floats, overhead_B: Floats, jitter_B: Floats, rng: np.random.Generator) -> Floats:
    """Ascending and descending: chain j adds to every tile after chain j - 1, which it follows tile by tile."""
    g, sets = placement.geometry, np.arange(len(hop_B))
    lengths = [g.steps(j) for j in range(g.n_kv)]
    hop_B1, jitter_B1 = hop_B[:, None], jitter_B[:, None]
    free_BW = np.zeros((len(hop_B), placement.workers))
    last_added: dict[int, Floats] = {}  # head: when each tile that its last chain visited was added to, in visiting order
    for head, j in placement.chains():
        steps = lengths[j]
        worker = free_BW.argmin(axis=1) if placement.dynamic else placement.worker(head, j)
        ready_BT = (free_BW[sets, worker] + overhead_B)[:, None] + np.arange(1, steps + 1)
        ready_BT += jitter_B1 * (rng.standard_exponential(steps) - 1).cumsum()
        if j:
            before = last_added[head]
            before_BT = before[:, :steps] if placement.family == "descending" else before[:, before.shape[1] - steps :]
            # A wait at one tile delays all that follow.
            ready_BT += np.maximum.accumulate(np.maximum(0, before_BT + hop_B1 - ready_BT), axis=1)
        last_added[head] = ready_BT
        free_BW[sets, worker] = ready_BT[:, -1]
    return free_BW.max(axis=1)


def _ring(placement: Placement, hop_B: Floats, overhead_B: Floats, jitter_B: Floats, rng: np.random.Generator) -> Floats:
    """Shift and symmetric: tiles are added to in the order of (round, step), a round being one unit on every worker."""
    g, workers, tiles = placement.geometry, placement.workers, np.array(placement.ring())
    per_head, steps = tiles.shape
    units = placement.heads * per_head
    second_U = np.array([g.steps(u) for u in range(per_head)])  # step at which the second chain of a pair starts
    free_WB = np.zeros((workers, len(hop_B)))
    added = np.full((placement.heads * g.n_q, len(hop_B)), LONG_AGO)  # when each tile was last added to
    for first in range(0, units, workers):
        unit = np.arange(first, min(first + workers, units))
        head, u = np.divmod(unit, per_head)
        if placement.dynamic:
            free_WB.sort(axis=0)
        now = free_WB[: len(unit)]
        noise = rng.standard_exponential((steps, len(unit), 1)) - 1
        for t in range(steps):
            starts = (second_U[u] == t) | (t == 0)
            tile = head * g.n_q + tiles[u, t]
            now = np.maximum(now + overhead_B * starts[:, None] + 1 + jitter_B * noise[t], added[tile] + hop_B)
            added[tile] = now
        free_WB[: len(unit)] = now
    return free_WB.max(axis=0)
