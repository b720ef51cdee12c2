"""Programs of one launch, interleaved: each is a greenlet, and a seed says who goes on.

A program gives the turn away before and after every atomic, so that whatever two programs order only by luck comes out
in both orders: a load before its wait, a store after its release. A wait is `tl.atomic_cas(semaphore, rank, rank)`,
polled until it returns `rank`. Who polls in vain is put aside until the value at this address has changed; when all are
put aside, that is a deadlock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import greenlet

from .deadlock import DeadlockError, Release, Stop, Wait, explain
from .session import Launch, Turns

__all__ = ["Index", "Program", "interleave"]

Index = tuple[int, int, int]
"""program_id(0), (1), (2)."""

POST_MORTEM_ATOMICS = 100_000
"""After a deadlock, a program that has not ended after this many atomics loops for ever, and is given up."""


class Program(greenlet.greenlet):
    """One program of the grid. `steps` are the waits and releases it has come to, in order."""

    def __init__(self, body: Callable[[], None], index: Index, name: int) -> None:
        super().__init__(body)
        self.index = index
        self.name = name
        self.steps: list[Wait | Release] = []
        self.waits = 0
        self.satisfied = 0
        self.polled: Wait | None = None
        self.seen = 0
        self.blocked = False
        self.post_mortem: int | None = None

    @staticmethod
    def running() -> Program | None:
        """The program that runs in this thread."""
        current = greenlet.getcurrent()
        return current if isinstance(current, Program) else None

    def can_move(self) -> bool:
        """Whether nothing blocks it, or the semaphore that it polls has changed."""
        return not self.blocked or (self.polled is not None and self.polled.value() != self.seen)

    def pause(self) -> None:
        """Give the turn away, unless all others are dead anyway."""
        if self.post_mortem is None:
            self.parent.switch()
            self.blocked = False
        elif self.post_mortem == 0:
            raise greenlet.GreenletExit
        else:
            self.post_mortem -= 1

    def atomic(self, address: int | None, run: Callable[[], Any]) -> Any:
        """An atomic that is no wait; `address` where it changes one element."""
        self.polled = None
        if address is not None:
            self.steps.append(Release(address))
        self.pause()
        result = run()
        self.pause()
        return result

    def wait(self, wait: Wait, poll: Callable[[], Any], satisfied: Any) -> Any:
        """Poll once; a second poll in vain is not made before the value has changed.

        `poll` does the atomic_cas, `satisfied` is what it returns when the value is the wanted one.
        """
        again = self.polled == wait
        if not again:
            self.steps.append(wait)
        self.blocked = again
        self.pause()
        if self.post_mortem is not None:
            return satisfied
        result = poll()
        self.seen = int(result.data.item())
        if self.seen != wait.wanted:
            self.polled = wait
            return result
        self.polled = None
        self.waits += again
        self.satisfied += not again
        self.pause()
        return result


def interleave(
    kernel: str,
    body: Callable[[], None],
    indices: Sequence[Index],
    turn: Callable[[Index], None],
    turns: Turns,
    resident: int | None,
) -> Launch:
    """Run `body` once for each of `indices`, as one launch of `kernel`, and say how it went.

    `turn(index)` is called before a program goes on. At most `resident` programs are started and not ended; they
    start in a random order, for a GPU promises none.

    Raises:
        DeadlockError: no program can go on.
    """
    programs = [Program(body, index, name) for name, index in enumerate(indices)]
    unstarted = turns.starts(programs)
    ready: list[Program] = []
    blocked: list[Program] = []
    schedule: list[int] = []
    try:
        while True:
            room = len(unstarted) if resident is None else resident - len(ready) - len(blocked)
            ready += (unstarted.pop() for _ in range(min(room, len(unstarted))))
            woken = [program for program in blocked if program.can_move()]
            if woken:
                ready += woken
                blocked = [program for program in blocked if program not in woken]
            if not ready:
                break
            at = turns.next(ready)
            ready[at], ready[-1] = ready[-1], ready[at]
            program = ready.pop()
            schedule.append(program.name)
            turn(program.index)
            program.switch()
            if not program.dead:
                (blocked if program.blocked else ready).append(program)
        if blocked:
            stops = _post_mortem(programs, blocked, unstarted, turn)
            raise DeadlockError(explain(kernel, stops, resident))
    finally:
        for program in ready + blocked:
            program.throw()
    return Launch(
        kernel,
        len(programs),
        tuple(schedule),
        sum(program.waits for program in programs),
        sum(program.satisfied for program in programs),
    )


def _post_mortem(
    programs: list[Program], blocked: list[Program], unstarted: list[Program], turn: Callable[[Index], None]
) -> list[Stop | None]:
    """Let every program run on to its end with its waits taken for satisfied, to learn who would have released what.

    What they compute now is garbage, but their control flow, and with it the semaphores they come to, depends on the
    schedule's table alone.
    """
    values = {program.name: program.seen for program in blocked}
    waits = {program.name: program.polled for program in blocked}
    taken = {program.name: tuple(program.steps) for program in programs}
    for program in blocked + unstarted:
        program.post_mortem = POST_MORTEM_ATOMICS
        turn(program.index)
        # Its data are garbage, so it may fail; what it came to until then still counts.
        with contextlib.suppress(Exception):
            program.switch()
    stops: list[Stop | None] = [None] * len(programs)
    for program in blocked + unstarted:
        before = taken[program.name]
        ahead = tuple(program.steps[len(before) :])
        stops[program.name] = Stop(waits.get(program.name), values.get(program.name, 0), before, ahead)
    return stops
