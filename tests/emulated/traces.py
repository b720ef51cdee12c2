"""Every interleaving of a launch, one for each trace: interleavings that differ in the order of operations that commute are one.

A program is the list of its operations on memory that programs share, as `recorded_launches.py` takes them from the kernel. It is
named by its ticket, so program k starts after program k - 1. Memory is sequentially consistent, as in the emulation. A wait is
polled: in vain at most once for each value that it does not want.

The search is by sleep sets (Godefroid 1996): it ends once in each trace, and finds every deadlock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

START, WAIT, RELEASE, STORE, ADD, END = "start", "wait", "release", "store", "add", "end"


@dataclass(frozen=True, eq=False)
class Operation:
    """What a program does next: `place` is a semaphore or a tile, `rank` what a wait wants, `part` what is stored or added."""

    kind: str
    place: int = 0
    rank: int = 0
    part: Any = None


@dataclass(frozen=True)
class Event:
    """An operation that was performed, or a poll; `saw` is what it found in the semaphore."""

    program: int
    kind: str
    place: int = 0
    saw: int | None = None

    def conflicts(self, other: Event) -> bool:
        """Whether it matters which of the two comes first. Releases commute: nobody reads what they return."""
        if self.program == other.program:
            return True
        kinds = {self.kind, other.kind}
        if kinds <= {START, END}:
            return START in kinds
        return self.place == other.place and (kinds == {WAIT, RELEASE} or kinds <= {STORE, ADD})


@dataclass(frozen=True)
class State:
    """Where each program stands and what it last polled in vain; semaphores and tiles by place."""

    at: tuple[int, ...]
    polled: tuple[int | None, ...]
    semaphores: Mapping[int, int]
    tiles: Mapping[int, Any]

    def bits(self) -> bytes:
        """Those of all tiles."""
        return b"".join(np.asarray(self.tiles[place]).tobytes() for place in sorted(self.tiles))


class Launch:
    """`programs`, of which `resident` (None: all) may have started and not ended."""

    def __init__(self, programs: Sequence[Sequence[Operation]], resident: int | None = None) -> None:
        # Where all are resident, nothing depends on when a program ends.
        self.programs = [[op for op in program if resident is not None or op.kind != END] for program in programs]
        self.resident = resident

    def start(self) -> State:
        """Nobody has started."""
        return State((0,) * len(self.programs), (None,) * len(self.programs), {}, {})

    def next(self, state: State, program: int) -> Operation | None:
        """What the program does next; None at its end."""
        operations = self.programs[program]
        return operations[state.at[program]] if state.at[program] < len(operations) else None

    def ready(self, state: State) -> list[int]:
        """The programs that can go on."""
        return [program for program in range(len(self.programs)) if self.can_move(state, program)]

    def can_move(self, state: State, program: int) -> bool:
        """Whether the program's next operation is not blocked."""
        operation = self.next(state, program)
        if operation is None:
            return False
        if operation.kind == START:
            alive = sum(at > 0 and self.next(state, other) is not None for other, at in enumerate(state.at))
            return all(state.at[:program]) and (self.resident is None or alive < self.resident)
        return operation.kind != WAIT or state.polled[program] != state.semaphores.get(operation.place, 0)

    def step(self, state: State, program: int) -> tuple[State, Event]:
        """One operation of a program that can go on, or one poll."""
        operation = self.next(state, program)
        assert operation is not None
        place, saw = operation.place, state.semaphores.get(operation.place, 0)
        if operation.kind == WAIT:
            event = Event(program, WAIT, place, saw)
            if saw != operation.rank:
                return replace(state, polled=_with(state.polled, program, saw)), event
            state = replace(state, polled=_with(state.polled, program, None))
        else:
            event = Event(program, operation.kind, place)
        if operation.kind == RELEASE:
            state = replace(state, semaphores={**state.semaphores, place: saw + 1})
        elif operation.kind == STORE:
            state = replace(state, tiles={**state.tiles, place: operation.part})
        elif operation.kind == ADD:
            state = replace(state, tiles={**state.tiles, place: state.tiles.get(place, float("nan")) + operation.part})
        return replace(state, at=_with(state.at, program, state.at[program] + 1)), event

    def ended(self, state: State) -> bool:
        """Whether all programs have; else, where nobody can go on, it is a deadlock."""
        return all(at == len(operations) for at, operations in zip(state.at, self.programs, strict=True))

    def traces(self) -> Iterator[tuple[list[Event], State]]:
        """One interleaving of each trace, and what it leaves."""
        return self._traces(self.start(), {}, [])

    def _traces(self, state: State, asleep: dict[int, Event], events: list[Event]) -> Iterator[tuple[list[Event], State]]:
        """`asleep`: what programs would do next that has been done here before, and commutes with all that was done since."""
        ready = self.ready(state)
        if not ready:
            yield events, state
        for program in ready:
            if program not in asleep:
                after, event = self.step(state, program)
                still = {name: other for name, other in asleep.items() if not other.conflicts(event)}
                yield from self._traces(after, still, [*events, event])
                asleep = {**asleep, program: event}

    def interleavings(self) -> Iterator[tuple[list[Event], State]]:
        """All of them, by brute force."""
        todo: list[tuple[list[Event], State]] = [([], self.start())]
        while todo:
            events, state = todo.pop()
            ready = self.ready(state)
            if not ready:
                yield events, state
            for program in ready:
                after, event = self.step(state, program)
                todo.append(([*events, event], after))

    def count_interleavings(self) -> int:
        """How many there are."""

        @cache
        def count(at: tuple[int, ...], polled: tuple[int | None, ...]) -> int:
            # What semaphores hold follows from where programs stand.
            semaphores: dict[int, int] = {}
            for operations, done in zip(self.programs, at, strict=True):
                for operation in operations[:done]:
                    if operation.kind == RELEASE:
                        semaphores[operation.place] = semaphores.get(operation.place, 0) + 1
            state = State(at, polled, semaphores, {})
            after = [self.step(state, program)[0] for program in self.ready(state)]
            return sum(count(state.at, state.polled) for state in after) or 1

        return count(self.start().at, self.start().polled)


