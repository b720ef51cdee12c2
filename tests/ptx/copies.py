"""A CTA's asynchronous copies: cp.async, TMA (cp.async.bulk.tensor), and the mbarriers that count them.

Data arrives as late as it may: cp.async's when its group is waited for, TMA's whenever the scheduler says so. Until then the target
is poisoned with ones, NaN in every float. What TMA stores, or adds, to global memory lands there whenever the scheduler says so as
well, at the latest when its group is waited for, and not yet when just the reads of its group are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from . import tensor_cores
from .memory import Accesses


@dataclass(frozen=True)
class Descriptor:
    """A tensor map: the tensor in global memory, in elements, and the box that a copy moves."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    size: int  # bytes of an element
    swizzle: int  # bytes
    dtype: Any  # torch's


@dataclass
class Barrier:
    """An mbarrier: 9.7.13.15. A phase completes when no arrival and no byte is pending."""

    count: int
    pending: int
    phase: int = 0
    bytes: int = 0
    clock: Any = None  # of the phase that completed last
    gathered: Any = None  # of the current one


@dataclass
class Departure:
    """A bulk store or addition on its way: the granules of shared memory that it reads, None once that was waited for, and what
    puts it into global memory, None once it is there."""

    reads: Any
    land: Any


@dataclass
class Copies(Accesses):
    """The part of a CTA that copies. `context` is the first thread of the context that runs: its threads copy together."""

    context: int = 0
    open_copies: dict[int, list[Any]] = field(default_factory=dict)
    groups: dict[int, list[list[Any]]] = field(default_factory=dict)
    barriers: dict[int, Barrier] = field(default_factory=dict)
    open_bulk: dict[int, list[Departure]] = field(default_factory=dict)
    bulk: dict[int, list[list[Departure]]] = field(default_factory=dict)

    # ---- cp.async

    def copy(self, number: int, s: Any, to: np.ndarray, source: np.ndarray, size: int, count: Any, mask: Any) -> None:
        """`count` bytes a thread, the rest of `size` is zeros; None: all."""
        lanes = self.lanes(s, mask)
        count = np.full(lanes.size, size) if count is None else count
        t, to, source, count = self.tid[s][lanes], to[lanes], source[lanes], count[lanes]
        if not t.size:
            return
        offset, live = self.shared_at(number, to, size), count > 0
        of = np.zeros(t.size, np.int64)
        if live.any():
            of[live] = self.global_at(number, source[live], size, True)
            self.races.global_read(self, number, t[live], of[live], size)
        self.races.copy_begins(self, number, t, offset, size)
        words = np.arange(size // 4)[:, None]
        index = offset // 4 + words
        self.shared_views[4][index] = 0xFFFFFFFF
        self.open_copies.setdefault(self.context, []).append((t, offset, size, index, of // 4 + words, count > 4 * words))

    def commit_copies(self) -> None:
        self.groups.setdefault(self.context, []).append(self.open_copies.pop(self.context, []))

    def wait_copies(self, most: int) -> None:
        groups = self.groups.get(self.context, [])
        while len(groups) > most:
            for t, offset, size, index, source, live in groups.pop(0):
                self.shared_views[4][index] = np.where(live, self.memory.views[4][source], np.uint32(0))
                self.races.copy_ends(self, t, offset, size)

    # ---- mbarriers

    def _each(self, s: Any, mask: Any, *arrays: Any) -> Any:
        """(thread, one element of each array) of the threads that the guard leaves."""
        t = self.tid[s]
        for n in np.flatnonzero(self.lanes(s, mask)).tolist():
            yield (int(t[n]), *(int(np.broadcast_to(array, t.shape)[n]) for array in arrays))

    def _barrier(self, number: int, address: int) -> Barrier:
        if address not in self.barriers:
            raise self.fault(number, f"no mbarrier was initialised at byte {address - self.shared_base} of shared memory")
        return self.barriers[address]

    def _touch(self, number: int, thread: Any, address: Any) -> None:
        """An mbarrier is memory: whoever uses it must know that it was initialised."""
        offset = self.shared_at(number, np.atleast_1d(address), 8)
        self.races.shared_read(self, number, np.atleast_1d(thread), offset, 8)

    def init_barrier(self, number: int, s: Any, address: np.ndarray, mask: Any, count: np.ndarray) -> None:
        for thread, at, arrivals in self._each(s, mask, address, count):
            self.races.shared_write(self, number, np.array([thread]), self.shared_at(number, np.array([at]), 8), 8)
            self.barriers[at] = Barrier(arrivals, arrivals)

    def end_barrier(self, number: int, s: Any, address: np.ndarray, mask: Any) -> None:
        for thread, at in self._each(s, mask, address):
            self._barrier(number, at)
            self.races.shared_write(self, number, np.array([thread]), self.shared_at(number, np.array([at]), 8), 8)
            del self.barriers[at]

    def arrive_barrier(self, number: int, s: Any, address: np.ndarray, mask: Any, arrivals: np.ndarray, added: np.ndarray) -> None:
        for thread, at, count, expected in self._each(s, mask, address, arrivals, added):
            barrier = self._barrier(number, at)
            self._touch(number, thread, at)
            barrier.bytes += expected
            self.arrived(number, barrier, count, self.races.thread_clock(self, thread))

    def arrived(self, number: int, barrier: Barrier, count: int, clock: Any) -> None:
        barrier.gathered = self.races.join(barrier.gathered or barrier.clock, clock)
        barrier.pending -= count
        if barrier.pending < 0:
            raise self.fault(number, "an mbarrier has more arrivals than it counts")
        if not barrier.pending and not barrier.bytes:
            barrier.phase += 1
            barrier.pending = barrier.count
            barrier.clock, barrier.gathered = barrier.gathered, None
            self.machine.events += 1

    def wait_barrier(self, number: int, s: Any, address: np.ndarray, mask: Any, parity: np.ndarray) -> np.ndarray:
        """Whether the phase of this parity is complete, a thread each."""
        t, self.polls = self.tid[s], self.polls + 1
        passed = np.zeros(t.size, bool)
        for at in np.unique(address).tolist():
            barrier, here = self._barrier(number, at), address == at
            self._touch(number, t[here], address[here])
            passed |= here & ((barrier.phase & 1) != parity)
            self.races.learn(self, t[here & passed], barrier.clock)
        return passed

    # ---- TMA

    def _box(self, number: int, descriptor: int, at: list[int], address: int) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray]:
        """(descriptor, bytes in shared memory, offsets in global memory, whether the element is inside of the tensor)."""
        found = self.machine.descriptors.get(descriptor)
        if found is None:
            raise self.fault(number, f"no descriptor of a tensor at {descriptor:#x}")
        try:
            target = tensor_cores.tma_addresses(address, found.box, found.size, found.swizzle)
        except tensor_cores.Unsupported as error:
            raise self.fault(number, str(error)) from error
        places = np.indices(found.box).reshape(len(found.box), -1) + np.array(at[::-1])[:, None]
        inside = ((places >= 0) & (places < np.array(found.shape)[:, None])).all(0)
        source = found.address + (places * np.array(found.strides)[:, None]).sum(0) * found.size
        return found, self.shared_at(number, target.ravel(), found.size), source, inside

    def load_box(
        self, number: int, s: Any, to: np.ndarray, descriptor: Any, at: np.ndarray, barrier: np.ndarray, mask: Any
    ) -> None:
        for thread, address, handle, where, *place in self._each(s, mask, to, descriptor, barrier, *at):
            found, offset, source, inside = self._box(number, handle, place, address)
            of = self.global_at(number, source[inside], found.size, True)
            self.races.global_read(self, number, np.full(of.shape, thread), of, found.size)
            state = self._barrier(number, where)
            self.races.async_touch(self, number, thread, self.shared_at(number, np.array([where]), 8), 8)
            touched = self.races.granules(offset, found.size)
            self.races.bulk_begins(self, number, thread, touched)
            view = self.shared_views[found.size]
            index = offset // found.size
            view[index] = np.iinfo(view.dtype).max
            self.machine.flying.append(
                partial(self._box_arrives, number, found.size, state, index, of // found.size, inside, touched)
            )

    def _box_arrives(self, number: int, size: int, state: Barrier, index: Any, source: Any, inside: Any, touched: Any) -> None:
        data = np.zeros(index.size, self.shared_views[size].dtype)
        data[inside] = self.memory.views[size][source]
        self.shared_views[size][index] = data
        state.bytes -= index.size * size
        self.arrived(number, state, 0, self.races.bulk_ends(self, touched))

    def store_box(self, number: int, s: Any, source: np.ndarray, descriptor: Any, at: np.ndarray, adds: bool, mask: Any) -> None:
        """Stores, or adds, a box. The additions count as plain accesses."""
        for thread, address, handle, *place in self._each(s, mask, source, descriptor, *at):
            found, offset, target, inside = self._box(number, handle, place, address)
            if adds and found.dtype != torch.float32:
                raise self.fault(number, f"no semantics for an addition of {found.dtype}")
            self._departs(number, thread, offset, inside, target[inside], found.size, adds)

    def add_bulk(self, number: int, s: Any, source: np.ndarray, to: np.ndarray, count: np.ndarray, mask: Any) -> None:
        """Adds `count` bytes of fp32 to global memory."""
        for thread, address, target, size in self._each(s, mask, source, to, count):
            if (address | target | size) % 16:
                raise self.fault(number, "a bulk copy whose addresses or size are no multiple of 16 bytes")
            words = np.arange(0, size, 4)
            offset = self.shared_at(number, address + words, 4)
            self._departs(number, thread, offset, np.ones(words.size, bool), target + words, 4, True)

    def _departs(
        self, number: int, thread: int, offset: np.ndarray, inside: np.ndarray, target: np.ndarray, size: int, adds: bool
    ) -> None:
        """Elements of shared memory, of which those `inside` are on their way to `target`."""
        index = self.races.granules(offset, size)
        self.races.async_read(self, number, slice(thread, thread + 1), index)
        of = self.global_at(number, target, size, False)
        data = self.shared_views[size][offset // size][inside]
        departure = Departure(index, partial(self._lands, number, thread, of, data, adds))
        self.open_bulk.setdefault(thread, []).append(departure)
        self.machine.flying.append(partial(_landed, departure))

    def _lands(self, number: int, thread: int, of: np.ndarray, data: np.ndarray, adds: bool) -> None:
        size, t = data.itemsize, np.full(of.shape, thread)
        view = self.memory.views[size]
        if adds:
            self.global_at(number, of + self.memory.base, size, True)
            self.races.global_read(self, number, t, of, size, bulk=True)
            view = view.view(np.float32)
            data = view[of // size] + data.view(np.float32)
        self.races.global_write(self, number, t, of, size, bulk=True)
        view[of // size] = data
        self._wrote(of, size)

    def commit_bulk(self, number: int, s: Any, mask: Any) -> None:
        for (thread,) in self._each(s, mask):
            self.bulk.setdefault(thread, []).append(self.open_bulk.pop(thread, []))

    def wait_bulk(self, number: int, s: Any, mask: Any, most: int, reads: bool) -> None:
        """`reads`: only until shared memory was read."""
        for (thread,) in self._each(s, mask):
            groups = self.bulk.get(thread, [])
            done = groups[: len(groups) - most]
            for departure in (each for group in done for each in group):
                if departure.reads is not None:
                    self.races.async_read_ends(self, slice(thread, thread + 1), departure.reads)
                    departure.reads = None
                if not reads:
                    _landed(departure)
            if not reads:
                del groups[: len(done)]


def _landed(departure: Departure) -> None:
    if departure.land:
        departure.land()
        departure.land = None
