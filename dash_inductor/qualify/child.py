"""A task of one stage, in a process of its own: `python -m dash_inductor.qualify.child JOB`, JOB being JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

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


def describe(folder: Path) -> int:
    """Writes and prints on what is measured; NO_KERNELS for a GPU for which there are none, or a wrong cost file."""
    try:
        tile(target_of(torch.device("cuda"), current()).arch, "bf16", 128)
    except CostFileError as error:
        print(error)
        return NO_KERNELS
    except ValueError as error:
        print(stays_stock("cuda:0", error))
        return NO_KERNELS
    for name, value in environment.write(folder).items():
        print(f"{name}: {value}")
    return 0


def kernel(case: str) -> int:
    """Checks one case, and prints the finding as JSON."""
    print(json.dumps(asdict(kernels.check(kernels.CASES[case]))))
    return 0


def overlapped(folder: Path) -> int:
    """Measures work beside matmuls; its kernel needs a Triton that has Gluon."""
    from .overlaps import run

    return run(folder)


TASKS: dict[str, Callable[..., int]] = {
    "environment": describe,
    "kernels": kernels.run,
    "kernel": kernel,
    "tests": lambda folder, seconds: gpu_tests.run(seconds),
    "additions": additions.run,
    "schedules": schedules.run,
    "kernel_times": kernel_times.run,
    "marks": marks.run,
    "overlaps": overlapped,
    "profile": profiler.run,
    "launch": profiler.launch,
    "training": training.run,
    "plots": plots.run,
    "measure": runner.run_job,
    "compile": runner.compile_only,
    "prepare": prepare.compile_pairs,
    "prepare schedules": prepare.compile_schedules,
    "prepare training": prepare.compile_training,
    "costs": costs.run,
    "compile launches": costs.compile_launches,
}


def main(job: str) -> int:
    """Does the task; its exit code."""
    asked = json.loads(job)
    task = TASKS[asked.pop("task")]
    for name, kind in (("folder", Path), ("job", lambda job: runner.Job(**job))):
        if name in asked:
            asked[name] = kind(asked[name])
    try:
        return task(**asked)
    except ValueError as error:
        print(error)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
