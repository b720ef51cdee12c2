"""A cubin's main loop replayed from its SASS and control codes on one SM of Hopper: clocks a step, and what they go to.

The warps of one CTA issue the loop in order, as its stalls, scoreboards and waits say; tensor cores, shared memory, the ways to L2
and barriers take the time that `constants` gives them. It ranks variants of a loop on one GPU. All of it is
an estimate: some constants are guesses (`sensitivity` says what hangs on them), and an SM beside 131 others is not alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from ..cubin import disassemble, indirect_targets, main_loops, parse
from .constants import CONSTANTS, SWITCH, Constants
from .machine import BARRIER, ISSUE, MATMUL, WARPGROUP, StreamingMultiprocessor, Warp
from .operations import MATMULS, UNKNOWN, Operation, control_codes, decoded, rotated, step_of

STEPS = 11  # issued
WINDOW = 5  # of which the last are looked at
SMALLEST = 8  # clocks of a cause that is worth a word


@dataclass(frozen=True)
class Replay:
    """What a step of one main loop takes: an SM's clocks for a step of a CTA in its steady state, all of them estimates."""

    cycles: float
    tensor_cycles: float  # of its matmuls alone
    # cause -> clocks in which the tensor cores idle, the most first; with tensor_cycles they are `cycles`. Empty for HMMA
    exposed: dict[str, float]
    handover_cycles: float | None  # from a successful poll to the sight of the step's release by another CTA; None: no such pair
    chained_cycles: float  # a step where every step waits for the same step of another CTA, as in a shift schedule
    flop: int  # of the CTA's matmuls in a step
    instructions: int
    notes: tuple[str, ...] = ()  # what it leaves out

    def as_dict(self) -> dict[str, Any]:
        """For JSON, marked an estimate."""
        return {"estimate": True} | {name: _rounded(value) for name, value in asdict(self).items()}

    def __str__(self) -> str:
        """One line."""
        causes = ", ".join(f"{cause} {clocks:.0f}" for cause, clocks in self.exposed.items() if clocks >= SMALLEST)
        chain = "" if self.handover_cycles is None else f", handover {self.handover_cycles:.0f}, chained {self.chained_cycles:.0f}"
        return f"about {self.cycles:.0f} cycles a step (tensor cores {self.tensor_cycles:.0f}; {causes}){chain}"


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return round(value, 1) if isinstance(value, float) else value


def replay(
    cubin: bytes,
    count: int = 1,
    *,
    warps: int = 8,
    tma_bytes: int = 0,
    constants: Constants = Constants(),  # noqa: B008 (frozen)
) -> tuple[Replay, ...]:
    """Each of a cubin's `count` main loops (`cubin.main_loops`), by a CTA of `warps` warps that has an SM to itself.

    `tma_bytes` is what TMA writes to shared memory and reads from it in a step, where warps do so that are not in the loop:
    instructions do not say it.

    Raises:
        ValueError: with the reason why it cannot be replayed: it is not Hopper's, or has an instruction that the machine has no
            model of.
    """
    return tuple(replay_loop(loop, warps=warps, tma_bytes=tma_bytes, constants=constants) for loop in loops_of(cubin, count))


def loops_of(cubin: bytes, count: int) -> list[list[Operation]]:
    """The main loops with their control codes; ValueError if there is none, or the code is not Hopper's."""
    text = disassemble(cubin)
    functions = text.split("Function : ")[1:]
    if len(functions) != 1:
        raise ValueError(f"expected a cubin of one kernel, found {len(functions)}")
    if "code for sm_90" not in text:
        raise ValueError("only sm_90 can be replayed")
    return loops_in(functions[0], count)


def loops_in(function: str, count: int) -> list[list[Operation]]:
    """The main loops of one function of Hopper's, from the text of `cuobjdump -sass`; ValueError if there is none."""
    loops = main_loops(parse(function), indirect_targets(function), count)
    if not loops:
        raise ValueError("no loop has a matmul")
    codes = control_codes(function)
    return [rotated(decoded(loop, codes)) for loop in loops]


