"""A task of one stage, in a process of its own: `python -m dash_inductor.qualify.child JOB`, JOB being JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..config import current
from ..devices.cost_files import CostFileError
from ..devices.target import stays_stock, target_of
from ..templates.tiles import tile
from . import (
    additions,
    costs,
    environment,
    gpu_tests,
    kernel_times,
    kernels,
    marks,
    plots,
    prepare,
    profiler,
    runner,
    schedules,
    training,
)

NO_KERNELS = 4  # exit code, where nothing can be qualified; the last line on stdout says why


def describe(folder: str) -> int:
    """Writes and prints on what is measured; NO_KERNELS for a GPU for which there are none, or a wrong cost file."""
    try:
        tile(target_of(torch.device("cuda"), current()).arch, "bf16", 128)
    except CostFileError as error:
        print(error)
        return NO_KERNELS
    except ValueError as error:
        print(stays_stock("cuda:0", error))
        return NO_KERNELS
    for name, value in environment.write(Path(folder)).items():
        print(f"{name}: {value}")
    return 0


def kernel(case: str) -> int:
    """Checks one case, and prints the finding as JSON."""
    print(json.dumps(asdict(kernels.check(kernels.CASES[case]))))
    return 0


def add(folder: str) -> int:
    """Measures additions in L2."""
    additions.write(Path(folder) / additions.FILE, additions.measure())
    return 0


def overlapped(folder: str) -> int:
    """Measures work beside matmuls; its kernel needs a Triton that has Gluon."""
    from .overlaps import run

    return run(Path(folder))


def measure(job: dict[str, Any], folder: str) -> int:
    """Measures backwards."""
    return runner.run_job(runner.Job(**job), Path(folder))


def compile_some(job: dict[str, Any], pairs: Sequence[tuple[str, str]]) -> int:
    """Fills the compilers' caches."""
    return runner.compile_only(runner.Job(**job), pairs)


TASKS: dict[str, Callable[..., int]] = {
    "environment": describe,
    "kernels": lambda folder, seconds, jobs: kernels.run(Path(folder), seconds, jobs),
    "kernel": kernel,
    "tests": lambda folder, seconds: gpu_tests.run(seconds),
    "additions": add,
    "schedules": lambda folder, seconds, variants="": schedules.run(Path(folder), seconds, variants),
    "kernel_times": lambda folder, seconds: kernel_times.run(Path(folder), seconds),
    "marks": lambda folder: marks.run(Path(folder)),
    "overlaps": overlapped,
    "profile": lambda folder, seconds: profiler.run(Path(folder), seconds),
    "launch": profiler.launch,
    "training": lambda folder, seconds: training.run(Path(folder), seconds),
    "plots": plots.run,
    "measure": measure,
    "compile": compile_some,
    "prepare": prepare.compile_pairs,
    "prepare schedules": prepare.compile_schedules,
    "prepare training": prepare.compile_training,
    "costs": lambda folder, seconds, jobs: costs.run(Path(folder), seconds, jobs),
}


def main(job: str) -> int:
    """Does the task; its exit code."""
    asked = json.loads(job)
    try:
        return TASKS[asked.pop("task")](**asked)
    except ValueError as error:
        print(error)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
