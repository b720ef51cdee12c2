"""Who waits for what: the report of a launch in which no program can go on."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


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


def explain(kernel: str, programs: int, waits: Mapping[int, Wait], unstarted: int, resident: int | None) -> str:
    """The message of a `DeadlockError`. waits: those of the programs that are blocked, by their numbers."""
    base = min(wait.address for wait in waits.values())
    started = f", {unstarted} not started (resident={resident})" if unstarted else ""
    lines = [f"deadlock in {kernel}: {len(waits)} of {programs} programs wait{started}"]
    for name, wait in sorted(waits.items()):
        offset = (wait.address - base) // wait.dtype.itemsize
        lines.append(f"  program {name} waits for semaphore +{offset}: it is {wait.value()}, wanted {wait.wanted}")
    return "\n".join(lines)
