"""A CTA's warps at work together: shuffles, votes, matrices in registers and shared memory, wgmma, sm_100's tensor memory.

Which thread holds what is tensor_cores' to say. wgmma multiplies when it is issued; its registers and what it reads of shared
memory are in flight until waited for, and who touches them before is reported. Registers that others touched need a wgmma.fence
before it (ISA 9.7.15.7.1). Tensor memory has values, but no model of races.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import tensor_cores as T
from .arithmetic import OPERATIONS
from .clocks import WEAK
from .copies import Copies
from .parse import Instruction, Vector, names
from .shadow import granules

WARPGROUP = 128


@dataclass
class Group:
    """Matmuls that one warpgroup issued: registers, and granules of shared memory, of those not yet waited for."""

    open: list[tuple[set[str], Any]] = field(default_factory=list)
    committed: list[list[tuple[set[str], Any]]] = field(default_factory=list)
    in_flight: set[str] = field(default_factory=set)
    touched: set[str] = field(default_factory=set)  # by other instructions since the last wgmma.fence
    is_fenced: bool = False  # whether there was one

    def update(self) -> None:
        self.in_flight = {name for group in [*self.committed, self.open] for registers, _ in group for name in registers}


@functools.lru_cache(4096)
def element_addresses(descriptor: T.MatrixDescriptor, rows: int, depth: int, size: int, mn_major: bool) -> np.ndarray:
    return T.element_addresses(descriptor, rows, depth, size, mn_major)


@functools.lru_cache(4096)
def matrix_granules(
    base: int, granule: int, descriptor: T.MatrixDescriptor, rows: int, depth: int, size: int, mn_major: bool
) -> np.ndarray:
    """Of a matrix in shared memory, which begins at `base`. A loop reads the same few matrices again and again."""
    return granules(element_addresses(descriptor, rows, depth, size, mn_major) - base, size, granule)


@dataclass
class Matmuls(Copies):
    """The part of a CTA that works by warps."""

    P: Any = None  # register files: predicates, 32 bits, 64 bits
    W: Any = None
    D: Any = None
    wgmma_groups: list[Group] = field(default_factory=list)
    tensor_memory: Any = None

    def warps(self, number: int, s: Any) -> np.ndarray:
        """Threads of s, which must be whole warps."""
        t = self.tid[s]
        if t.size % 32 or (t.reshape(-1, 32) % 32 != np.arange(32)).any():
            raise self.fault(number, "a warp's lanes are apart at an instruction that all of them must execute")
        return t

    def uniform(self, number: int, operand: Any, s: Any) -> int:
        """An immediate, or what a register has in all threads of s."""
        rows = self.machine.program.rows
        if operand not in rows:
            return int(str(operand), 0)
        file, row = rows[operand]
        values = getattr(self, file)[row, s]
        if (values != values[0]).any():
            raise self.fault(number, f"threads differ in {operand}")
        return int(values[0])

    def shuffle(self, number: int, s: Any, value: np.ndarray, mode: str, by: Any, clamp: Any) -> tuple[np.ndarray, np.ndarray]:
        """shfl.sync, 9.7.9.6: the value of the lane, and whether it is in range."""
        lanes = self.warps(number, s) % 32
        by, clamp = (np.broadcast_to(x, lanes.shape).astype(np.int64) for x in (by, clamp))
        segment = clamp >> 8 & 31
        least, most = lanes & segment, (lanes & segment) | (clamp & 31 & ~segment)
        source = {"up": lanes - by, "down": lanes + by, "bfly": lanes ^ by, "idx": least | (by & 31 & ~segment)}[mode]
        valid = source >= most if mode == "up" else source <= most
        source = np.where(valid, source, lanes)
        return value.reshape(-1, 32)[np.arange(lanes.size) // 32, source], valid

    def reduce(self, number: int, s: Any, value: np.ndarray, op: str) -> np.ndarray:
        self.warps(number, s)
        return np.repeat(OPERATIONS[op].reduce(value.reshape(-1, 32), axis=1, dtype=value.dtype), 32)

    def elect(self, s: Any) -> tuple[np.ndarray, np.ndarray]:
        """The number of the last lane of each thread's warp, and whether the thread is that lane.

        Which lane it is stands nowhere, but that it is always the same: 9.7.13.16. Kernels poll and release in the first.
        """
        t = self.tid[s]
        is_last = np.concatenate([np.diff(t // 32) > 0, [True]])
        return (t[is_last] % 32)[np.cumsum(is_last) - is_last].astype(np.uint32), is_last

    def mma(self, number: int, s: Any, opcode: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        self.warps(number, s)
        p = T.mma(opcode)
        assert p.b
        return T.registers(T.multiply_add(T.matrix(a, p.a, p.element), T.matrix(b, p.b, p.element), T.matrix(c, p.d)), p.d)

    def load_matrix(self, number: int, s: Any, address: np.ndarray, opcode: str) -> np.ndarray:
        t, (matrices, transposed) = self.warps(number, s), T.matrix_tiles(opcode)
        rows = T.row_addresses(address, matrices)
        offset = self.shared_at(number, rows.ravel(), 16)
        self.races.shared_read(self, number, T.row_addresses(t, matrices).ravel(), offset, 16, warp_wide=True)
        found = self.shared_views[2][offset[:, None] // 2 + np.arange(8)]
        return T.ldmatrix(found.reshape(*rows.shape, 8), transposed)

    def store_matrix(self, number: int, s: Any, address: np.ndarray, values: np.ndarray, opcode: str) -> None:
        t, (matrices, transposed) = self.warps(number, s), T.matrix_tiles(opcode)
        rows = T.row_addresses(address, matrices)
        offset = self.shared_at(number, rows.ravel(), 16)
        stored = T.stmatrix(values, transposed).reshape(-1, 8)
        self.races.shared_write(self, number, T.row_addresses(t, matrices).ravel(), offset, 16, stored.T)
        self.shared_views[2][offset[:, None] // 2 + np.arange(8)] = stored

    # ---- wgmma

    def in_shared(
        self, number: int, descriptor: T.MatrixDescriptor, rows: int, depth: int, element: str, mn_major: bool
    ) -> tuple[Any, Any]:
        """[rows, depth] of a matrix in shared memory, and its granules there, if races are looked for."""
        size = T.BITS[element] // 8
        offset = element_addresses(descriptor, rows, depth, size, mn_major) - self.shared_base
        if offset.min() < 0 or offset.max() + size > self.shared.size:
            raise self.fault(number, f"a matrix at byte {offset.min()} to {offset.max()} of shared memory")
        words = self.shared_views[size][offset // size]
        touched = None
        if self.races.checks:
            touched = matrix_granules(self.shared_base, self.races.granule, descriptor, rows, depth, size, mn_major)
        return T.unpack(words.astype(np.uint32), element)[..., 0], touched

    def wgmma(self, number: int, instruction: Instruction, lo: int) -> None:
        """One warpgroup's, from thread lo on."""
        program, group, s = self.machine.program, self.wgmma_groups[lo // WARPGROUP], slice(lo, lo + WARPGROUP)
        opcode, o = instruction.opcode, instruction.operands
        if ".mma_async" not in opcode:
            return self._wgmma_order(number, opcode, o, group, s)
        p = T.wgmma(opcode)
        target = list(names(o[0]))
        rows = [program.rows[name][1] for name in target]
        accumulates = self.uniform(number, o[3], s) != 0
        flags = [int(str(x), 0) for x in o[4:]]
        if any(flag != 1 for flag in flags[:2]):
            raise self.fault(number, "no semantics for a wgmma that negates")
        transposes = flags[2:] if p.element != "tf32" else [0, 0]
        used: set[str] = set()
        read = None
        if isinstance(o[1], Vector):
            used = set(o[1].items)
            a = T.matrix(self.W[[program.rows[name][1] for name in o[1].items], s], p.a, p.element)[0]
            transposes = [0, *transposes[-1:]]
        else:
            a, read = self.in_shared(
                number, T.wgmma_descriptor(self.uniform(number, o[1], s)), 64, p.k, p.element, bool(transposes[0])
            )
        b, index = self.in_shared(
            number, T.wgmma_descriptor(self.uniform(number, o[2], s)), p.n, p.k, p.element, bool(transposes[1])
        )
        if self.races.checks:
            index = index if read is None else np.concatenate([read, index])
            self.races.async_read(self, number, s, index)
            touched = (used | set(target)) & group.touched
            if touched or not group.is_fenced:
                self.races.report("registers that no wgmma.fence passed on", number, -1, ", ".join(sorted(touched)[:3]))
        c = T.matrix(self.W[rows, s], p.d)[0] if accumulates else None
        self.W[rows, s] = T.registers(T.multiply_add(a, b.T, c)[None], p.d)
        group.open.append((set(target) | used, index))
        group.in_flight |= set(target) | used

    def _wgmma_order(self, number: int, opcode: str, o: list[Any], group: Group, s: slice) -> None:
        if ".fence" in opcode:
            group.touched.clear()
            group.is_fenced = True
        elif ".commit_group" in opcode:
            group.committed.append(group.open)
            group.open = []
        elif ".wait_group" in opcode:
            while len(group.committed) > int(o[0]):
                for _, index in group.committed.pop(0):
                    self.races.async_read_ends(self, s, index)
            group.update()
        else:
            raise NotImplementedError(opcode)

    # ---- tensor memory

    def allocate_tensor_memory(self, number: int, s: Any, address: np.ndarray, mask: Any) -> None:
        self.store(number, s, address, mask, np.zeros((1, self.tid[s].size), np.uint32), "shared", WEAK)

    def _cells(self, number: int, s: Any, opcode: str, address: np.ndarray, split: int) -> tuple[np.ndarray, np.ndarray]:
        """[threads, registers]."""
        t = self.warps(number, s)
        each = [T.tmem_cells(opcode, int(address[n]), int(t[n]) // 32, split) for n in range(0, t.size, 32)]
        lanes, columns = (np.concatenate([cells[i] for cells in each]) for i in (0, 1))
        return lanes, columns

    def load_tensor_memory(self, number: int, s: Any, opcode: str, address: np.ndarray, split: int) -> np.ndarray:
        return self.tensor_memory[self._cells(number, s, opcode, address, split)].T

    def store_tensor_memory(
        self, number: int, s: Any, opcode: str, address: np.ndarray, split: int, values: np.ndarray, mask: Any
    ) -> None:
        some = self.lanes(s, mask)
        if some.any():
            lanes, columns = self._cells(number, s, opcode, address, split)
            self.tensor_memory[lanes[some], columns[some]] = values.T[some]

    def tensor_multiply(
        self,
        number: int,
        s: Any,
        opcode: str,
        d: np.ndarray,
        a: np.ndarray,
        in_tensor_memory: bool,
        b: np.ndarray,
        flags: Any,
        adds: Any,
        mask: Any,
    ) -> None:
        for _, to, left, right, bits, accumulates in self._each(s, mask, d, a, b, flags, adds):
            p = T.instruction_descriptor(opcode, bits)
            if p.negate_a or p.negate_b:
                raise self.fault(number, "no semantics for a tcgen05.mma that negates")
            lanes = T.tmem_lanes(p.m)
            if in_tensor_memory:
                lane, column = T.tmem_address(left)
                words = self.tensor_memory[lane + lanes[:, None], column + np.arange(p.k * T.BITS[p.element] // 32)]
                first = T.unpack(words, p.element).reshape(p.m, p.k)
            else:
                first, _ = self.in_shared(number, T.tcgen05_descriptor(left), p.m, p.k, p.element, p.a_mn_major)
            second, _ = self.in_shared(number, T.tcgen05_descriptor(right), p.n, p.k, p.element, p.b_mn_major)
            lane, column = T.tmem_address(to)
            cells = lane + lanes[:, None], column + np.arange(p.n)
            old = self.tensor_memory[cells].view(np.float32) if accumulates else None
            self.tensor_memory[cells] = T.multiply_add(first, second.T, old).view(np.uint32)

    def tensor_commit(self, number: int, s: Any, address: np.ndarray, mask: Any) -> None:
        for thread, at in self._each(s, mask, address):
            self._touch(number, thread, at)
            self.arrived(number, self._barrier(number, at), 1, self.races.thread_clock(self, thread))
