"""Shapes one after another, rows written as they come, within a time limit; shared by the commands here."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .contenders import Contender
from .environment import environment, sm_mhz
from .measure import LostDeviceError, attempt_to_compile, measure
from .plot import plot
from .report import line, not_run, rows_of, show
from .rows import Row, append
from .shapes import SHAPES, Shape

FILE = "attention.csv"
ROUNDS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What both commands take."""
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"folder of {FILE} (appended to) and the pictures")
    parser.add_argument("--shapes", metavar="NAMES", help="names or patterns, separated by commas")
    parser.add_argument("--contenders", metavar="NAMES", help="likewise; the baseline and the twins of those chosen come along")
    parser.add_argument("--rounds", type=_positive, metavar="N", help=f"repetitions (default {ROUNDS})")
    parser.add_argument("--minutes", type=float, metavar="M", help="start no shape after so long; rows of the others say so")
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="compile in so many processes first (default: do not)")
    parser.add_argument("--pictures", action=argparse.BooleanOptionalAction, default=True, help="draw this run's rows")
    parser.add_argument("--label", default="", help="name of this run in the rows")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON, and progress to stderr only")
    parser.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)


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


def chosen_contenders(patterns: str | None, known: Mapping[str, Contender], baseline: str) -> dict[str, Contender]:
    """Those named, the baseline, and the twins of both, in the known order; ValueError for a name that is none."""
    names = set(known) if patterns is None else _matching("contender", patterns, list(known)) | {baseline}
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
    args: argparse.Namespace, module: str, shapes: Sequence[Shape], contenders: Mapping[str, Contender], baseline: str
) -> int:
    """Measures and reports; 0, or 1 if a kernel faulted. Needs a GPU."""
    seconds = None if args.minutes is None else 60 * args.minutes
    deadline = None if seconds is None else time.monotonic() + seconds
    if args.compile_only:
        for shape in shapes:
            attempt_to_compile(shape, contenders)
        return 0
    if args.jobs > 0:
        _compile_first(module, args.jobs, shapes, contenders, None if seconds is None else seconds / 2)
    path = None if args.out is None else args.out / FILE
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
    rows, lost = run(shapes, contenders, rounds=args.rounds, label=args.label, baseline=baseline, deadline=deadline, path=path)
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        show(rows)
    if args.out is not None:
        _say(f"written: {path}")
        if args.pictures:
            say_written(plot(rows, args.out))
    return int(lost)


def run(
    shapes: Sequence[Shape],
    contenders: Mapping[str, Contender],
    *,
    rounds: int,
    label: str,
    baseline: str,
    deadline: float | None,
    path: Path | None,
) -> tuple[list[Row], bool]:
    """The rows of every shape, and whether the device was lost; each shape's are appended to `path` at once."""
    common: dict[str, Any] = {"run": label, "environment": environment(), "baseline": baseline}
    rows: list[Row] = []
    lost: str | None = None
    for n, shape in enumerate(shapes, 1):
        _say(f"[{n}/{len(shapes)}] {shape}")
        if lost is None and (deadline is None or time.monotonic() < deadline):
            try:
                found = rows_of(shape, measure(shape, contenders, rounds, baseline, _say), mhz=sm_mhz(), **common)
            except LostDeviceError as error:
                lost = f"a kernel faulted: {error}"
                found = not_run(shape, contenders, lost, **common)
        else:
            found = not_run(shape, contenders, lost or "the time limit", **common)
        for row in found:
            if row.median_ms is not None:
                _say(f"  {line(row)}")
        if path is not None:
            append(path, found)
        rows += found
    return rows, lost is not None


def _compile_first(
    module: str, jobs: int, shapes: Sequence[Shape], contenders: Mapping[str, Contender], seconds: float | None
) -> None:
    """Fills the compilers' caches from several processes, for so long at most.

    What fails there fails again, and is reported, where it is timed.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    _say(f"compiling {len(shapes)} shapes in {jobs} processes")
    environ = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    running = []
    for job in range(min(jobs, len(shapes))):
        names = ",".join(shape.name for shape in shapes[job::jobs])
        arguments = ["--compile-only", "--shapes", names, "--contenders", ",".join(contenders)]
        command = [sys.executable, "-m", module, *arguments]
        running.append(subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    for process in running:
        try:
            process.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
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
