"""What is being emulated now, and what was launched: the only state of the emulation."""

from __future__ import annotations

import os
import random
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

Program = TypeVar("Program")


@dataclass(frozen=True)
class Emulation:
    """The device that is emulated.

    `seed` decides the interleaving of a launch's programs, `sms` is the number of SMs that Inductor sees when it
    compiles, `resident` bounds the programs that are started and not ended (None: no bound).
    """

    seed: int = 0
    sms: int = 6
    resident: int | None = None

    def __post_init__(self) -> None:
        for name in ("seed", "sms", "resident"):
            value = getattr(self, name)
            if type(value) is not int and not (name == "resident" and value is None):
                raise ValueError(f"{name}={value!r} is not a whole number")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} is negative")
        if self.sms < 1:
            raise ValueError(f"sms={self.sms}: an emulated device has at least one SM")
        if self.resident is not None and self.resident < 1:
            raise ValueError(f"resident={self.resident}: at least one program must be resident")


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel that uses atomics.

    `schedule` holds the launch's programs, as linear ids (x fastest), in the order in which they were given the
    turn. A wait is an `atomic_cas(semaphore, rank, rank)`: `satisfied` counts those that succeeded at once,
    `waits` those that had to be polled again.
    """

    kernel: str
    programs: int
    schedule: tuple[int, ...]
    waits: int
    satisfied: int


class Turns:
    """Who starts when and who goes on, at random."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)

    def starts(self, programs: Sequence[Program]) -> list[Program]:
        """The programs, the one that starts last first."""
        return self.random.sample(programs, len(programs))

    def next(self, ready: Sequence[object]) -> int:
        """Which of the programs that can go on does."""
        return self.random.randrange(len(ready))


class Session:
    """One `emulate()`: the device and how many kernels it has launched.

    Each launch has turns of its own, so that a launch's interleaving depends on the seed and its number alone.
    """

    def __init__(self, emulation: Emulation) -> None:
        self.emulation = emulation
        self.count = 0

    def next_turns(self) -> Turns:
        """Those of the next launch."""
        self.count += 1
        return Turns(f"{self.emulation.seed}/{self.count}")


LOCK = threading.RLock()
# Whoever forks waits for a launch of another thread: in the child that thread would never go on, and hold the lock for ever.
os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release)
"""Held by the thread that compiles, launches, or starts or ends an emulation: what these patch is the process's."""

ACTIVE: list[Session] = []
"""Innermost last."""

LAUNCHES: deque[Launch] = deque(maxlen=1024)
"""Of kernels that use atomics, oldest first."""
