"""Times and memory of one launch on the current CUDA device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

ATTEMPTS = 6
SPIN = 1 << 20  # device clock cycles, about half a millisecond
MOST_SPIN = SPIN << 3  # that it begins with
FLUSHED = 256 << 20  # bytes, several times any L2


class Clock:
    """Milliseconds on the device of what a call enqueues, with a cold L2 and never waiting for the host.

    The device spins before the first event until the host has enqueued everything; if it was done sooner, once more with
    twice the spin, with which later calls begin. `late` counts the times that no spin was long enough: the call itself waits
    for the device.
    """

    def __init__(self, flushed: Any) -> None:
        """`flushed`: a tensor several times as large as L2, which is overwritten."""
        self._flushed = flushed
        self._spin = SPIN
        self.late = 0

    def milliseconds(self, launch: Callable[[], Any]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for attempt in range(ATTEMPTS):
            self._flushed.zero_()
            torch.cuda._sleep(self._spin << attempt)
            start.record()
            launch()
            end.record()
            in_time = not start.query()
            end.synchronize()
            if in_time:
                self._spin = min(self._spin << attempt, MOST_SPIN)  # a call that compiles must not make all later ones wait
                return start.elapsed_time(end)
        self.late += 1
        return start.elapsed_time(end)


def host_milliseconds(launch: Callable[[], Any]) -> tuple[float, Any]:
    """How long a call and all that it enqueues take by the host's clock, and what it returns."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    found = launch()
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - start), found


def flushed() -> Any:
    """What a Clock overwrites; several may share it."""
    return torch.empty(FLUSHED, dtype=torch.int8, device="cuda")


def peak_bytes(launch: Callable[[], Sequence[Any]]) -> int:
    """The most memory that a launch holds at a time beside what was there before and what it returns."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs = launch()
    torch.cuda.synchronize()
    returned = sum(x.untyped_storage().nbytes() for x in outputs)
    return torch.cuda.max_memory_allocated() - before - returned


def poison() -> None:
    """Fills all free memory that the allocator keeps with NaN (0xff bytes, -1 to integers).

    What is allocated next, and was before, holds that until it is written.
    """
    torch.cuda.synchronize()
    free = [
        block["size"] for segment in torch.cuda.memory_snapshot() for block in segment["blocks"] if block["state"] == "inactive"
    ]
    filled = [torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda") for size in sorted(free, reverse=True)]
    torch.cuda.synchronize()
    del filled