def _with(values: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*values[:at], value, *values[at + 1 :])


def normal_form(events: Sequence[Event]) -> tuple[tuple[Event, ...], ...]:
    """Foata's: the same for all interleavings of a trace, and for no other. Each event stands as early as conflicts allow."""
    levels: list[list[Event]] = []
    for event in events:
        level = next((n for n in range(len(levels), 0, -1) if any(map(event.conflicts, levels[n - 1]))), 0)
        if level == len(levels):
            levels.append([])
        levels[level].append(event)
    return tuple(tuple(sorted(level, key=lambda event: event.program)) for level in levels)


def conflicts(events: Sequence[Event]) -> list[tuple[int, int]]:
    """Pairs of positions whose order is the trace's."""
    return [(a, b) for b in range(len(events)) for a in range(b) if events[a].conflicts(events[b])]


def count_orders(events: Sequence[Event]) -> int:
    """How many interleavings the trace of `events` has."""
    before = [0] * len(events)
    for a, b in conflicts(events):
        before[b] |= 1 << a
    everything = (1 << len(events)) - 1

    @cache
    def count(done: int) -> int:
        ready = (n for n in range(len(events)) if not done >> n & 1 and before[n] & ~done == 0)
        return 1 if done == everything else sum(count(done | 1 << n) for n in ready)

    return count(0)


@dataclass
class Found:
    """Of a search: traces, those that end in a deadlock, and what the others leave in the tiles."""

    traces: int = 0
    deadlocks: int = 0
    bits: frozenset[bytes] = frozenset()


def search(launch: Launch) -> Found:
    """To the end."""
    found = Found()
    for _, state in launch.traces():
        found.traces += 1
        if launch.ended(state):
            found.bits |= {state.bits()}
        else:
            found.deadlocks += 1
    return found


def assert_complete(launch: Launch) -> None:
    """The traces are all different, and their interleavings are as many as there are in all."""
    traces = [events for events, _ in launch.traces()]
    assert len({normal_form(events) for events in traces}) == len(traces)
    assert sum(map(count_orders, traces)) == launch.count_interleavings()
