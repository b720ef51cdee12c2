"""Shapes one after another, rows written as they come, within a time limit."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from . import contenders as who
from .contenders import Contender
from .environment import environment, sm_mhz
from .measure import TIME_LIMIT, LostDeviceError, Pace, attempt_to_compile, measure
from .report import line, not_run, rows_of
from .rows import append
from .shapes import QUICK, Shape, shapes_called

FILE = "attention.csv"
CHILD = "dash_inductor.qualify.child"  # by name: it stands above
BaselineOf = Callable[[Shape], str]  # the contender that figures of a shape are ratios to


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
    seconds: float | None = None
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
        names = who.tuned() if self.tuned else who.contenders()
        chosen = chosen_contenders(self.contenders or None, names, map(self.baseline_of, self.chosen_shapes()))
        return {name: contender for name, contender in chosen.items() if name not in self.without.split(",")}


def chosen_contenders(patterns: str | None, known: Mapping[str, Contender], baselines: Iterable[str]) -> dict[str, Contender]:
    """Those named, the baselines, and the twins of both, in the known order; ValueError for a name that is none."""
    names = set(known) if patterns is None else matching("contender", patterns, list(known)) | {*baselines}
    names |= {known[name].twin for name in names if known[name].twin in known}  # type: ignore[misc]
    return {name: contender for name, contender in known.items() if name in names}


def matching(what: str, patterns: str, names: Sequence[str]) -> set[str]:
    found = set()
    for pattern in patterns.split(","):
        matches = {name for name in names if fnmatchcase(name, pattern)}
        if not matches:
            raise ValueError(f"no {what} is called {pattern!r}; there are {', '.join(names)}")
        found |= matches
    return found


def run_job(job: Job, folder: Path) -> int:
    """Measures and writes rows; 0, or 1 if a kernel faulted. Needs a GPU.

    After a fault a process can do nothing more with its device: another one goes on with the shape and those after it, without the
    contender that faulted.
    """
    shapes, contenders = job.chosen_shapes(), job.chosen()
    seconds = math.inf if job.seconds is None else job.seconds
    pace = Pace(time.monotonic() + seconds)
    if job.jobs > 0:
        _compile_first(job, shapes, contenders, seconds / 2)
    lost = run(shapes, contenders, rounds=job.rounds, label=job.label, baseline_of=job.baseline_of, pace=pace, path=folder / FILE)
    if lost is not None:
        _go_on(job, folder, lost, contenders, pace)
    return int(lost is not None)


def compile_only(job: Job, pairs: Sequence[tuple[str, str]]) -> int:
    """Compiles contenders for shapes, by their names: what is left of that are the compilers' caches."""
    shapes, contenders = {shape.name: shape for shape in job.chosen_shapes()}, job.chosen()
    attempt_to_compile([(shapes[shape], contenders[name]) for shape, name in pairs])
    return 0


@dataclass(frozen=True)
class Lost:
    """The contender whose kernel faulted, and the shapes that are not measured, the first of them that of the fault."""

    contender: str
    shapes: Sequence[Shape]


def run(
    shapes: Sequence[Shape],
    contenders: Mapping[str, Contender],
    *,
    rounds: int,
    label: str,
    baseline_of: BaselineOf,
    pace: Pace,
    path: Path,
) -> Lost | None:
    """Appends the rows of every shape to `path` once it is measured; ends with the first kernel that faults."""
    common: dict[str, Any] = {"run": label, "environment": environment()}

    def leave(part: Sequence[Shape], names: Iterable[str], status: str) -> None:
        for shape in part:
            append(path, not_run(shape, [contenders[name] for name in names], status, baseline=baseline_of(shape), **common))

    for n, shape in enumerate(shapes):
        say(f"[{n + 1}/{len(shapes)}] {shape.name}")
        if pace.is_over():
            leave(shapes[n:], contenders, TIME_LIMIT)
            break
        try:
            baseline = baseline_of(shape)
            results = measure(shape, contenders, rounds, baseline, say, pace)
            rows = rows_of(shape, results, mhz=sm_mhz(), baseline=baseline, **common)
        except LostDeviceError as error:
            say(f"  {error.contender} faulted: {error}")
            leave([shape], [error.contender], f"failed: a kernel faulted: {error}")
            leave(shapes[n + 1 :], [error.contender], f"not run: a kernel faulted at {shape.name}")
            return Lost(error.contender, shapes[n:])
        except KeyboardInterrupt:
            leave(shapes[n:], contenders, "not run: interrupted")
            raise
        for row in rows:
            if row.median_ms is not None:
                say(f"  {line(row)}")
        append(path, rows)
    return None


def child(task: str, **arguments: Any) -> list[str]:
    """The command of another process that does a task of `child.py`."""
    return [sys.executable, "-m", CHILD, json.dumps({"task": task, **arguments})]


def _go_on(job: Job, folder: Path, lost: Lost, contenders: Mapping[str, Contender], pace: Pace) -> None:
    """Measures the rest in another process."""
    rest = [name for name in contenders if name != lost.contender]
    if not rest:
        return
    without = ",".join(filter(None, [job.without, lost.contender]))
    seconds = None if pace.deadline == math.inf else max(0.0, pace.deadline - time.monotonic())
    names = ",".join(shape.name for shape in lost.shapes)
    after = replace(job, shapes=names, contenders=",".join(rest), without=without, seconds=seconds, jobs=0)
    subprocess.run(child("measure", job=asdict(after), folder=str(folder)), check=False)


def _compile_first(job: Job, shapes: Sequence[Shape], contenders: Mapping[str, Contender], seconds: float) -> None:
    """Fills the compilers' caches from several processes, for so long at most.

    What fails there fails again, and is reported, where it is timed.
    """
    deadline = time.monotonic() + seconds
    pairs = [(shape.name, name) for shape in shapes for name, contender in contenders.items() if contender.compiled]
    jobs = min(job.jobs, len(pairs))
    say(f"compiling {len(pairs)} graphs in {jobs} processes")
    environ = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    commands = [child("compile", job=asdict(job), pairs=pairs[n::jobs]) for n in range(jobs)]
    running = [subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for command in commands]
    try:
        for process in running:
            try:
                process.wait(None if deadline == math.inf else max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                break
    finally:
        for process in running:
            process.kill()
            process.wait()


def say(text: str) -> None:
    """Progress: on stdout, which the stage's parent passes on."""
    print(text, flush=True)