def replay_loop(
    loop: Sequence[Operation],
    *,
    warps: int = 8,
    tma_bytes: int = 0,
    constants: Constants = Constants(),  # noqa: B008 (frozen)
) -> Replay:
    """One loop of `loops_of`; arguments and errors are those of `replay`."""
    sm, begin, end = _run(loop, warps, tma_bytes, constants)
    flop = _flop(loop, warps)
    exposed, tensor = _exposed(sm, begin, end) if sm.memory.busy else ({}, flop / constants.tensor_flop * WINDOW)
    handover, chained = None, (end - begin) / WINDOW
    if sm.polled and sm.released:
        step = STEPS - WINDOW
        handover = sm.released[step] - sm.polled[step] + constants.l2_latency
        _, first, last = _run(loop, warps, tma_bytes, constants, chained=True)
        chained = (last - first) / WINDOW
    return Replay(
        cycles=(end - begin) / WINDOW,
        tensor_cycles=tensor / WINDOW,
        exposed={cause: clocks / WINDOW for cause, clocks in exposed.items()},
        handover_cycles=handover,
        chained_cycles=chained,
        flop=flop,
        instructions=len(loop),
        notes=_notes(loop, tma_bytes),
    )


def times_by_place(
    loop: Sequence[Operation],
    *,
    warps: int = 8,
    tma_bytes: int = 0,
    constants: Constants = Constants(),  # noqa: B008 (frozen)
) -> tuple[float, dict[int, float]]:
    """Clocks a step, and by address those that a warp spends before it issues an instruction, in the mean of all warps."""
    sm, begin, end = _run(loop, warps, tma_bytes, constants)
    times = dict.fromkeys((operation.address for operation in loop), 0.0)
    for issued in sm.issued.values():
        for (before, _), (now, address) in pairwise(issued):
            if begin <= now < end:
                times[address] += (now - before) / warps / WINDOW
    return (end - begin) / WINDOW, times


def _run(
    loop: Sequence[Operation], warps: int, tma_bytes: int, constants: Constants, *, chained: bool = False
) -> tuple[StreamingMultiprocessor, float, float]:
    """The machine behind all steps, and when the last warpgroup began the first and ended the last that are looked at."""
    _check(loop, warps)
    sm = _machine(loop, warps, tma_bytes, constants, chained)
    sm.run()
    begun = sm.begun[warps - WARPGROUP]
    return sm, begun[-WINDOW - 1], begun[-1]


def _check(loop: Sequence[Operation], warps: int) -> None:
    if warps < 1 or warps % WARPGROUP:
        raise ValueError(f"matmuls are of whole warpgroups, {WARPGROUP} warps each, and there are {warps} warps")
    if not any(operation.kind in MATMULS for operation in loop):
        raise ValueError("no HGMMA or HMMA in the loop")
    if guesses := sorted({operation.base for operation in loop if operation.base in UNKNOWN}):
        raise ValueError(f"{', '.join(guesses)} in the main loop: the replay has no model of it")
    if warps != 2 * WARPGROUP and any(operation.takes_turns for operation in loop):
        raise ValueError(f"warpgroups take turns in the main loop: the replay knows two, not {warps} warps")


def _notes(loop: Sequence[Operation], tma_bytes: int) -> tuple[str, ...]:
    notes = []
    kinds = {operation.kind for operation in loop}
    if "matmul" not in kinds:
        notes.append("what its synchronous matmuls wait for is not told apart")
    if "copy" not in kinds:
        notes.append("what other warps load is taken to be there")
        if not tma_bytes:
            notes.append("the traffic of TMA is left out")
    return tuple(notes)


