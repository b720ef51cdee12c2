"""Who knows of what: vector clocks of threads, by the PTX memory model's causality order (8.9.5).

Time is a stamp, `now`, that every synchronisation advances. `known[t, w]` says that thread t knows of all that warp w did at stamps
below it. A warp's threads share a column; a column more stands for the bulk copies (TMA) of the CTA. `fenced[space, t, w]` is the
same for what may be seen through the async proxy, by which wgmma and TMA access shared memory, and TMA global memory. The rules,
with sections of the PTX ISA 9.2:

    bar, barrier         each thread leaves with all that those that arrived knew, and what they did before. 8.9.4, 9.7.13.1
    bar.warp.sync        the same among the lanes of a warp. 9.7.13.2
    release              an atomic or store with .release or .acq_rel leaves its thread's clock at the flag. 8.8
    acquire              a load or atomic with .acquire or .acq_rel takes the clocks that stand there. 8.8
    fence.acq_rel, .sc   makes a release of the relaxed write behind it, an acquire of the relaxed read before it. 8.8
    mbarrier             an arrival leaves its thread's clock, a wait that succeeds takes all of the phase's. 9.7.13.15
    fence.proxy.async    what the thread knows of now, and did, may be seen by the async proxy, in its space. 8.6, 9.7.13.4
    cp.async             its writes are its thread's, at the time of the wait for its group. 9.7.9.25.3
    cp.async.bulk        its writes are the bulk column's, known with the phase that they complete. 9.7.9.25.4, 9.7.13.15
      to global memory   its accesses are its thread's, by the async proxy, at any time until its group is waited for. 9.7.9.25.3
    wgmma                reads through the async proxy until waited for; its registers are in flight so long. 9.7.15.4, 9.7.15.7

A kernel without atomics or ordered accesses of global memory has CTAs that never know of each other: they run one after the other,
and share rows and columns (`is_local`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

WARP = 32
SHARED, GLOBAL = 0, 1  # spaces


class Clock(NamedTuple):
    """What is passed on: rows of `known` and `fenced`."""

    known: np.ndarray
    fenced: np.ndarray


class Clocks:
    """The clocks of all threads of a launch. `t` are thread numbers within a CTA."""

    def __init__(self, ctas: int, threads: int, is_local: bool) -> None:
        self.threads, self.warps, self.is_local = threads, threads // WARP, is_local
        self.columns = self.warps + 1
        self.now = 1
        shape = (1 if is_local else ctas) * threads, (1 if is_local else ctas) * self.columns
        self.known, self.fenced = np.zeros(shape, np.int32), np.zeros((2, *shape), np.int32)
        self.own_fence = np.zeros((2, shape[0]), np.int32)  # when the thread fenced its own accesses last
        self.flags: dict[int, Clock] = {}  # by address
        self.seen: dict[int, Clock] = {}  # row -> of the flags that it read without acquiring
        self.offered: dict[int, Clock] = {}  # row -> its clock at its last fence

    def begin(self, cta: Any) -> None:
        """A CTA that takes over the rows of the one before it."""
        if self.is_local:
            self.known[:], self.fenced[:], self.own_fence[:] = 0, 0, 0

    def row(self, cta: Any) -> int:
        """Of the CTA's thread 0."""
        return 0 if self.is_local else cta.number * self.threads

    def column(self, cta: Any) -> int:
        """Of the CTA's warp 0."""
        return 0 if self.is_local else cta.number * self.columns

    def of(self, cta: Any, thread: int) -> Clock:
        """A copy of a thread's clock. What the thread did itself is in it, though its warp's other lanes are not."""
        row = self.row(cta) + thread
        return Clock(self.known[row].copy(), self.fenced[:, row].copy())

    def join(self, one: Clock | None, other: Clock | None) -> Clock | None:
        """What both know."""
        if one is None or other is None:
            return one or other
        return Clock(np.maximum(one.known, other.known), np.maximum(one.fenced, other.fenced))

    # ---- bar, barrier, bar.warp.sync

    def arrive(self, cta: Any, lo: int, hi: int) -> Clock:
        """The clock that threads lo to hi, whole warps, leave at a barrier."""
        self.now += 1
        row, column = self.row(cta), self.column(cta)
        rows, warps = slice(row + lo, row + hi), slice(column + lo // WARP, column + hi // WARP)
        known, fenced = self.known[rows].max(0), self.fenced[:, rows].max(1)
        known[warps] = self.now
        fenced[:, warps] = np.maximum(fenced[:, warps], self.own_fence[:, rows].reshape(2, -1, WARP).min(2))
        return Clock(known, fenced)

    def learn(self, cta: Any, rows: slice | np.ndarray, clock: Clock | None) -> None:
        """Threads take a clock."""
        if clock is None:
            return
        if isinstance(rows, slice):
            at: Any = slice(self.row(cta) + rows.start, self.row(cta) + rows.stop)
        else:
            at = self.row(cta) + rows
        self.known[at] = np.maximum(self.known[at], clock.known)
        self.fenced[:, at] = np.maximum(self.fenced[:, at], clock.fenced[:, None])

    def warp_barrier(self, cta: Any, t: np.ndarray) -> None:
        self.now += 1
        for warp in np.unique(t // WARP):
            lanes = t[t // WARP == warp]
            rows = self.row(cta) + lanes
            known, fenced = self.known[rows].max(0), self.fenced[:, rows].max(1)
            if len(lanes) == WARP:
                known[self.column(cta) + warp] = self.now
                column = self.column(cta) + warp
                fenced[:, column] = np.maximum(fenced[:, column], self.own_fence[:, rows].min(1))
            self.known[rows], self.fenced[:, rows] = known, fenced[:, None]

    # ---- flags and fences

    def proxy_fence(self, cta: Any, t: np.ndarray, space: str) -> None:
        """`space`: shared::cta, shared::cluster or global; "" for all."""
        self.now += 1
        rows = self.row(cta) + t
        for each in [SHARED, GLOBAL] if not space else [GLOBAL if space == "global" else SHARED]:
            self.fenced[each, rows] = np.maximum(self.fenced[each, rows], self.known[rows])
            self.own_fence[each, rows] = self.now

    def thread_clock(self, cta: Any, thread: int) -> Clock:
        """What a thread leaves at an mbarrier."""
        self.now += 1
        return self.of(cta, thread)

    def fence(self, cta: Any, t: np.ndarray) -> None:
        for thread in t:
            row = self.row(cta) + int(thread)
            if row in self.seen:
                self.learn(cta, np.array([thread]), self.seen.pop(row))
            if not self.is_local:
                self.offered[row] = self.of(cta, int(thread))

    def acquire(self, cta: Any, t: np.ndarray, flags: np.ndarray, order: str) -> None:
        """Reads of flags, in this order of memory."""
        for thread, flag in zip(t.tolist(), flags.tolist(), strict=True):
            clock = self.flags.get(flag)
            if clock and order in ("acquire", "acq_rel"):
                self.learn(cta, np.array([thread]), clock)
            elif clock:
                row = self.row(cta) + thread
                self.seen[row] = self.join(self.seen.get(row), clock)  # type: ignore[assignment]

    def release(self, cta: Any, t: np.ndarray, flags: np.ndarray, order: str) -> None:
        """Writes of flags. A chain of atomics goes on with what earlier ones released: 8.8."""
        self.now += 1
        for thread, flag in zip(t.tolist(), flags.tolist(), strict=True):
            offered = self.of(cta, thread) if order in ("release", "acq_rel") else self.offered.get(self.row(cta) + thread)
            if offered:
                self.flags[flag] = self.join(self.flags.get(flag), offered)  # type: ignore[assignment]
