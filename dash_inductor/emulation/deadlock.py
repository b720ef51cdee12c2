"""Who waits for whom: the report of a launch in which no program can go on."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["DeadlockError", "Release", "Stop", "Wait", "explain"]


class DeadlockError(RuntimeError):
    """All programs of a launch wait on semaphores that nobody is left to release."""


@dataclass(frozen=True)
class Wait:
    """A wait until the integer at `address` is `wanted`."""

    address: int
    wanted: int
    dtype: np.dtype[Any]

    def value(self) -> int:
        """What the semaphore holds now."""
        return int(np.frombuffer(ctypes.string_at(self.address, self.dtype.itemsize), self.dtype)[0])


@dataclass(frozen=True)
class Release:
    """An atomic_add and the like on the one element at `address`."""

    address: int


@dataclass(frozen=True)
class Stop:
    """Where a program stood when nobody could go on.

    `waits` is the wait it was blocked in and `value` what it found there (None: not started); `taken` are the
    waits and releases it had come to, `ahead` those it would have come to.
    """

    waits: Wait | None
    value: int
    taken: tuple[Wait | Release, ...]
    ahead: tuple[Wait | Release, ...]


def explain(kernel: str, programs: Sequence[Stop | None], resident: int | None) -> str:
    """The message of a `DeadlockError`; one entry per program of the launch, None for one that has ended."""
    blocked = {name: stop for name, stop in enumerate(programs) if stop is not None and stop.waits is not None}
    idle = {name for name, stop in enumerate(programs) if stop is not None and stop.waits is None}
    base = min(stop.waits.address for stop in blocked.values() if stop.waits)
    owners: dict[int, int | None] = {}
    started = f", {len(idle)} not started (resident={resident})" if idle else ""
    lines = [f"deadlock in {kernel}: {len(blocked)} of {len(programs)} programs wait{started}"]
    for name, stop in blocked.items():
        wait = stop.waits
        assert wait is not None
        owner = owners[name] = _owner(wait, programs)
        offset = (wait.address - base) // wait.dtype.itemsize
        fate = "nobody would release it" if owner is None else f"program {owner} would release it"
        fate += " (not started)" if owner in idle else ""
        lines.append(f"  program {name} waits for semaphore +{offset}: it is {stop.value}, wanted {wait.wanted}; {fate}")
    return "\n".join([*lines, _chain(owners, idle)])


def _owner(wait: Wait, programs: Sequence[Stop | None]) -> int | None:
    """The program whose release would make the semaphore what `wait` wants.

    A semaphore counts releases, and the program that waits for rank r - 1 makes it r. Without such a program (rank 0 need not be
    waited for) it is one with a release at this address still to come.
    """
    before, release = Wait(wait.address, wait.wanted - 1, wait.dtype), Release(wait.address)
    alive = [(name, stop) for name, stop in enumerate(programs) if stop is not None]
    for name, stop in alive:
        if before in stop.taken + stop.ahead and release in stop.ahead:
            return name
    return next((name for name, stop in alive if release in stop.ahead), None)


def _chain(owners: Mapping[int, int | None], idle: set[int]) -> str:
    """From one waiting program to the next, until one comes back (a cycle) or none waits any more."""
    paths: list[list[int]] = []
    for start in owners:
        path = [start]
        while (owner := owners.get(path[-1])) is not None:
            path.append(owner)
            if owner in path[:-1]:
                return "cycle: " + " -> ".join(map(str, path[path.index(owner) :]))
        paths.append(path)
    path = max(paths, key=len)
    end = "not started" if path[-1] in idle else "nobody to release it"
    return "chain: " + " -> ".join(map(str, path)) + f" ({end})"