def _flop(loop: Sequence[Operation], warps: int) -> int:
    """FLOP of a step of a CTA: an HGMMA is of a warpgroup, an HMMA of a warp."""
    issued = step_of(loop, 0)
    return sum(operation.flop * (warps if operation.base == "HMMA" else warps // WARPGROUP) for operation in issued)


def _machine(loop: Sequence[Operation], warps: int, tma_bytes: int, constants: Constants, chained: bool) -> StreamingMultiprocessor:
    # Copies are spread over the step: what they bring takes shared memory from the matmuls, whenever it arrives.
    tiles = sum(operation.bytes * warps for operation in loop if operation.kind == "copy" and not operation.guard)
    kinds = [operation.kind for operation in loop]
    first = {kind: kinds.index(kind) for kind in ("release", "addition", "poll") if kind in kinds}
    return StreamingMultiprocessor(
        constants,
        [Warp(warp, step_of(loop, warp)) for warp in range(warps)],
        STEPS,
        chained=chained,
        arriving=(tiles + tma_bytes) / _flop(loop, warps),
        released_late=first.get("release", 0) < first.get("addition", first.get("poll", 0)),
    )


def _exposed(sm: StreamingMultiprocessor, begin: float, end: float) -> tuple[dict[str, float], float]:
    """Clocks of [begin, end) in which the tensor cores idle, by cause, and those in which they work.

    The causes of a clock are what those warps wait for that wait neither at a barrier nor for a matmul: for the others these are
    waiting. If there are none, the last to blame is whoever issues, then the latency of matmuls, then the barrier.
    """
    exposed: defaultdict[str, float] = defaultdict(float)
    tensor = 0.0
    spans = []
    for busy in sm.memory.busy:
        done = min(busy.begin + busy.work, busy.end)
        tensor += _overlap(busy.begin, done, begin, end)
        exposed["shared memory of matmuls"] += _overlap(done, busy.end, begin, end)
        spans.append((busy.begin, busy.end))
    waits = [wait for wait in sm.waits if wait.end > begin and wait.begin < end]
    for first, last in _gaps(spans, begin, end):
        inside = [wait for wait in waits if wait.end > first and wait.begin < last]
        cuts = sorted({first, last, *(time for wait in inside for time in (wait.begin, wait.end) if first < time < last)})
        for here, there in pairwise(cuts):
            now = [wait.cause for wait in inside if wait.begin <= here < wait.end]
            causes = [cause for cause in now if cause not in (BARRIER, MATMUL, ISSUE)] or [_last_to_blame(now, len(sm.warps))]
            for cause in causes:
                exposed[cause] += (there - here) / len(causes)
    by_size = sorted(exposed.items(), key=lambda item: (-item[1], item[0]))
    return {cause: clocks for cause, clocks in by_size if clocks}, tensor


def _last_to_blame(causes: list[str], warps: int) -> str:
    if ISSUE in causes or len(causes) < warps:
        return ISSUE
    return MATMUL if MATMUL in causes else BARRIER


def _overlap(first: float, last: float, begin: float, end: float) -> float:
    return max(0.0, min(last, end) - max(first, begin))


def _gaps(spans: list[tuple[float, float]], begin: float, end: float) -> list[tuple[float, float]]:
    """What spans that follow each other leave of [begin, end)."""
    gaps, free = [], begin
    for first, last in spans:
        if free < min(first, end):
            gaps.append((free, min(first, end)))
        free = max(free, last)
    return [*gaps, (free, end)] if free < end else gaps


@dataclass(frozen=True)
class Sensitivity:
    """Clocks a step with a guess halved and doubled; a switch is the other way round in both."""

    name: str
    value: float
    halved: float
    doubled: float


def sensitivity(loop: Sequence[Operation], *, constants: Constants = Constants(), **settings: Any) -> list[Sensitivity]:  # noqa: B008
    """What hangs on each guess; the arguments are those of `replay_loop`."""
    guesses = []
    for name, constant in CONSTANTS.items():
        if constant.guess:
            value = getattr(constants, name)
            others = (1 - value, 1 - value) if constant.unit == SWITCH else (max(1, value / 2), value * 2)
            halved, doubled = (
                replay_loop(loop, constants=constants.set_from({name: other}), **settings).cycles for other in others
            )
            guesses.append(Sensitivity(name, value, halved, doubled))
    return guesses
