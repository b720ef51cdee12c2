"""The time of each kernel of a backward, by torch's profiler: what is left when preparations and conversions are told apart."""

from __future__ import annotations

import csv
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from .contenders import RefusedError, contenders
from .environment import sm_mhz
from .inputs import random_inputs
from .measure import settings
from .runner import say
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
    deadline, known = time.monotonic() + seconds, contenders()
    with (folder / FILE).open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(each.name for each in fields(KernelTime))
        for shape in shapes_called(SHAPES):
            for name in CONTENDERS:
                why = "the time limit" if time.monotonic() >= deadline else known[name].unavailable("cuda")
                if why:
                    say(f"  {shape.name}, {name}: not run: {why}")
                    continue
                try:
                    writer.writerows(map(astuple, kernels_of(shape, name)))
                except (RefusedError, ValueError) as error:
                    say(f"  {shape.name}, {name}: {error}")
                file.flush()
    return 0


def kernels_of(shape: Shape, name: str) -> Iterator[KernelTime]:
    """Those of a contender's backward; ValueError where the profiler did not see as many in each."""
    with settings():
        prepared = contenders()[name].prepare(shape, random_inputs(shape, "cuda"))
        kernels = profiled(prepared.launch)
    schedule, mhz = prepared.decision.schedule if prepared.decision else "", sm_mhz()
    for kernel, times in kernels:
        found = KernelTime(
            COMMITTED, shape.name, name, schedule, kernel[:LETTERS], round(statistics.median(times), 1), LAUNCHES, mhz
        )
        say(f"  {shape.name}, {name}: {found.median_us:.1f} us {found.kernel}")
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
    return in_order([(event.name, event.device_time) for event in sorted(found.events(), key=lambda each: each.time_range.start)])


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
