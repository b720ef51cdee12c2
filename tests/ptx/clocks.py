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
    scope                a clock passes from one thread to another only if the scope of each operation that hands it on has both
                         threads: of release and acquire, or the fences in their place, and of write and read. 8.5, 8.7, 8.9.4
    atomics              pass on what stood at the flag before them, if the write before them and they have such scopes. 8.9.2
    mbarrier             an arrival leaves its thread's clock, a wait that succeeds takes all of the phase's. Threads of other CTAs
                         cannot come to it here, so any scope has all of them. 9.7.13.15
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
EVERYWHERE = 1 << 30  # CTAs, more than a launch has


def morally_strong(cta: Any, reach: Any, other: Any, others_reach: Any) -> Any:
    """Whether operations of two CTAs are strong, and the scope of each has the other CTA; `Clocks.reach` has the numbers. 8.7"""
    least = np.minimum(reach, others_reach)
    return (least > 0) & (cta // np.maximum(least, 1) == other // np.maximum(least, 1))


class Order(NamedTuple):
    """How an access of global memory is ordered: relaxed, acquire, ...; and its scope: cta, cluster, gpu, sys."""

    kind: str
    scope: str


WEAK = Order("weak", "")


class Clock(NamedTuple):
    """What is passed on: rows of `known` and `fenced`."""

    known: np.ndarray
    fenced: np.ndarray


class Flag(NamedTuple):
    """A word by which threads synchronise: who wrote it last, as CTA and reach, and what was released there."""

    writer: tuple[int, int]
    released: dict[tuple[int, int], Clock]  # by CTA and reach


class Clocks:
    """The clocks of all threads of a launch. `t` are thread numbers within a CTA.

    `reach` has of a scope how many CTAs are in it, side by side: 0 of weak accesses. The host, which .sys has too, is not executed.
    """

    def __init__(self, ctas: int, threads: int, is_local: bool, cluster: int = 1) -> None:
        self.reach = {"": 0, "cta": 1, "cluster": cluster} | dict.fromkeys(("gpu", "gl", "sys"), EVERYWHERE)
        self.threads, self.warps, self.is_local = threads, threads // WARP, is_local
        self.columns = self.warps + 1
        self.now = 1
        shape = (1 if is_local else ctas) * threads, (1 if is_local else ctas) * self.columns
        self.known, self.fenced = np.zeros(shape, np.int32), np.zeros((2, *shape), np.int32)
        self.own_fence = np.zeros((2, shape[0]), np.int32)  # when the thread fenced its own accesses last
        self.flags: dict[int, Flag] = {}  # by address
        self.seen: dict[int, dict[tuple[int, int], Clock]] = {}  # row -> of the flags that it read without acquiring
        self.offered: dict[int, dict[int, Clock]] = {}  # row -> reach -> its clock at its last fence of that scope

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

    def fence(self, cta: Any, t: np.ndarray, scope: str) -> None:
        for thread in t.tolist():
            row = self.row(cta) + thread
            self._take(cta, thread, self.seen.get(row, {}), scope)
            if not self.is_local:
                self.offered.setdefault(row, {})[self.reach[scope]] = self.of(cta, thread)

    def _take(self, cta: Any, thread: int, released: dict[tuple[int, int], Clock], scope: str) -> None:
        for source, clock in released.items():
            if morally_strong(cta.number, self.reach[scope], *source):
                self.learn(cta, np.array([thread]), clock)

    def _add(self, to: dict[tuple[int, int], Clock], more: dict[tuple[int, int], Clock]) -> None:
        for source, clock in more.items():
            to[source] = self.join(to.get(source), clock)  # type: ignore[assignment]

    def acquire(self, cta: Any, t: np.ndarray, flags: np.ndarray, order: Order) -> None:
        """Reads of flags."""
        for thread, flag in zip(t.tolist(), flags.tolist(), strict=True):
            found = self.flags.get(flag)
            if not found or not morally_strong(cta.number, self.reach[order.scope], *found.writer):
                continue
            if order.kind in ("acquire", "acq_rel"):
                self._take(cta, thread, found.released, order.scope)
            else:
                self._add(self.seen.setdefault(self.row(cta) + thread, {}), found.released)

    def release(self, cta: Any, t: np.ndarray, flags: np.ndarray, order: Order, is_atomic: bool) -> None:
        """Writes of flags. A chain of atomics goes on with what earlier ones released, a store begins anew: 8.9.2."""
        self.now += 1
        reach = self.reach[order.scope]
        for thread, flag in zip(t.tolist(), flags.tolist(), strict=True):
            before, released = self.flags.get(flag), {}
            if is_atomic and before and morally_strong(cta.number, reach, *before.writer):
                released = before.released
            offered = dict(self.offered.get(self.row(cta) + thread, {}))
            if order.kind in ("release", "acq_rel"):
                offered[reach] = self.of(cta, thread)
            self._add(released, {(cta.number, each): clock for each, clock in offered.items()})
            self.flags[flag] = Flag((cta.number, reach), released)
