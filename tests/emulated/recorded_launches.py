"""What the programs of a launch do to the memory that they share, taken from the emulated kernel; and launches in a given order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from traces import ADD, END, RELEASE, START, STORE, WAIT, Event, Operation
from triton.runtime.interpreter import InterpreterBuilder

from dash_inductor.emulation import interpreter
from dash_inductor.emulation.interleaving import Program
from dash_inductor.emulation.session import Turns


@dataclass
class Recorded:
    """A launch: its events in the order in which they happened, and the operations of each program, by ticket.

    The end of a program is an event where another waits for it to start.
    """

    events: list[Event] = field(default_factory=list)
    operations: dict[int, list[Operation]] = field(default_factory=dict)

    @property
    def programs(self) -> list[list[Operation]]:
        """Operations by ticket."""
        return [self.operations[ticket] for ticket in range(len(self.operations))]

    def number_tiles(self) -> None:
        """Tiles of dq by number in the place of addresses."""
        operations = [op for program in self.programs for op in program if op.kind in (STORE, ADD)]
        base = min((op.place for op in operations), default=0)

        def number(x: Any) -> Any:
            return replace(x, place=(x.place - base) // operations[0].part.nbytes) if x.kind in (STORE, ADD) else x

        self.events = [number(event) for event in self.events]
        self.operations = {ticket: [number(op) for op in program] for ticket, program in self.operations.items()}


class Scripted(Turns):
    """Programs start in order, and the one goes on whose event is next; any in a launch without events, and after the last."""

    def __init__(self, script: Sequence[Event], recorded: Recorded) -> None:
        super().__init__("")
        self.script, self.recorded = script, recorded

    def starts(self, programs: Sequence[Any]) -> list[Any]:
        return list(reversed(programs))

    def next(self, ready: Sequence[Any]) -> int:
        done, names = len(self.recorded.events), [program.name for program in ready]
        if done == len(self.script) or (done == 0 and self.script[0].program not in names):
            return 0
        return names.index(self.script[done].program)


class Recorder:
    """Launches of kernels that take tickets, oldest first; `script` is for those to come."""

    def __init__(self) -> None:
        self.launches: list[Recorded] = []
        self.script: Sequence[Event] | None = None
        self.tickets: dict[Program, int] = {}
        self.ticket_address = 0
        self.current: Recorded | None = None  # and no tickets where there is none

    def note(self, operation: Operation, *, saw: int | None = None, event: bool = True, done: bool = True) -> None:
        assert self.current is not None
        ticket = self.tickets[Program.running()]
        if event:
            self.current.events.append(Event(ticket, operation.kind, operation.place, saw))
        if done:
            self.current.operations.setdefault(ticket, []).append(operation)

    def semaphore(self, ptr: Any) -> int:
        """Place 1 is the dummy."""
        return (ptr.data.item() - self.ticket_address) // 4


@contextmanager
def recording() -> Iterator[Recorder]:
    """Goes around `emulate`, which wraps what this sets."""
    recorder = Recorder()
    cas, rmw, store = (getattr(InterpreterBuilder, f"create_{name}") for name in ("atomic_cas", "atomic_rmw", "masked_store"))
    stock = interpreter.interleave

    def interleave(kernel: str, body: Callable[[], None], indices: Any, turn: Any, turns: Turns, resident: int | None) -> Any:
        recorder.current = Recorded()
        recorder.tickets.clear()

        def whole() -> None:
            body()
            if Program.running() in recorder.tickets:
                recorder.note(Operation(END), event=resident is not None)

        try:
            turns = turns if recorder.script is None else Scripted(recorder.script, recorder.current)
            launch = stock(kernel, whole, indices, turn, turns, resident)
            if recorder.tickets:
                recorder.current.number_tiles()
                recorder.launches.append(recorder.current)
            return launch
        finally:
            recorder.current = None
            recorder.tickets.clear()

    def create_atomic_cas(self: Any, ptr: Any, cmp: Any, val: Any, *rest: Any) -> Any:
        result = cas(self, ptr, cmp, val, *rest)
        if recorder.current is not None:
            rank, saw = int(cmp.data.item()), int(result.data.item())
            recorder.note(Operation(WAIT, recorder.semaphore(ptr), rank), saw=saw, done=saw == rank)
        return result

    def create_atomic_rmw(self: Any, op: Any, ptr: Any, val: Any, mask: Any, *rest: Any) -> Any:
        result = rmw(self, op, ptr, val, mask, *rest)
        if recorder.current is None or not mask.data.any():
            return result
        if Program.running() not in recorder.tickets:
            recorder.tickets[Program.running()] = int(result.data.item())
            recorder.ticket_address = ptr.data.item()
            recorder.note(Operation(START))
        elif ptr.data.size == 1:
            recorder.note(Operation(RELEASE, recorder.semaphore(ptr)))
        else:
            recorder.note(Operation(ADD, int(ptr.data.min()), part=val.data.copy()))
        return result

    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        # Of fp32 in one dimension: dq in accumulator order. dk and dv have two, and a worker's own row is of integers.
        of_dq = ptrs.data.ndim == 1 and value.data.dtype == np.float32
        if of_dq and recorder.tickets and mask.data.any():
            recorder.note(Operation(STORE, int(ptrs.data.min()), part=np.array(value.data)))
        return store(self, ptrs, value, mask, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "interleave", interleave)
        patch.setattr(InterpreterBuilder, "create_atomic_cas", create_atomic_cas)
        patch.setattr(InterpreterBuilder, "create_atomic_rmw", create_atomic_rmw)
        patch.setattr(InterpreterBuilder, "create_masked_store", create_masked_store)
        yield recorder
