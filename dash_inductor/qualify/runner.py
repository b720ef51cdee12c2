"""Shapes one after another, rows written as they come, within a time limit."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from . import contenders as who
from .contenders import Contender
from .environment import environment, sm_mhz
from .inputs import random_inputs
from .measure import TIME_LIMIT, LostDeviceError, Pace, measure, settings
from .report import line, not_run, rows_of
from .rows import append
from .shapes import QUICK, Shape, matching, shapes_called

FILE = "attention.csv"


@dataclass(frozen=True)
class Job:
    """What is to be measured, in a form that another process can be given.

    Attributes:
        label: the name of this run in the rows.
        shapes: names or patterns, separated by commas, or sizes (`shapes.shapes_called`); "" for QUICK, "*" for all.
        contenders: names or patterns, separated by commas; the baselines and the twins of those chosen come along. "" for all.
        tuned: ours beside variants of itself, `ours` being the baseline of every ratio, and not ours beside all others.
        seconds: nothing is started after so long; rows say what was left.
        jobs: compile in so many processes first.
        without: contenders to leave out, separated by commas.
    """

    label: str
    shapes: str = ""
    contenders: str = ""
    tuned: bool = False
    rounds: int = 20
    seconds: float = math.inf
    jobs: int = 0
    without: str = ""

    def chosen_shapes(self) -> list[Shape]:
        """In the order of SHAPES; ValueError for a name that is none."""
        return shapes_called(self.shapes) if self.shapes else list(QUICK)

    def baseline_of(self, shape: Shape) -> str:
        """The contender that figures of a shape are ratios to."""
        return who.TUNED_BASELINE if self.tuned else who.baseline_of(shape)

    def chosen(self) -> dict[str, Contender]:
        """The contenders by name; ValueError for a name that is none."""
        known = who.tuned() if self.tuned else who.contenders()
        names = set(known)
        if self.contenders:
            names = matching("contender", self.contenders.split(","), known) | set(map(self.baseline_of, self.chosen_shapes()))
        names |= {twin for name in names if (twin := known[name].twin)}
        return {name: contender for name, contender in known.items() if name in names - {*self.without.split(",")}}


def run_job(job: Job, folder: Path) -> int:
    """Measures and writes rows; 0, or 1 if a kernel faulted. Needs a GPU.

    After a fault a process can do nothing more with its device: another one goes on with the shape and those after it, without the
    contender that faulted.
    """
    pace = Pace(time.monotonic() + job.seconds)
    if job.jobs > 0:
        _compile_first(job)
    lost, shapes = run(job, pace, folder / FILE)
    rest = [name for name in job.chosen() if name != lost]
    if lost and rest:
        without = ",".join(filter(None, [job.without, lost]))
        seconds = max(0.0, pace.deadline - time.monotonic())
        names = ",".join(shape.name for shape in shapes)
        after = replace(job, shapes=names, contenders=",".join(rest), without=without, seconds=seconds, jobs=0)
        subprocess.run(child("measure", job=asdict(after), folder=str(folder)), check=False)
    return int(bool(lost))


def compile_only(job: Job, pairs: Sequence[tuple[str, str]]) -> int:
    """Compiles contenders for shapes, by their names: what is left of that are the compilers' caches."""
    shapes, contenders = {shape.name: shape for shape in job.chosen_shapes()}, job.chosen()
    with settings():
        for shape, name in pairs:
            if contenders[name].unavailable("cuda") is None:
                with suppress(Exception):
                    contenders[name].prepare(shapes[shape], random_inputs(shapes[shape], "cuda"))
    return 0


def run(job: Job, pace: Pace, path: Path) -> tuple[str, Sequence[Shape]]:
    """Appends the rows of every shape to `path` once it is measured, and ends with the first kernel that faults.

    Returns its contender, or "", and the shapes that are not measured, the first of them that of the fault.
    """
    shapes, contenders = job.chosen_shapes(), job.chosen()
    common: dict[str, Any] = {"run": job.label, "environment": environment()}

    def leave(part: Sequence[Shape], names: Iterable[str], status: str) -> None:
        for shape in part:
            append(path, not_run(shape, [contenders[name] for name in names], status, baseline=job.baseline_of(shape), **common))

    for n, shape in enumerate(shapes):
        print(f"[{n + 1}/{len(shapes)}] {shape.name}")
        if pace.is_over():
            leave(shapes[n:], contenders, TIME_LIMIT)
            break
        try:
            baseline = job.baseline_of(shape)
            results = measure(shape, contenders, job.rounds, baseline, print, pace)
            rows = rows_of(shape, results, mhz=sm_mhz(), baseline=baseline, **common)
        except LostDeviceError as error:
            print(f"  {error.contender} faulted: {error}")
            leave([shape], [error.contender], f"failed: a kernel faulted: {error}")
            leave(shapes[n + 1 :], [error.contender], f"not run: a kernel faulted at {shape.name}")
            return error.contender, shapes[n:]
        except KeyboardInterrupt:
            leave(shapes[n:], contenders, "not run: interrupted")
            raise
        for row in rows:
            if row.median_ms is not None:
                print(f"  {line(row)}")
        append(path, rows)
    return "", ()


def child(task: str, **arguments: Any) -> list[str]:
    """The command of another process that does a task of `child.py`."""
    return [sys.executable, "-m", "dash_inductor.qualify.child", json.dumps({"task": task, **arguments})]


def _compile_first(job: Job) -> None:
    """Fills the compilers' caches, in half of the time."""
    names = [name for name, contender in job.chosen().items() if contender.compiled]
    pairs = [(shape.name, name) for shape in job.chosen_shapes() for name in names]
    jobs = min(job.jobs, len(pairs))
    print(f"compiling {len(pairs)} graphs in {jobs} processes")
    run_together([child("compile", job=asdict(job), pairs=pairs[n::jobs]) for n in range(jobs)], job.seconds / 2)


def run_together(commands: Iterable[list[str]], seconds: float) -> None:
    """Runs commands that fill the compilers' caches, for so long at most.

    What fails there fails again, and is reported, where it is timed.
    """
    deadline = time.monotonic() + seconds
    environ = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    running = [subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for command in commands]
    try:
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                break
    finally:
        for process in running:
            process.kill()
            process.wait()
