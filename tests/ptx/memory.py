"""Global memory, and the accesses of a CTA to it and to shared memory: bounds, alignment, reads of what nobody wrote.

`Global` is one arena, in which torch's tensors lie as well: a kernel sees what an op wrote, and the other way round. Between
allocations lies memory that faults. New memory is full of ones, NaN in every float, and counts as not written.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .arithmetic import OPERATIONS, by_elements
from .clocks import Order

GAP, ALIGNED = 512, 512  # bytes between allocations, and of their beginnings, as torch's allocator has them
INTEGERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Fault(RuntimeError):
    """What a GPU would fault on or hang at, or what is undefined there."""


class Global:
    """The arena; addresses are the process's own, so that tensors' data_ptr() are addresses here."""

    def __init__(self, size: int) -> None:
        self.tensor = torch.full((size + ALIGNED,), 0xFF, dtype=torch.uint8)
        skipped = -self.tensor.data_ptr() % ALIGNED
        self.tensor = self.tensor[skipped : skipped + size]
        self.bytes = self.tensor.numpy()
        self.base = self.tensor.data_ptr()
        self.views = {width: self.bytes.view(dtype) for width, dtype in INTEGERS.items()}
        self.valid, self.written = np.zeros(size, bool), np.zeros(size, bool)
        self.used = 0
        self.names: list[tuple[int, int, str]] = []

    def empty(self, size: Any, stride: Any, dtype: torch.dtype, name: str = "") -> torch.Tensor:
        """A tensor in the arena. Raises MemoryError where it is full."""
        elements = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True)) if 0 not in tuple(size) else 0
        count = elements * dtype.itemsize
        start = self.used
        if start + count + GAP > self.bytes.size:
            raise MemoryError(f"{start + count} bytes of tensors, and the arena has {self.bytes.size}: ask for smaller sizes")
        self.used = -(-(start + count + GAP) // ALIGNED) * ALIGNED
        self.valid[start : start + count] = True
        self.names.append((start, start + count, name or f"tensor {len(self.names)}, {dtype} {tuple(size)}"))
        alone = self.tensor.data  # else autograd took a write to one tensor for a write to all
        return alone[start : start + count].view(dtype).as_strided(size, stride)

    def put(self, tensor: torch.Tensor, name: str = "") -> torch.Tensor:
        """A copy of a tensor, in the arena, with its strides."""
        made = self.empty(tensor.shape, tensor.stride(), tensor.dtype, name)
        made.copy_(tensor)
        self.mark(made)
        return made

    def holds(self, tensor: torch.Tensor) -> bool:
        return self.base <= tensor.data_ptr() < self.base + self.bytes.size

    def mark(self, tensor: torch.Tensor) -> None:
        """All of a tensor was written."""
        if tensor.numel() and self.holds(tensor):
            start = tensor.data_ptr() - self.base
            count = tensor.element_size() * (1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)))
            self.written[start : start + count] = True

    def name(self, offset: int) -> str:
        """The tensor there."""
        found = next((f"{name}, byte {offset - start}" for start, end, name in self.names if start <= offset < end), None)
        return found or "memory outside of every tensor"


class Accesses:
    """A CTA's loads, stores and atomics. Arrays of addresses have an element a thread of `s`, values are [elements, threads]."""

    machine: Any
    memory: Global
    races: Any
    tid: np.ndarray
    shared: np.ndarray
    shared_views: dict[int, np.ndarray]
    shared_base: int
    polls: int

    def fault(self, number: int, text: str) -> Fault:
        raise NotImplementedError

    def shared_at(self, number: int, address: np.ndarray, size: int) -> np.ndarray:
        """Offsets in shared memory; Fault outside of it, or where not aligned to `size`."""
        offset = address - self.shared_base
        if offset.size and (offset.min() < 0 or offset.max() + size > self.shared.size):
            wrong = offset[(offset < 0) | (offset + size > self.shared.size)][0]
            raise self.fault(number, f"byte {wrong} of shared memory, which has {self.shared.size}")
        if (offset % size).any():
            raise self.fault(number, f"a misaligned access of {size} bytes of shared memory")
        return offset

    def global_at(self, number: int, address: np.ndarray, size: int, is_read: bool) -> np.ndarray:
        """Offsets in the arena; Fault outside of every tensor, where misaligned, and at reads of what was never written."""
        offset, memory = address - self.memory.base, self.memory
        inside = (offset >= 0) & (offset + size <= memory.bytes.size)
        inside[inside] = memory.valid[offset[inside]] & memory.valid[offset[inside] + size - 1]
        if not inside.all():
            raise self.fault(number, f"global memory outside of every tensor, behind {self._before(int(offset[~inside][0]))}")
        if (offset % size).any():
            raise self.fault(number, f"a misaligned access of {size} bytes of {memory.name(int(offset[offset % size > 0][0]))}")
        if is_read and not memory.written[offset].all():
            raise self.fault(number, f"reads what nobody wrote: {memory.name(int(offset[~memory.written[offset]][0]))}")
        return offset

    def _before(self, offset: int) -> str:
        ends = [(end, name) for start, end, name in self.memory.names if start <= offset]
        return f"{ends[-1][1]}, by {offset - ends[-1][0]} bytes" if ends else "none"

    def lanes(self, s: Any, mask: Any) -> np.ndarray:
        """Which threads of `s` a guard lets pass."""
        size = self.tid[s].size
        return np.ones(size, bool) if mask is None else np.broadcast_to(mask, size)

    def masked(self, s: Any, mask: Any) -> np.ndarray:
        """The threads of `s` that a guard lets pass."""
        return self.tid[s][self.lanes(s, mask)]

    def load(
        self, number: int, s: Any, address: np.ndarray, mask: Any, kind: str, count: int, space: str, order: Order, used: int
    ) -> np.ndarray:
        """`count` elements a thread; only the first `used` bytes matter to the kernel, if it is not 0."""
        lanes, dtype = self.lanes(s, mask), np.dtype(kind)
        made = np.zeros((count, lanes.size), dtype)
        t, size = self.tid[s][lanes], dtype.itemsize * count
        if not t.size:
            return made
        if space == "shared":
            offset, views = self.shared_at(number, address[lanes], size), self.shared_views
            self.races.shared_read(self, number, t, offset, used or size)
        else:
            offset, views = self.global_at(number, address[lanes], size, True), self.memory.views
            self.races.global_read(self, number, t, offset, size, order.scope)
            if order.scope:
                self.polls += 1
                self.races.acquire(self, t, offset, order)
        made[:, lanes] = views[dtype.itemsize][offset // dtype.itemsize + np.arange(count)[:, None]]
        return made

    def store(self, number: int, s: Any, address: np.ndarray, mask: Any, values: np.ndarray, space: str, order: Order) -> None:
        lanes = self.lanes(s, mask)
        t, values = self.tid[s][lanes], values[:, lanes]
        if not t.size:
            return
        size = values.itemsize * len(values)
        if space == "shared":
            offset, views = self.shared_at(number, address[lanes], size), self.shared_views
            self.races.shared_write(self, number, t, offset, size, values)
        else:
            offset, views = self.global_at(number, address[lanes], size, False), self.memory.views
            self.races.global_write(self, number, t, offset, size, order.scope)
            if order.scope:
                self.races.release(self, t, offset, order, is_atomic=False)
            self._wrote(offset, size)
        views[values.itemsize][offset // values.itemsize + np.arange(len(values))[:, None]] = values

    def _wrote(self, offset: np.ndarray, size: int) -> None:
        self.memory.written[offset[:, None] + np.arange(size)] = True
        self.machine.events += 1

    def atomic(
        self, number: int, s: Any, address: np.ndarray, mask: Any, given: list[np.ndarray], what: str, order: Order, kind: str
    ) -> np.ndarray:
        """What stood there before, as unsigned integers. Additions of floats count as plain accesses: their order decides bits."""
        old = np.zeros(given[0].shape, INTEGERS[given[0].itemsize])
        lanes = self.lanes(s, mask)
        if not lanes.any():
            return old
        t, address, given = self.tid[s][lanes], address[lanes], [values[:, lanes] for values in given]
        count, size = len(given[0]), given[0].itemsize
        offset = self.global_at(number, address, size * count, True)
        is_float = kind[0] in "fb" and kind not in ("b16", "b32", "b64")
        scope = "" if is_float else order.scope
        self.races.global_read(self, number, t, offset, size * count, scope)
        self.races.global_write(self, number, t, offset, size * count, scope)
        if not is_float:
            self.races.acquire(self, t, offset, order)
            self.races.release(self, t, offset, order, is_atomic=True)
        index = offset // size + np.arange(count)[:, None]
        view = self.memory.views[size].view(given[0].dtype)
        if np.unique(index).size == index.size:
            found = view[index]
            view[index] = combined(what, kind, found, *given)
        else:
            found = np.empty(index.shape, given[0].dtype)
            for n in range(t.size):
                found[:, n] = view[index[:, n]]
                view[index[:, n]] = combined(what, kind, found[:, n], *(values[:, n] for values in given))
        old[:, lanes] = found.view(old.dtype)
        self._wrote(offset, size * count)
        return old


def combined(what: str, kind: str, old: np.ndarray, *given: np.ndarray) -> np.ndarray:
    """What an atomic leaves: 9.7.13.5."""
    if what == "add" and kind.endswith("x2"):
        return by_elements("add", kind, old, given[0])
    if what == "cas":
        return np.where(old == given[0], given[1], old)
    return given[0] if what == "exch" else OPERATIONS[what](old, given[0])
