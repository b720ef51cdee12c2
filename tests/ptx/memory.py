"""Global memory, and the accesses of a CTA to it and to shared memory: bounds, alignment, reads of what nobody wrote.

`Global` is one arena, in which torch's tensors lie as well: a kernel sees what an op wrote, and the other way round. Between
allocations lies memory that faults. New memory is full of ones, NaN in every float, and counts as not written.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .arithmetic import OPERATIONS, by_elements

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

    def masked(self, s: Any, mask: Any) -> np.ndarray:
        """The threads of s that a guard leaves."""
        t = self.tid[s]
        return t if mask is None else t[np.broadcast_to(mask, t.shape)]

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
        offset = address - self.memory.base
        if not offset.size:
            return offset
        low, high = offset.min(), offset.max() + size
        inside = low >= 0 and high <= self.memory.bytes.size
        if not inside or not (self.memory.valid[offset].all() and self.memory.valid[offset + size - 1].all()):
            if inside:
                wrong = offset[~(self.memory.valid[offset] & self.memory.valid[offset + size - 1])][0]
            else:
                wrong = low if low < 0 else high
            raise self.fault(number, f"global memory outside of every tensor, behind {self._before(int(wrong))}")
        if (offset % size).any():
            raise self.fault(
                number, f"a misaligned access of {size} bytes of {self.memory.name(int(offset[offset % size > 0][0]))}"
            )
        if is_read and not self.memory.written[offset].all():
            raise self.fault(number, f"reads what nobody wrote: {self.memory.name(int(offset[~self.memory.written[offset]][0]))}")
        return offset

    def _before(self, offset: int) -> str:
        ends = [(end, name) for start, end, name in self.memory.names if start <= offset]
        return f"{ends[-1][1]}, by {offset - ends[-1][0]} bytes" if ends else "none"

    def _lanes(self, s: Any, mask: Any) -> tuple[np.ndarray, np.ndarray]:
        """The threads of `s` that a predicate lets pass, and which of those of `s` they are."""
        t = self.tid[s]
        lanes = np.ones(t.shape, bool) if mask is None else np.broadcast_to(mask, t.shape)
        return t[lanes], lanes

    # ---- shared memory

    def load_shared(
        self, number: int, s: Any, address: np.ndarray, mask: Any, size: int, count: int, order: str, used: int
    ) -> np.ndarray:
        t, lanes = self._lanes(s, mask)
        made = np.zeros((count, lanes.size), INTEGERS[size])
        if not t.size:
            return made
        offset = self.shared_at(number, address[lanes], size * count)
        self.races.shared_read(self, number, t, offset, used or size * count)
        made[:, lanes] = self.shared_views[size][offset // size + np.arange(count)[:, None]]
        return made

    def store_shared(self, number: int, s: Any, address: np.ndarray, mask: Any, values: np.ndarray, order: str) -> None:
        t, lanes = self._lanes(s, mask)
        if not t.size:
            return
        address, values = address[lanes], values[:, lanes]
        size = values.itemsize
        offset = self.shared_at(number, address, size * len(values))
        self.races.shared_write(self, number, t, offset, size * len(values), values)
        self.shared_views[size][offset // size + np.arange(len(values))[:, None]] = values

    # ---- global memory

    def load_global(
        self, number: int, s: Any, address: np.ndarray, mask: Any, size: int, count: int, order: str, used: int
    ) -> np.ndarray:
        t, lanes = self._lanes(s, mask)
        made = np.zeros((count, lanes.size), INTEGERS[size])
        if not t.size:
            return made
        offset = self.global_at(number, address[lanes], size * count, True)
        if order == "weak":
            self.races.global_read(self, number, t, offset, size * count)
        else:
            self.polls += 1
            self.races.global_read(self, number, t, offset, size * count, strong=True)
            self.races.acquire(self, t, offset, order)
        made[:, lanes] = self.memory.views[size][offset // size + np.arange(count)[:, None]]
        return made

    def store_global(self, number: int, s: Any, address: np.ndarray, mask: Any, values: np.ndarray, order: str) -> None:
        t, lanes = self._lanes(s, mask)
        if not t.size:
            return
        address, values = address[lanes], values[:, lanes]
        size = values.itemsize
        offset = self.global_at(number, address, size * len(values), False)
        self.races.global_write(self, number, t, offset, size * len(values), strong=order != "weak")
        if order != "weak":
            self.races.release(self, t, offset, order)
        self.memory.views[size][offset // size + np.arange(len(values))[:, None]] = values
        self._wrote(offset, size * len(values))

    def _wrote(self, offset: np.ndarray, size: int) -> None:
        self.memory.written[offset[:, None] + np.arange(size)] = True
        self.machine.events += 1

    def atomic(
        self, number: int, s: Any, address: np.ndarray, mask: Any, given: list[np.ndarray], what: str, order: str, kind: str
    ) -> np.ndarray:
        """What stood there before, as unsigned integers. Additions of floats count as plain accesses: their order decides bits."""
        t = self.tid[s]
        old = np.zeros(given[0].shape, INTEGERS[given[0].itemsize])
        mask = np.ones(t.size, bool) if mask is None else np.broadcast_to(mask, t.shape)
        if not mask.any():
            return old
        t, address, given = t[mask], address[mask], [values[:, mask] for values in given]
        count, size = len(given[0]), given[0].itemsize
        offset = self.global_at(number, address, size * count, True)
        is_float = kind[0] in "fb" and kind not in ("b16", "b32", "b64")
        self.races.global_read(self, number, t, offset, size * count, strong=not is_float)
        self.races.global_write(self, number, t, offset, size * count, strong=not is_float)
        if not is_float:
            self.races.acquire(self, t, offset, order)
            self.races.release(self, t, offset, order)
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
        old[:, mask] = found.view(old.dtype)
        self._wrote(offset, size * count)
        return old


def combined(what: str, kind: str, old: np.ndarray, *given: np.ndarray) -> np.ndarray:
    """What an atomic leaves: 9.7.13.5."""
    if what == "add" and kind.endswith("x2"):
        return by_elements("add", kind, old, given[0])
    if what == "cas":
        return np.where(old == given[0], given[1], old)
    return given[0] if what == "exch" else OPERATIONS[what](old, given[0])
