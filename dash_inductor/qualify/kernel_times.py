"""The time of each kernel of a backward, by torch's profiler: what is left when preparations and conversions are told apart."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from .contenders import prepared
from .environment import sm_mhz
from .measure import settings
from .rows import write
from .shapes import Shape, shapes_called

FILE = "kernel_times.csv"
SHAPES = "d128-causal-8192,d64-causal-8192,d128-full-8192,d64-full-8192"
CONTENDERS = ("ours-gluon", "ours-triton", "ours-two-pass", "flex", "fa4-deterministic", "fa4")
COMMITTED = "as committed"
LAUNCHES, WARM_UP = 20, 3
LETTERS = 60  # of a kernel's name


@dataclass(frozen=True)
class KernelTime:
    """Median over `launches` backwards; a backward's kernels stand in the order in which they run."""

    kernel_version: str
    shape: str
    contender: str
    schedule: str
    kernel: str
    median_us: float
    launches: int
    sm_mhz: int | None


def run(folder: Path, seconds: float) -> int:
    """Writes FILE, backward by backward, and begins none after so many seconds."""
    write(folder / FILE, KernelTime, measured(time.monotonic() + seconds))
    return 0


def measured(deadline: float) -> Iterator[KernelTime]:
    """The kernels of each backward; a line for one that is not measured."""
    for shape, name in itertools.product(shapes_called(SHAPES), CONTENDERS):
        try:
            if time.monotonic() >= deadline:
                raise ValueError("not run: the time limit")
            yield from kernels_of(shape, name)
        except ValueError as error:
            print(f"  {shape.name}, {name}: {error}")


def kernels_of(shape: Shape, name: str) -> Iterator[KernelTime]:
    """Those of a contender's backward; ValueError where the profiler did not see as many in each."""
    with settings():
        ready = prepared(name, shape, "cuda")
        kernels = profiled(ready.launch)
    schedule, mhz = ready.decision.schedule if ready.decision else "", sm_mhz()
    for kernel, times in kernels:
        found = KernelTime(
            COMMITTED, shape.name, name, schedule, kernel[:LETTERS], round(statistics.median(times), 1), LAUNCHES, mhz
        )
        print(f"  {shape.name}, {name}: {found.median_us:.1f} us {found.kernel}")
        yield found


def profiled(launch: Callable[[], Any]) -> list[tuple[str, Sequence[float]]]:
    """Each kernel of a backward and its times in us, one for each of LAUNCHES."""
    for _ in range(WARM_UP):
        launch()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(LAUNCHES):
            launch()
        torch.cuda.synchronize()
    events = sorted(found.events(), key=lambda each: each.time_range.start)
    return in_order([(event.name, event.device_time) for event in events if event.device_type == DeviceType.CUDA])  # not the host's


def in_order(events: Sequence[tuple[str, float]]) -> list[tuple[str, Sequence[float]]]:
    """Kernels by their place in a backward, since two may have one name.

    Raises:
        ValueError: backwards differ in their kernels.
    """
    each, left = divmod(len(events), LAUNCHES)
    places = [events[place::each] for place in range(each)] if each else []
    if left or not places or any(len({name for name, _ in place}) > 1 for place in places):
        raise ValueError(f"the profiler saw {len(events)} kernels, which are not {LAUNCHES} times the same")
    return [(place[0][0], [time for _, time in place]) for place in places]
