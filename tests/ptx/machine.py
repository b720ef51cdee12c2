"""A launch: CTAs as generators that a seeded scheduler interleaves at barriers, polls and ends.

A CTA's threads run in lockstep where nothing sets them apart: a basic block runs for all threads whose pc is the least, so that
branches meet again. Where a kernel's warps have jobs of their own, contexts, ranges of threads, run apart from each other: the
default partition and then each warp by itself in a warp-specialised kernel; each warp by itself where one of them issues tcgen05.

A context that polls without success sleeps until something happens: an atomic, a store, a phase of a barrier, data of TMA. When all
sleep, that is a deadlock, and `Fault` names who waits where.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .lower import PARAMETERS, SHARED, Program
from .matmuls import WARPGROUP, Group, Matmuls
from .memory import INTEGERS, Fault, Global
from .parse import Instruction
from .shadow import Races, Unchecked

UNSET = 0xFFC0DEAD  # a NaN: what a register holds before it is written
ROUNDS = 32  # of a context, before another one's turn
ENDLESS = 1 << 16  # blocks of a context without a barrier or poll: a loop that nothing ends


class Cta(Matmuls):
    """Registers, shared memory and asynchronous work of one CTA."""

    def __init__(self, machine: Machine, number: int, place: tuple[int, int, int]) -> None:
        super().__init__()
        program, n = machine.program, machine.program.kernel.threads
        self.machine, self.number, self.memory, self.races = machine, number, machine.memory, machine.races
        self.tid = np.arange(n)
        self.P = np.zeros((program.sizes["P"], n), bool)
        self.H = np.full((program.sizes["H"], n), UNSET & 0xFFFF, np.uint16)
        self.W = np.full((program.sizes["W"], n), UNSET, np.uint32)
        self.D = np.full((program.sizes["D"], n), UNSET << 32 | UNSET, np.uint64)
        self.parameters = machine.parameters
        self.shared_base = SHARED
        self.shared = np.full(-(-machine.shared_bytes // 16) * 16, 0xFF, np.uint8)
        self.shared_views = {width: self.shared.view(dtype) for width, dtype in INTEGERS.items()}
        self.tensor_memory = np.full((128, 512) if program.has_tcgen05 else (0, 0), 0xFFFFFFFF, np.uint32)
        self.wgmma_groups = [Group() for _ in range(-(-n // WARPGROUP))] if program.has_wgmma else []
        self.pc, self.done = np.zeros(n, np.int64), np.zeros(n, bool)
        self.meetings: dict[int, Meeting] = {}
        self.polls = 0
        cluster, rank = divmod(number, program.kernel.cluster)
        lanes = {"laneid": self.tid % 32, "warpid": self.tid // 32, "clusterid": cluster, "cluster_ctarank": rank}
        lanes |= {"cluster_ctaidx": rank, "cluster_nctaidx": program.kernel.cluster}
        axes = zip("xyz", place, machine.grid, (n, 1, 1), strict=True)
        self._special = {name: value for x, at, of, size in axes for name, value in self._axis(x, at, of, size)} | lanes
        self.races.begin(self)

    def _axis(self, x: str, at: int, of: int, size: int) -> Iterator[tuple[str, Any]]:
        yield f"tid{x}", self.tid if x == "x" else 0
        yield from ((f"ntid{x}", size), (f"ctaid{x}", at), (f"nctaid{x}", of), (f"cluster_ctaid{x}", 0), (f"cluster_nctaid{x}", 1))

    def special(self, name: str, s: Any) -> np.ndarray:
        """A special register of threads s."""
        return np.broadcast_to(np.asarray(self._special[name]), self.tid.shape)[s]

    def fault(self, number: int, text: str) -> Fault:
        return Fault(f"{self.machine.program.kernel.name}, CTA {self.number}, {self.machine.program.kernel.where(number)}: {text}")

    # ---- running

    def run(self, lo: int, hi: int) -> Iterator[str]:
        """Threads lo to hi, a context, to their end. Yields at each poll and barrier what it waits for."""
        program, everyone, last = self.machine.program, slice(lo, hi), len(self.machine.program.blocks)
        pcs, done = self.pc[lo:hi], self.done[lo:hi]
        alone = 0  # blocks since the last barrier or poll
        while not done.all():
            live = np.where(done, last, pcs)
            pc = int(live.min())
            here = live == pc
            s: Any = everyone if here.all() else lo + np.flatnonzero(here)
            if pc == last:
                raise Fault(f"{program.kernel.name}, CTA {self.number}: ran past the last instruction")
            block, start = program.blocks[pc], program.starts[pc]
            program.reached.add(pc)
            if program.has_wgmma:
                self._in_flight(pc, block, lo, hi)
            alone += 1
            if alone > ENDLESS:
                raise self.fault(start, f"warp {lo // 32} ran {ENDLESS} blocks without a barrier or poll")
            if isinstance(block, Instruction):
                if block.opcode.startswith("bar"):
                    alone = 0
                yield from self._control(start, pc, block, s, lo, hi)
                continue
            polls = self.polls
            self.context = lo
            block(self, s)
            self.pc[s] = pc + 1
            if self.polls != polls:
                alone = 0
                yield program.where(pc)

    def _in_flight(self, pc: int, block: Any, lo: int, hi: int) -> None:
        """Reports registers that wgmma has in flight and a block touches; keeps what it touched for the next wgmma.fence."""
        program = self.machine.program
        for group in self.wgmma_groups[lo // WARPGROUP : -(-hi // WARPGROUP)]:
            if isinstance(block, Instruction) and block.opcode.startswith("wgmma"):
                continue
            touched = program.registers[pc] & group.in_flight
            if touched and self.races.checks:
                listed = ", ".join(sorted(touched)[:3])
                self.races.report("registers of a wgmma in flight", program.starts[pc], -1, listed)
            if not isinstance(block, Instruction):
                group.touched |= program.registers[pc]

    def _control(self, number: int, pc: int, block: Instruction, s: Any, lo: int, hi: int) -> Iterator[str]:
        program = self.machine.program
        family = block.opcode.partition(".")[0]
        taken: Any = True
        if block.guard and family != "wgmma":
            taken = self.P[program.rows[block.guard][1], s] ^ block.negated
        if family == "bra":
            self.pc[s] = np.where(taken, program.block_of(str(block.operands[0])), pc + 1)
        elif family == "brx":
            targets = np.array([program.block_of(label) for label in program.kernel.tables[str(block.operands[1])]])
            self.pc[s] = targets[self.W[program.rows[str(block.operands[0])][1], s]]
        elif family in ("ret", "exit"):
            self.pc[s] = pc + 1
            leaving = np.zeros(self.done.size, bool)
            leaving[s] = taken
            self.done |= leaving
            self.machine.events += 1
        elif family == "wgmma":
            t = self.warps(number, s)
            if t.size % WARPGROUP or (t[::WARPGROUP] % WARPGROUP).any() or block.guard:
                raise self.fault(number, "not all threads of a warpgroup execute it together")
            for first in t[::WARPGROUP].tolist():
                self.wgmma(number, block, first)
            self.pc[s] = pc + 1
        elif family in ("bar", "barrier"):
            yield from self._meet(number, pc, block, s, taken)
        else:
            raise self.fault(number, "an assertion of the kernel failed" if family == "call" else "a trap")

    def _meet(self, number: int, pc: int, block: Instruction, s: Any, taken: Any) -> Iterator[str]:
        """bar.sync and bar.arrive, by whole warps: 9.7.13.1."""
        t = self.warps(number, s)
        taken = np.broadcast_to(taken, t.shape)
        if not taken.any():
            self.pc[s] = pc + 1
            return
        if not taken.all():
            raise self.fault(number, "threads of a warp differ in whether they take part in a barrier")
        which, *count = (self.uniform(number, operand, s) for operand in block.operands)
        meeting = self.meetings.setdefault(which, Meeting())
        expected = count[0] if count else self.done.size
        phase = meeting.phase
        for lo in t[::32].tolist():
            meeting.clock = self.races.join(meeting.clock, self.races.arrive(self, lo, lo + 32))
        meeting.arrived += t.size
        if meeting.arrived > expected:
            raise self.fault(number, f"{meeting.arrived} threads at barrier {which} of {expected}")
        if meeting.arrived == expected:
            meeting.passed, meeting.clock, meeting.arrived = meeting.clock, None, 0
            meeting.phase += 1
            self.machine.events += 1
        self.pc[s] = pc + 1
        if "arrive" not in block.opcode:
            while meeting.phase == phase:
                yield self.machine.program.kernel.where(number)
            self.races.learn(self, s if isinstance(s, slice) else t, meeting.passed)


class Meeting:
    """A barrier of bar.sync, by its number."""

    def __init__(self) -> None:
        self.phase, self.arrived = 0, 0
        self.clock: Any = None
        self.passed: Any = None  # the clock of the last phase


class Machine:
    """One launch of a program; `run` executes it, `races.found` has what was found.

    parameters: integers, in the order of the kernel's. patience: how many times all poll once more before that is a deadlock, since
    nothing can change: only what bounds its own polls needs some. to_the_end: else the first race is a fault.
    """

    def __init__(
        self,
        program: Program,
        memory: Global,
        parameters: Sequence[int],
        grid: tuple[int, int, int],
        *,
        shared_bytes: int,
        seed: int = 0,
        patience: int = 0,
        check: bool = True,
        to_the_end: bool = True,
        descriptors: dict[int, Any] | None = None,
    ) -> None:
        self.program, self.memory, self.grid, self.shared_bytes = program, memory, grid, shared_bytes
        wanted = len(program.kernel.parameters)
        self.parameters = [*(int(p) & (1 << 64) - 1 for p in parameters), *[0] * (wanted - len(parameters))]
        self.descriptors = {PARAMETERS + 256 * n: found for n, found in (descriptors or {}).items()}
        self.random, self.patience = random.Random(seed), patience
        self.flying: list[Any] = []  # bulk copies that have not arrived
        self.events = 0
        self.places = [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]
        self.races: Any = Unchecked()
        if check:
            self.races = Races(program, memory, len(self.places), shared_bytes, not program.communicates, to_the_end)
        threads = program.kernel.threads
        default = 32 if program.has_tcgen05 else program.kernel.default_threads
        self.contexts = [(0, default), *((lo, lo + 32) for lo in range(default, threads, 32))]

    def run(self) -> None:
        """Raises Fault."""
        with np.errstate(all="ignore"):
            if self.program.communicates:
                self._interleave(list(range(len(self.places))))
            else:
                order = list(range(len(self.places)))
                self.random.shuffle(order)
                for number in order:
                    self._interleave([number])

    def _interleave(self, numbers: list[int]) -> None:
        ctas = [Cta(self, number, self.places[number]) for number in numbers]
        live = {(cta.number, lo): cta.run(lo, hi) for cta in ctas for lo, hi in self.contexts}
        waits: dict[tuple[int, int], tuple[str, int]] = {}  # where, and how much had happened by then
        awake = list(live)
        while live:
            if self.flying and (not awake or self.random.random() < 0.3):
                self.flying.pop(self.random.randrange(len(self.flying)))()
                awake = list(live)
                continue
            if not awake and self.patience:
                self.patience -= 1
                waits.clear()
                awake = list(live)
            if not awake:
                waiting = sorted({f"CTA {key[0]}, warp {key[1] // 32} at {waits[key][0]}" for key in live})
                raise Fault(f"{self.program.kernel.name}: deadlock: {'; '.join(waiting[:8])}{' ...' if len(waiting) > 8 else ''}")
            key = awake[self.random.randrange(len(awake))]
            before = self.events
            for _ in range(ROUNDS):
                seen = self.events
                where = next(live[key], None)
                if where is None:
                    del live[key]
                    waits.pop(key, None)
                    awake.remove(key)
                    break
                if waits.get(key) == (where, self.events) and seen == self.events:
                    awake.remove(key)  # the same poll again, and nothing happened since
                    break
                waits[key] = where, self.events
            if self.events != before:
                awake = list(live)
        while self.flying:  # what nobody waited for
            self.flying.pop()()
