"""A training that is stopped and resumed in another process: whether it goes on with the bits of one that ran on."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import StepError
from .check import CACHE, Done, Place, Target, report_of
from .diverge import Operation, Parting, parting
from .report import Report

STRAIGHT, STOPPED = "without a stop", "stopped and saved"
RESUMED = {"fresh": "resumed, warm caches", "cold": "resumed, cold caches"}
RETURNED = "train(steps, save=PATH) returned, and there is nothing at PATH: it has to save there what it resumes from"


def check_resumed(name: str, at: int, steps: int, timeout: float | None, began: Callable[[str], None]) -> Report:
    """Train `steps` steps in one go; and in other processes `at` of them, saved, and the others, resumed.

    name: "package.module:function", which is called as train(steps), train(steps, save=path) and train(steps, resume=path), and
    returns the model whose gradients count, or a dict of tensors. `began` hears what begins.

    Raises:
        ValueError: it raises, or returns something else, or saves nothing, or a process that runs it dies or takes too long.
    """
    if not 0 < at < steps:
        raise ValueError(f"stop after 1 to {steps - 1} of {steps} steps, not after {at}")
    module, _, function = name.partition(":")
    job = {"function": {"module": module, "name": function}, "settings": None}
    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        target = Target(name, None, job, {}, Path(folder), timeout)
        warm, saved = {CACHE: str(target.new_folder())}, str(target.new_folder() / "saved")

        def measured(kind: str, environ: dict[str, str], process: int, how: str, *, first: bool = False, **arguments: Any) -> Done:
            began(how)
            place = Place(kind, environ, arguments)
            (result,), facts = target.measure(place, 1, first=first)
            return Done(place, process, how, result, facts)

        done = [measured("same", warm, 1, STRAIGHT, first=True, steps=steps)]
        measured("fresh", warm, 2, STOPPED, steps=at, save=saved)
        if not Path(saved).exists():
            raise StepError(RETURNED)
        caches = {"fresh": warm, "cold": {CACHE: str(target.new_folder())}}
        for process, (kind, how) in enumerate(RESUMED.items(), 3):
            done.append(measured(kind, caches[kind], process, how, steps=steps, resume=saved))

        def parted(place: Place) -> tuple[Parting | None, str]:
            began("operation by operation")
            return _parted(target, at, place.environ, saved)

        return report_of(name, done, (), parted)


def _parted(target: Target, at: int, environ: dict[str, str], saved: str) -> tuple[Parting | None, str]:
    """The first operation of the step behind the stop that is not that of a training without one."""

    def trace(**arguments: Any) -> list[Operation]:
        return target.trace(Place("fresh", environ, arguments), 1)[0]

    try:
        straight = _added(trace(steps=at), trace(steps=at + 1))
        found = parting(straight, _behind_loading(straight, trace(steps=at + 1, resume=saved)))
    except StepError as error:
        return None, f"Run operation by operation, {error}."
    if found is None:
        return None, f"Step {at + 1}, the first one that is resumed, does the same operation by operation: a later one differs."
    return found, found.cause


def _added(shorter: list[Operation], longer: list[Operation]) -> list[Operation]:
    """The operations of a step more: those that come behind what both have at the beginning, and before what both end with."""
    begin = _equal(shorter, longer)
    return longer[begin : len(longer) - (len(shorter) - begin)]


def _behind_loading(step: list[Operation], resumed: list[Operation]) -> list[Operation]:
    """What a training that is resumed does from where it does most of what the step does, one after the other, on."""
    begin = max(range(len(resumed) + 1), key=lambda n: _equal(step, resumed[n:]))
    return resumed[begin:]


def _equal(first: list[Operation], second: list[Operation]) -> int:
    """How many operations have the same names and lines, from the beginning on."""
    pairs = zip(first, second, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if (a.name, a.source) != (b.name, b.source)), min(len(first), len(second)))
