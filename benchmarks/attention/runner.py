"""Shapes one after another, rows written as they come, within a time limit; shared by the commands here."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .contenders import Contender
from .environment import environment, sm_mhz
from .measure import TIME_LIMIT, LostDeviceError, Pace, attempt_to_compile, measure
from .plot import plot
from .report import line, not_run, rows_of, show
from .rows import append, read
from .shapes import SHAPES, Shape

FILE = "attention.csv"
ROUNDS = 20
BaselineOf = Callable[[Shape], str]  # the contender that figures of a shape are ratios to


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What both commands take."""
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"folder of {FILE} (appended to) and the pictures")
    parser.add_argument("--shapes", metavar="NAMES", help="names or patterns, separated by commas")
    parser.add_argument("--contenders", metavar="NAMES", help="likewise; the baselines and the twins of those chosen come along")
    parser.add_argument("--rounds", type=_positive, metavar="N", help=f"repetitions (default {ROUNDS})")
    parser.add_argument("--minutes", type=float, metavar="M", help="start nothing after so long; rows say what was left")
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="compile in so many processes first (default: do not)")
    parser.add_argument("--pictures", action=argparse.BooleanOptionalAction, default=True, help="draw this run's rows")
    parser.add_argument("--label", default="", help="name of this run in the rows")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON, and progress to stderr only")
    parser.add_argument("--compile-only", metavar="SHAPE/CONTENDER,...", help=argparse.SUPPRESS)
    parser.add_argument("--without", metavar="NAME,...", default="", help=argparse.SUPPRESS)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def require_gpu(parser: argparse.ArgumentParser) -> None:
    """Ends the command with exit code 2 where there is nothing to measure."""
    if not has_gpu():
        parser.exit(
            2, f"{parser.prog}: needs a GPU, and torch.cuda.is_available() is False here; emulated times would mean nothing\n"
        )


def chosen_shapes(patterns: str | None, default: Sequence[Shape]) -> list[Shape]:
    """Those named, in the order of SHAPES; ValueError for a name that is none."""
    if patterns is None:
        return list(default)
    names = _matching("shape", patterns, [shape.name for shape in SHAPES])
    return [shape for shape in SHAPES if shape.name in names]


def chosen_contenders(patterns: str | None, known: Mapping[str, Contender], baselines: Iterable[str]) -> dict[str, Contender]:
    """Those named, the baselines, and the twins of both, in the known order; ValueError for a name that is none."""
    names = set(known) if patterns is None else _matching("contender", patterns, list(known)) | {*baselines}
    names |= {known[name].twin for name in names if known[name].twin in known}  # type: ignore[misc]
    return {name: contender for name, contender in known.items() if name in names}


def _matching(what: str, patterns: str, names: Sequence[str]) -> set[str]:
    found = set()
    for pattern in patterns.split(","):
        matches = {name for name in names if fnmatchcase(name, pattern)}
        if not matches:
            raise ValueError(f"no {what} is called {pattern!r}; there are {', '.join(names)}")
        found |= matches
    return found


def command(
    args: argparse.Namespace, module: str, shapes: Sequence[Shape], contenders: Mapping[str, Contender], baseline_of: BaselineOf
) -> int:
    """Measures and reports; 0, or 1 if a kernel faulted. Needs a GPU.

    After a fault a process can do nothing more with its device: another one goes on with the shape and those after it, without the
    contender that faulted.
    """
    if args.compile_only is not None:
        by_name = {shape.name: shape for shape in shapes}
        pairs = [pair.split("/") for pair in args.compile_only.split(",")]
        attempt_to_compile([(by_name[shape], contenders[name]) for shape, name in pairs])
        return 0
    contenders = {name: c for name, c in contenders.items() if name not in args.without.split(",")}
    seconds = math.inf if args.minutes is None else 60 * args.minutes
    pace = Pace(time.monotonic() + seconds)
    if args.jobs > 0:
        _compile_first(module, args.jobs, shapes, contenders, seconds / 2)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / FILE
    before = len(read(path)) if path.exists() else 0
    lost = run(shapes, contenders, rounds=args.rounds, label=args.label, baseline_of=baseline_of, pace=pace, path=path)
    if lost is not None:
        _go_on(args, module, lost, contenders, pace)
    rows = read(path).iloc[before:]
    if args.json:
        print(json.dumps(rows.astype(object).where(rows.notna(), None).to_dict("records"), indent=2))
    else:
        show(rows)
    _say(f"written: {path}")
    if args.pictures:
        say_written(plot(rows, args.out))
    return int(lost is not None)


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
        _say(f"[{n + 1}/{len(shapes)}] {shape}")
        if pace.is_over():
            leave(shapes[n:], contenders, TIME_LIMIT)
            break
        try:
            baseline = baseline_of(shape)
            results = measure(shape, contenders, rounds, baseline, _say, pace)
            rows = rows_of(shape, results, mhz=sm_mhz(), baseline=baseline, **common)
        except LostDeviceError as error:
            _say(f"  {error.contender} faulted: {error}")
            leave([shape], [error.contender], f"failed: a kernel faulted: {error}")
            leave(shapes[n + 1 :], [error.contender], f"not run: a kernel faulted at {shape.name}")
            return Lost(error.contender, shapes[n:])
        except KeyboardInterrupt:
            leave(shapes[n:], contenders, "not run: interrupted")
            raise
        for row in rows:
            if row.median_ms is not None:
                _say(f"  {line(row)}")
        append(path, rows)
    return None


def _go_on(args: argparse.Namespace, module: str, lost: Lost, contenders: Mapping[str, Contender], pace: Pace) -> None:
    """Measures the rest in another process."""
    rest = [name for name in contenders if name != lost.contender]
    if not rest:
        return
    without = ",".join(filter(None, [args.without, lost.contender]))
    arguments = ["--out", args.out, "--label", args.label, "--rounds", args.rounds, "--no-pictures", "--without", without]
    if pace.deadline < math.inf:
        arguments += ["--minutes", max(0.0, pace.deadline - time.monotonic()) / 60]
    arguments += ["--shapes", ",".join(shape.name for shape in lost.shapes), "--contenders", ",".join(rest)]
    command = [sys.executable, "-m", module, *map(str, arguments)]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=False)


def _compile_first(module: str, jobs: int, shapes: Sequence[Shape], contenders: Mapping[str, Contender], seconds: float) -> None:
    """Fills the compilers' caches from several processes, for so long at most.

    What fails there fails again, and is reported, where it is timed.
    """
    deadline = time.monotonic() + seconds
    pairs = [f"{shape.name}/{name}" for shape in shapes for name, contender in contenders.items() if contender.compiled]
    _say(f"compiling {len(pairs)} graphs in {min(jobs, len(pairs))} processes")
    environ = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    common = ["--shapes", ",".join(shape.name for shape in shapes), "--contenders", ",".join(contenders)]
    running = []
    for job in range(min(jobs, len(pairs))):
        command = [sys.executable, "-m", module, *common, "--compile-only", ",".join(pairs[job::jobs])]
        running.append(subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    for process in running:
        try:
            process.wait(None if deadline == math.inf else max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def say_written(pictures: Sequence[Path]) -> None:
    """Which pictures there are, or why there are none."""
    missing = find_spec("matplotlib") is None
    for picture in pictures:
        _say(f"written: {picture}")
    if not pictures:
        _say(f"no pictures: {'matplotlib is not installed' if missing else 'no row was timed'}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
