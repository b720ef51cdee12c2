"""Races: accesses to one place, one of them a write, of which the later one's thread does not know that the earlier one happened.

Beside shared memory, per CTA, and global memory stands a shadow: of each granule, the narrowest width that the kernel accesses, the
last writer with its stamp, the last reads, and what is pending: a write of a copy that nobody waited for, a read of a wgmma or bulk
store in flight. `Races` compares these with clocks.Clocks, whose docstring has the rules of who knows of what. Rules of access:

    write, then read or write    by another thread needs to be known; through the async proxy, also fenced.   8.7.1, 8.6
    read, then write             the same; lanes of one warp need bar.warp.sync between them.                 8.7.1
    cp.async, cp.async.bulk      nobody may touch the target before the wait.                                 9.7.9.25.1
    wgmma, bulk stores           nobody may write what is read before the wait.                               9.7.15.4, 9.7.9.25.1
    atomics, ordered accesses    of both sides make no race, if the scope of each has the other's thread.     8.7
    additions of floats          count as plain reads and writes all the same: unordered ones give other bits.

A race is found whatever order the two happened to run in, but for these of global memory, where per CTA the last reading warp of a
granule is kept: nothing is found of a read, and a write behind it by the same CTA, nor of an ordered read and a write behind it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .clocks import GLOBAL, SHARED, WARP, Clock, Clocks, morally_strong
from .memory import Fault

MANY = 99  # lanes, warps or CTAs
Index = np.ndarray


def granules(offset: np.ndarray, size: int, granule: int) -> Index:
    """Those of elements of `size` bytes at these offsets, each once."""
    parts = np.arange(0, size, min(size, granule))
    return np.unique((offset.reshape(-1, 1) + parts) // granule)


class Half:
    """The shadow of one memory, in granules."""

    def __init__(self, size: int, readers: int) -> None:
        self.writer = np.full(size, -1, np.int32)
        self.stamp = np.zeros(size, np.int32)
        self.written_at = np.zeros(size, np.int32)  # the instruction
        self.read_at = np.zeros(size, np.int32)
        self.reads = np.zeros((readers, size), np.int32)  # stamps
        self.reader = np.zeros((readers, size), np.int16)  # the lane of a warp, or the warp of a CTA
        self.pending_write = np.zeros(size, bool)
        self.pending_read = np.zeros(size, np.int16)
        self.reach = np.zeros(size, np.int32)  # of the writer's scope; 0: it was no atomic or ordered access

    def write(self, index: Index, writer: Any, now: int, number: int) -> None:
        self.writer[index], self.stamp[index], self.written_at[index] = writer, now, number


class Unchecked:
    """In the place of `Races` where only values are asked for: nothing is kept, and nothing found."""

    checks = False

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class Races(Clocks):
    """All that was found of a launch, and who knows of what: `found`: (kind, instruction, earlier one) -> [place, times]."""

    checks = True

    def __init__(self, program: Any, memory: Any, ctas: int, shared_bytes: int, is_local: bool, to_the_end: bool = True) -> None:
        super().__init__(ctas, program.kernel.threads, is_local, program.kernel.cluster)
        self.program, self.memory, self.granule = program, memory, program.granule
        self.found: dict[tuple[str, int, int], list[Any]] = {}
        self.to_the_end = to_the_end
        self._shared_size = -(-shared_bytes // self.granule)
        self.shared: dict[int, Half] = {}
        self.words = Half(-(-memory.used // self.granule), 1 if is_local else ctas)

    def begin(self, cta: Any) -> None:
        super().begin(cta)
        if self.is_local:
            self.shared.clear()
        self.shared[cta.number] = Half(self._shared_size, self.warps)

    def report(self, kind: str, number: int, earlier: int, place: str) -> None:
        self.found.setdefault((kind, number, earlier), [place, 0])[1] += 1
        if not self.to_the_end:
            raise Fault(f"a race: {kind}")

    def _late(self, late: Any, index: Index, kind: str, number: int, earlier: np.ndarray | None) -> None:
        """Reports the first granule of shared memory that is too late; `earlier` has the instruction that it is too late for."""
        if late.any():
            first = int(index[late][0])
            place = f"shared memory, byte {first * self.granule}"
            self.report(kind, number, -1 if earlier is None else int(earlier[first]), place)

    def listed(self) -> list[dict[str, Any]]:
        """What was found, in words."""
        where = self.program.kernel.where
        return [
            {"kind": kind, "at": where(number), "earlier": where(earlier) if earlier >= 0 else "", "place": place, "times": times}
            for (kind, number, earlier), (place, times) in self.found.items()
        ]

    # ---- shared memory

    def _spread(self, t: np.ndarray, offset: np.ndarray, size: int) -> tuple[np.ndarray, Index]:
        """The granules of accesses of `size` bytes, and the thread of each."""
        count = -(-size // self.granule)
        index = (offset // self.granule)[:, None] + np.arange(count)
        return np.repeat(t, count), index.ravel()

    def granules(self, offset: np.ndarray, size: int) -> Index:
        return granules(offset, size, self.granule)

    def shared_read(self, cta: Any, number: int, t: np.ndarray, offset: np.ndarray, size: int, warp_wide: bool = False) -> None:
        h = self.shared[cta.number]
        t, index = self._spread(t, offset, size)
        self._late(h.pending_write[index], index, "read of a copy that was not waited for", number, h.written_at)
        self._late(h.writer[index] < 0, index, "read of what nobody wrote", number, None)
        self._known_write(cta, number, t, index, h, "read after write")
        warp, lane = t // WARP, t % WARP
        fresh = h.reads[warp, index] < self.now
        h.reader[warp, index] = MANY if warp_wide else np.where(fresh | (h.reader[warp, index] == lane), lane, MANY)
        h.reads[warp, index] = self.now
        h.read_at[index] = number

    def shared_write(
        self, cta: Any, number: int, t: np.ndarray, offset: np.ndarray, size: int, values: np.ndarray | None = None
    ) -> None:
        """`values` [n, threads]: threads that write the same bits to one place in one instruction do no harm."""
        h = self.shared[cta.number]
        if values is not None:
            first, inverse = np.unique(offset, return_index=True, return_inverse=True)[1:]
            if first.size < offset.size and (values[:, first][:, inverse] == values).all():
                t, offset = t[first], offset[first]
        t, index = self._spread(t, offset, size)
        self._before_write(cta, number, t, index, h)
        h.write(index, t, self.now, number)
        self._late(h.writer[index] != t, index, "two threads of one instruction write one place", number, None)

    def _before_write(self, cta: Any, number: int, t: np.ndarray, index: Index, h: Half) -> None:
        self._late(h.pending_write[index], index, "write over a copy that was not waited for", number, h.written_at)
        self._late(h.pending_read[index] > 0, index, "write while it is read asynchronously", number, h.read_at)
        self._known_write(cta, number, t, index, h, "write after write")
        stamps = h.reads[:, index]
        known = self.known[(self.row(cta) + t)[:, None], self.column(cta) + np.arange(self.warps)].T
        late = (stamps >= known) & (stamps > 0)
        if late.any():
            own = (np.arange(self.warps)[:, None] == t // WARP) & (h.reader[:, index] == t % WARP)
            self._late((late & ~own).any(0), index, "write after read", number, h.read_at)

    def _known_write(self, cta: Any, number: int, t: np.ndarray, index: Index, h: Half, kind: str) -> None:
        writer = h.writer[index]
        known = self.known[self.row(cta) + t, self.column(cta) + np.maximum(writer, 0) // WARP]
        self._late((h.stamp[index] >= known) & (writer != t) & (writer >= 0), index, kind, number, h.written_at)

    # ---- asynchronous accesses of shared memory

    def copy_begins(self, cta: Any, number: int, t: np.ndarray, offset: np.ndarray, size: int) -> None:
        """cp.async: a write that is pending."""
        h = self.shared[cta.number]
        t, index = self._spread(t, offset, size)
        self._before_write(cta, number, t, index, h)
        h.write(index, t, self.now, number)
        h.pending_write[index] = True

    def copy_ends(self, cta: Any, t: np.ndarray, offset: np.ndarray, size: int) -> None:
        h = self.shared[cta.number]
        _, index = self._spread(t, offset, size)
        h.pending_write[index] = False
        h.stamp[index] = self.now

    def bulk_begins(self, cta: Any, number: int, thread: int, index: Index) -> None:
        """A bulk copy to these granules: checked as a write of the thread that issues it, also through the async proxy."""
        h = self.shared[cta.number]
        t = np.full(index.shape, thread)
        self._before_write(cta, number, t, index, h)
        self._fenced(cta, number, slice(thread, thread + 1), index, h, "bulk copy over a write")
        h.write(index, self.threads, self.now, number)
        h.pending_write[index] = True

    def async_touch(self, cta: Any, number: int, thread: int, offset: np.ndarray, size: int) -> None:
        """The async proxy uses an mbarrier: its initialisation must be fenced."""
        _, index = self._spread(np.array([thread]), offset, size)
        self._fenced(cta, number, slice(thread, thread + 1), index, self.shared[cta.number], "asynchronous use of an mbarrier")

    def bulk_ends(self, cta: Any, index: Index) -> Clock:
        """The clock that completes with the copy."""
        h = self.shared[cta.number]
        self.now += 1
        h.pending_write[index] = False
        h.stamp[index] = self.now
        self.now += 1
        clock = np.zeros(self.known.shape[1], np.int32)
        clock[self.column(cta) + self.warps] = self.now
        return Clock(clock, np.stack([clock, clock]))

    def async_read(self, cta: Any, number: int, rows: slice, index: Index) -> None:
        """wgmma, or a bulk store, of these threads reads these granules from now on: all its threads must know what was written."""
        h = self.shared[cta.number]
        self._late(h.pending_write[index], index, "asynchronous read of a copy that was not waited for", number, h.written_at)
        self._late(h.writer[index] < 0, index, "asynchronous read of what nobody wrote", number, None)
        self._fenced(cta, number, rows, index, h, "asynchronous read")
        h.pending_read[index] += 1
        h.read_at[index] = number

    def async_read_ends(self, cta: Any, rows: slice, index: Index) -> None:
        h = self.shared[cta.number]
        h.pending_read[index] -= 1
        for warp in range(rows.start // WARP, -(-rows.stop // WARP)):
            h.reads[warp, index], h.reader[warp, index] = self.now, MANY if rows.stop - rows.start > 1 else rows.start % WARP

    def _fenced(self, cta: Any, number: int, rows: slice, index: Index, h: Half, kind: str) -> None:
        writer, stamp = h.writer[index], h.stamp[index]
        row = self.row(cta)
        at = slice(row + rows.start, row + rows.stop)
        column = self.column(cta) + np.maximum(writer, 0) // WARP
        by_itself = (rows.stop - rows.start == 1) & (writer == rows.start)
        fenced_itself = by_itself & (stamp < self.own_fence[SHARED, row + rows.start])
        for table, own, what in (
            (self.known, by_itself, "that no barrier passed on"),
            (self.fenced[SHARED], fenced_itself, "that no fence.proxy.async passed on"),
        ):
            late = (stamp >= table[at].min(0)[column]) & (writer >= 0) & ~own
            if late.any():
                return self._late(late, index, f"{kind} {what}", number, h.written_at)

    # ---- global memory

    def global_read(
        self, cta: Any, number: int, t: np.ndarray, offset: np.ndarray, size: int, scope: str = "", bulk: bool = False
    ) -> None:
        h = self.words
        t, index = self._spread(t, offset, size)
        self._known_global(cta, number, t, index, h, scope, bulk, "read after write")
        if scope:
            return
        if self.is_local:
            other = (h.reads[0, index] > 0) & (h.reader[0, index] != cta.number % MANY)
            h.reader[0, index] = np.where(other, -1, cta.number % MANY)
            h.reads[0, index] = self.now
        else:
            h.reads[cta.number, index], h.reader[cta.number, index] = self.now, t // WARP
        h.read_at[index] = number

    def global_write(
        self, cta: Any, number: int, t: np.ndarray, offset: np.ndarray, size: int, scope: str = "", bulk: bool = False
    ) -> None:
        h = self.words
        t, index = self._spread(t, offset, size)
        self._known_global(cta, number, t, index, h, scope, bulk, "write after write")
        if self.is_local:
            late = (h.reads[0, index] > 0) & (h.reader[0, index] != cta.number % MANY)
        else:
            stamps = h.reads[:, index]
            readers = np.flatnonzero(stamps.any(1))
            readers = readers[readers != cta.number]
            stamps = stamps[readers]
            columns = readers[:, None] * self.columns + h.reader[readers][:, index]
            late = ((stamps >= self.known[self.row(cta) + t, columns]) & (stamps > 0)).any(0)
        if late.any():
            first = index[late][0]
            self.report("write after read", number, h.read_at[first], self.memory.name(int(first) * self.granule))
        h.write(index, cta.number * self.threads + t, self.now, number)
        h.reach[index] = self.reach[scope]

    def _known_global(self, cta: Any, number: int, t: np.ndarray, index: Index, h: Half, scope: str, bulk: bool, kind: str) -> None:
        """`bulk`: an access of TMA, through the async proxy."""
        writer = h.writer[index]
        if (writer < 0).all():
            return
        of = np.maximum(writer, 0)
        others = of // self.threads
        column = of % self.threads // WARP + (0 if self.is_local else others * self.columns)
        known = (self.fenced[GLOBAL] if bulk else self.known)[self.row(cta) + t, column]
        if self.is_local:
            known = np.where(others == cta.number, known, 0)
        late = (h.stamp[index] >= known) & (writer >= 0) & (writer != cta.number * self.threads + t)
        if scope:
            late &= ~morally_strong(cta.number, self.reach[scope], others, h.reach[index])
        if late.any():
            first = index[late][0]
            place = f"{self.memory.name(int(first) * self.granule)}, CTA {cta.number} behind CTA {others[late][0]}"
            self.report(kind, number, h.written_at[first], place)
