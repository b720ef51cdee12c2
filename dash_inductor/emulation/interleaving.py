"""Programs of one launch, interleaved: each is a greenlet, and a seed says who goes on.

A program gives the turn away before and after every atomic, so that whatever two programs order only by luck comes out
in both orders: a load before its wait, a store after its release. A wait is `tl.atomic_cas(semaphore, rank, rank)`,
polled until it returns `rank`. Who polls in vain is put aside until the value at this address has changed; when all are
put aside, that is a deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import greenlet

from .deadlock import DeadlockError, Wait, explain
from .session import Launch, Turns

Index = tuple[int, int, int]
"""program_id(0), (1), (2)."""


class Program(greenlet.greenlet):
    """One program of the grid."""

    def __init__(self, body: Callable[[], None], index: Index, name: int) -> None:
        super().__init__(body)
        self.index = index
        self.name = name
        self.waits = 0
        self.satisfied = 0
        self.polled: Wait | None = None
        self.seen = 0
        self.blocked = False

    @staticmethod
    def running() -> Program | None:
        """The program that runs in this thread."""
        current = greenlet.getcurrent()
        return current if isinstance(current, Program) else None

    def can_move(self) -> bool:
        """Whether nothing blocks it, or the semaphore that it polls has changed."""
        return not self.blocked or (self.polled is not None and self.polled.value() != self.seen)

    def pause(self) -> None:
        """Give the turn away."""
        self.parent.switch()
        self.blocked = False

    def atomic(self, run: Callable[[], Any]) -> Any:
        """An atomic that is no wait."""
        self.polled = None
        self.pause()
        result = run()
        self.pause()
        return result

    def wait(self, wait: Wait, poll: Callable[[], Any]) -> Any:
        """Poll once, by an atomic_cas; a second poll in vain is not made before the value has changed."""
        again = self.polled == wait
        self.blocked = again
        self.pause()
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
            waits = {program.name: program.polled for program in blocked if program.polled}
            raise DeadlockError(explain(kernel, len(programs), waits, len(unstarted), resident))
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
