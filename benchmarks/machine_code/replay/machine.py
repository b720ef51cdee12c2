"""One SM of Hopper: warps that issue a loop in order, the pipes they share, and what each of them waits for."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from .constants import Constants
from .operations import SCOREBOARDS, Operation
from .shared_memory import Access, Busy, Matmul, SharedMemory, or_never

SCHEDULERS = 4
WARPGROUP = 4  # warps
WARP = 32  # threads
INSTRUCTION = 16  # bytes
COPY_GROUPS = 12  # of a warp that are looked back at
UNKNOWN_LATENCY = 12  # clocks, of what sets a scoreboard and has no figure of its own (LDGDEPBAR)
ISSUE, BARRIER, MATMUL = "issue", "barrier", "matmul latency"
TURN = "turn"
# What a warp waits for that waits for the scoreboard of an operation, where that is not the operation's kind.
_CAUSES = {"load": "table entry", "addition": "additions", "copy": "issue of copies", "shared load": "shared memory"}
_CAUSES |= {"shared store": "shared memory", "constant": "constants", "membar": "fence"}


When = float | tuple[Access, float]  # a time, or so many clocks after an access


@dataclass
class Barrier:
    """One use of a named barrier."""

    arrived: int = 0  # threads
    release: float | None = None


@dataclass(frozen=True)
class Wait:
    """A warp issued nothing in [begin, end) for a cause."""

    begin: float
    end: float
    cause: str


@dataclass
class Warp:
    """Where one warp is in its steps, and what it has under way."""

    number: int
    operations: Sequence[Operation]
    position: int = 0
    step: int = 0
    next_issue: float = 0.0
    not_before: float = 0.0  # when it can issue, as far as that is known
    last_issue: float = -1.0
    # Per scoreboard: (when it counts down, or the access that it waits for and clocks more, the cause that a wait is put down to).
    scoreboards: list[list[tuple[When, str]]] = field(default_factory=lambda: [[] for _ in range(SCOREBOARDS)])
    copied: float = 0.0  # when its last asynchronous copy arrives
    copy_groups: list[float] = field(default_factory=list)  # when each group has arrived
    matmuls: list[Matmul] = field(default_factory=list)
    matmul_groups: list[Matmul] = field(default_factory=list)  # the last matmul of each group
    begins_chain: bool = True  # whether its next matmul is the first of a group
    stored: Access | None = None  # its last store
    barrier: Barrier | None = None  # that it has arrived at
    uses: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))  # of each named barrier
    fenced: str | None = None  # the fence that it issued last, until it issues again
    waiting: str | None = None  # the cause, since `waiting_since`
    waiting_since: float = 0.0

    @property
    def operation(self) -> Operation:
        """What it issues next."""
        return self.operations[self.position]

    @property
    def jumps(self) -> bool:
        """Whether what it issues behind that stands elsewhere."""
        following = self.operations[(self.position + 1) % len(self.operations)]
        return following.address != self.operation.address + INSTRUCTION

    @property
    def group(self) -> int:
        """The warpgroup that the warp belongs to."""
        return self.number // WARPGROUP

    @property
    def scheduler(self) -> int:
        """The scheduler of the SM that issues for it."""
        return self.number % SCHEDULERS


@dataclass
class StreamingMultiprocessor:
    """One CTA on one SM for some steps of a loop. Times are in clocks; its arguments decide all that it does.

    `chained`: a poll succeeds once the step before has been released, as in a chain of CTAs that are a step apart; else at once.
    `arriving` is what comes into shared memory, or leaves it by TMA, in bytes per FLOP of matmul. `released_late`: a step releases
    the additions of the step before it.
    """

    constants: Constants
    warps: list[Warp]
    steps: int
    chained: bool = False
    arriving: float = 0.0
    released_late: bool = True

    time: float = 0.0
    # When each is free: the tensor cores, shared memory for matmuls, the ways from and to L2.
    tensor_free: float = 0.0
    matmul_port_free: float = 0.0
    memory: SharedMemory = field(init=False)
    loads_free: float = 0.0
    additions_free: float = 0.0
    pipe_free: defaultdict[tuple[int, str], float] = field(default_factory=lambda: defaultdict(float))
    last_of_scheduler: list[Warp | None] = field(default_factory=lambda: [None] * SCHEDULERS)
    matmuls: defaultdict[tuple[int, int], Matmul] = field(default_factory=lambda: defaultdict(Matmul))
    barriers: defaultdict[tuple[str, int, int], Barrier] = field(default_factory=lambda: defaultdict(Barrier))
    additions_done: float = 0.0  # when L2 has acknowledged the last one
    # What happened.
    waits: list[Wait] = field(default_factory=list)
    begun: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))  # warp -> when each step began
    # warp -> (when, address) of each instruction
    issued: defaultdict[int, list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))
    released: dict[int, float] = field(default_factory=dict)  # step -> when its release is at L2
    polled: dict[int, float] = field(default_factory=dict)  # step -> when its poll succeeded

    def __post_init__(self) -> None:
        self.memory = SharedMemory(self.constants.least_share)

    def run(self) -> None:
        """Until all warps have ended; ValueError if they wait for each other."""
        while any(warp.step < self.steps for warp in self.warps):
            issued, soonest = False, math.inf
            self.memory.serve(self.time)
            for scheduler in range(SCHEDULERS):
                for warp in self._by_priority(scheduler):
                    if warp.not_before > self.time:  # nothing makes it earlier
                        soonest = min(soonest, warp.not_before)
                        continue
                    at, cause = self._earliest(warp)
                    warp.not_before = 0.0 if at == math.inf else at
                    if at <= self.time:
                        self._issue(warp)
                        self.last_of_scheduler[scheduler] = warp
                        issued = True
                        break  # a scheduler issues one instruction a clock
                    if cause != warp.waiting:
                        self._blame(warp, cause)
                    soonest = min(soonest, at)
            soonest = min(soonest, self.memory.next_done())
            if not issued and soonest == math.inf:
                stuck = [warp.operation.opcode for warp in self.warps if warp.step < self.steps]
                raise ValueError(f"every warp waits for another one: {', '.join(stuck)}")
            self.time = self.time + 1 if issued else max(self.time + 1, math.ceil(soonest))

    def _by_priority(self, scheduler: int) -> list[Warp]:
        """The warp that issued last, then the one that has waited longest."""
        mine = [warp for warp in self.warps[scheduler::SCHEDULERS] if warp.step < self.steps]
        return sorted(mine, key=lambda warp: (warp is not self.last_of_scheduler[scheduler], warp.last_issue))

    def _earliest(self, warp: Warp) -> tuple[float, str]:
        """When a warp's next operation can issue (infinity: not known yet), and what it waits for until then."""
        operation = warp.operation
        reasons = [(warp.next_issue, warp.fenced or ISSUE)]
        for number in range(SCOREBOARDS):
            if operation.control.wait_mask >> number & 1:
                reasons += [(_time_of(when), cause) for when, cause in warp.scoreboards[number]]
        if warp.barrier:
            reasons.append((or_never(warp.barrier.release), BARRIER))
        if operation.kind == "wait for matmuls":
            reasons += [(self._end(matmul), MATMUL) for matmul in self._awaited(warp, operation)]
        elif operation.kind == "matmul":
            queue = int(self.constants.matmul_queue)
            if warp.begins_chain and len(warp.matmuls) >= queue:
                reasons.append((or_never(warp.matmuls[-queue].start), MATMUL))
        elif operation.kind == "wait for copies" and operation.left_in_flight is not None:
            if done := sorted(warp.copy_groups)[: len(warp.copy_groups) - operation.left_in_flight]:
                reasons.append((done[-1], "loads"))
        elif operation.kind == "poll" and self.chained and warp.step:
            reasons.append((self.released.get(warp.step - 1, math.inf), "semaphore"))
        if operation.pipe:
            free = self.pipe_free[warp.scheduler, operation.pipe[0]]
            reasons.append((free, "mufu" if operation.kind == "mufu" else ISSUE))
        return max(reasons, key=lambda reason: reason[0])

    def _awaited(self, warp: Warp, wait: Operation) -> Sequence[Matmul]:
        assert wait.left_in_flight is not None
        return warp.matmul_groups[: len(warp.matmul_groups) - wait.left_in_flight]

    def _end(self, matmul: Matmul) -> float:
        return math.inf if matmul.end is None else matmul.end + self.constants.matmul_latency

    def _blame(self, warp: Warp, cause: str | None) -> None:
        """Ends what a warp waited for, and begins to wait for another cause."""
        if warp.waiting is not None and self.time > warp.waiting_since:
            self.waits.append(Wait(warp.waiting_since, self.time, warp.waiting))
        warp.waiting, warp.waiting_since = cause, self.time

    def _issue(self, warp: Warp) -> None:
        operation, now = warp.operation, self.time
        self._blame(warp, None)
        warp.barrier = warp.fenced = None
        if warp.position == 0:
            self.begun[warp.number].append(now)
        self.issued[warp.number].append((now, operation.address))
        warp.next_issue = now + max(1, operation.control.stall)
        if operation.base == "BRA" and warp.jumps:
            warp.next_issue = max(warp.next_issue, now + self.constants.jump)
        if operation.pipe:
            pipe, clocks = operation.pipe
            self.pipe_free[warp.scheduler, pipe] = now + (clocks or self._clocks_of(operation))
        written, read = self._effect(warp, operation)
        warp.scoreboards = [[reason for reason in board if _time_of(reason[0]) > now] for board in warp.scoreboards]
        cause = _CAUSES.get(operation.kind, operation.kind)
        for scoreboard, done in ((operation.control.write_scoreboard, written), (operation.control.read_scoreboard, read)):
            if scoreboard < SCOREBOARDS:
                warp.scoreboards[scoreboard].append((now + UNKNOWN_LATENCY if done is None else done, cause))
        warp.last_issue = now
        warp.position += 1
        if warp.position == len(warp.operations):
            warp.position, warp.step = 0, warp.step + 1

    def _clocks_of(self, operation: Operation) -> float:
        """For how long one warp takes the pipe of an operation whose rate is a constant."""
        if operation.kind == "synchronous matmul":
            return operation.flop * SCHEDULERS / (self.constants.tensor_flop * self.constants.synchronous_share)
        if operation.kind == "matmul":
            return self.constants.matmul_dispatch
        return self.constants.mufu

    def _effect(self, warp: Warp, operation: Operation) -> tuple[When | None, When | None]:
        """What issuing an operation does: when its result is there, and when its operands are read; None: soon."""
        constants, now = self.constants, self.time
        match operation.kind:
            case "matmul":
                self._matmul(warp, operation)
            case "barrier":
                self._arrive(warp, operation)
            case "membar" if operation.of_whole_gpu:
                copied = warp.copied * constants.gpu_fence_of_copies
                warp.next_issue = max(now + constants.gpu_fence, self.additions_done, copied)
                warp.fenced = operation.kind
                return None, now + constants.cta_fence
            case "membar":
                if warp.stored is None or warp.stored.done is not None:
                    return None, now + constants.cta_fence
                return None, (warp.stored, constants.cta_fence)
            case "fence":
                queue = self.memory.accesses
                return (queue[-1], constants.async_fence) if queue else now + constants.async_fence, None
            case "shared load":
                access = self._access(warp, operation.bytes)
                return (access, constants.shared_latency), (access, 4)
            case "shared store":
                warp.stored = self._access(warp, operation.bytes)
                return None, (warp.stored, 4)
            case "copy":
                return None, self._copy(warp, operation)
            case "commit":
                warp.copy_groups = [*warp.copy_groups, warp.copied][-COPY_GROUPS:]
            case "addition":
                return None, self._add(operation)
            case "release":
                self.released[warp.step - self.released_late] = now + constants.l2_latency / 2
                return None, now + 10
            case "load" | "poll":
                done = now + constants.l2_latency
                if operation.kind == "poll":
                    self.polled[warp.step] = done
                return done, done
            case "store":
                return None, now + 8
            case "constant":
                return now + constants.constant_latency, None
            case "mufu":
                return now + constants.mufu_latency, None
            case "mbarrier":
                return now + constants.mbarrier, None
        return None, None

    def _matmul(self, warp: Warp, operation: Operation) -> None:
        """Warps of a group issue the same matmuls in the same order; tensor cores and the port take them in the order of issue."""
        matmul = self.matmuls[warp.group, len(warp.matmuls)]
        warp.matmuls.append(matmul)
        warp.begins_chain = operation.ends_group
        if operation.ends_group:
            warp.matmul_groups.append(matmul)
        matmul.issued += 1
        if matmul.issued < WARPGROUP:
            return
        work = operation.flop / self.constants.tensor_flop
        matmul.start = max(self.time, self.tensor_free)
        moved = (operation.operand_bytes + self.arriving * operation.flop) / self.constants.shared_bandwidth
        self.matmul_port_free = max(self.matmul_port_free, matmul.start) + moved
        matmul.end = self.tensor_free = max(matmul.start + work, self.matmul_port_free)
        self.memory.busy.append(Busy(matmul.start, matmul.end, work, moved / (matmul.end - matmul.start)))

    def _arrive(self, warp: Warp, operation: Operation) -> None:
        if operation.takes_turns:
            self._take_turns(warp, operation)
            return
        if not operation.opcode.startswith("BAR.SYNC"):
            return
        all_threads = WARP * len(self.warps)
        number, threads = operation.barrier
        # Of one warpgroup, perhaps with a warp of another partition, which is taken to be there.
        of_group = threads in (WARP * WARPGROUP, WARP * (WARPGROUP + 1))
        expected = WARP * WARPGROUP if of_group else min(threads or all_threads, all_threads)
        warp.uses[number] += 1
        warp.barrier = self.barriers[number, warp.uses[number], warp.group if of_group else -1]
        warp.barrier.arrived += WARP
        if warp.barrier.arrived >= expected:
            warp.barrier.release = self.time + self.constants.barrier

    def _take_turns(self, warp: Warp, operation: Operation) -> None:
        """Let two warpgroups' matmuls take turns, the first at once: BAR.SYNC waits for the other one's BAR.ARV."""
        gives = operation.opcode.startswith("BAR.ARV")
        taker = 1 - warp.group if gives else warp.group
        name = "given" if gives else "taken"
        warp.uses[name] += 1
        # The n-th turn of the second warpgroup precedes the (n + 1)-th of the first.
        number = warp.uses[name] + (gives and taker == 0)
        turn = self.barriers[TURN, number, taker]
        turn.arrived += WARP
        if not gives:
            warp.barrier = turn
        at_once = (number, taker) == (1, 0)
        if turn.arrived >= WARP * WARPGROUP * (1 if at_once else 2) and turn.release is None:
            turn.release = self.time + self.constants.barrier

    def _access(self, warp: Warp, moved: int) -> Access:
        self.memory.serve(self.time)
        behind = warp.matmuls[-1] if warp.matmuls else None
        access = Access(max(1, moved / self.constants.shared_bandwidth), behind)
        self.memory.accesses.append(access)
        return access

    def _copy(self, warp: Warp, operation: Operation) -> float:
        """An asynchronous copy; one under a guard is of a row, by the first warp. When its operands are read."""
        if not operation.guard or warp.number == 0:
            self.loads_free = (
                max(self.loads_free, self.time + self.constants.l2_latency) + operation.bytes / self.constants.l2_bandwidth
            )
            warp.copied = max(warp.copied, self.loads_free)
        return self.time + 4

    def _add(self, operation: Operation) -> float:
        """fp32 additions in L2. When their registers are read: not before the buffer has room for them."""
        moved, bandwidth = operation.bytes, self.constants.addition_bandwidth
        self.additions_free = max(self.additions_free, self.time + moved / self.constants.shared_bandwidth) + moved / bandwidth
        self.additions_done = self.additions_free + self.constants.l2_latency
        return max(self.time + 6, self.additions_free - self.constants.addition_buffer / bandwidth)


def _time_of(when: When) -> float:
    """Infinity where it is not known yet."""
    if isinstance(when, tuple):
        access, more = when
        return or_never(access.done) + more
    return when
