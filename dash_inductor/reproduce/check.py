"""A training step run several times, here and in other processes: whether every bit is the same, and where the first differs."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from . import StepError
from .diverge import Operation, Parting, parting
from .processes import busy_gpu
from .processes import run as run_process
from .report import Difference, Report, Run

KINDS = {
    "same": "again in the same process",
    "fresh": "another process, warm caches",
    "cold": "another process, cold caches",
    "seed": "another process, CTAs in another order",
    "busy": "another process, busy GPU",
    "reserve": "another process, more SMs left free",
    "device": "another process, another GPU",
    "split": "attention alone, the batch split",
}
AGAIN, ELSEWHERE = ("same", "fresh", "cold", "seed", "busy"), ("seed", "busy", "reserve", "device", "split")
RUNS = 2
TIMEOUT = 3600.0  # seconds
ATTEMPTS = 3  # of showing a difference again, operation by operation
FIRST = "first run"
MOST_LINES = 5  # of manifests that differ
CACHE, SEED, RESERVE, VISIBLE = "TORCHINDUCTOR_CACHE_DIR", "DASH_INDUCTOR_SEED", "DASH_INDUCTOR_SM_RESERVE", "CUDA_VISIBLE_DEVICES"
RUN = "the kind reserve needs guarantee='device' or 'batch': at level run the number of SMs decides bits"
SPLIT = "The bits of an attention depend on its batch: of its forward if out differs, else of its backward."
CHILD = "dash_inductor.reproduce.child"
GONE = (
    "Run operation by operation, where each one ends before the next begins, the step did not differ: the difference may need "
    "operations that overlap, memory that nothing has written (which is filled with zeros there), or more runs (--runs)."
)
in_child = False  # whether this process was started by `check`


def check(
    step: Callable[[], Any], runs: int = RUNS, *, kinds: Sequence[str] | None = None, timeout: float | None = TIMEOUT
) -> Report:
    """Run a training step several times, and compare every bit of its gradients.

    `step()` does one training step, from its seeds on, and returns the model whose gradients count, or a dict of tensors. It runs
    in this process, and then in fresh ones with this one's settings, which import it. A function that cannot be imported, such as
    a lambda or a notebook's function, runs in this process alone, and the report says so.

    Args:
        runs: how many times each process runs the step.
        kinds: some of "same", "fresh", "cold", "seed", "busy", "reserve", "device", "split" (see `KINDS`); None: the first five, as
            far as they can be had here.
        timeout: seconds that each fresh process may take.

    Raises:
        ValueError: the step raises, or returns something else, or a process that runs it dies or takes too long.
    """
    if in_child:
        raise ValueError('check() runs again where its script is imported: put it under `if __name__ == "__main__":`')
    from . import settings

    if not callable(step):
        raise ValueError(f"check takes a function that does one training step, not one of type {type(step).__name__}")
    function, reason = _importable(step)
    notes = [] if function is not None else [f"step ran in this process alone, because {reason}"]
    job = {"function": function, "settings": settings.of_torch()}
    name = getattr(step, "__qualname__", type(step).__name__)
    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        target = Target(name, step, job, settings.variables(), Path(folder), timeout)
        return _checked(target, runs, kinds, notes, lambda name: None)


def check_named(
    name: str,
    runs: int,
    kinds: Sequence[str] | None,
    timeout: float | None,
    began: Callable[[str], None],
    usual: Sequence[str] = AGAIN,
) -> Report:
    """The same of "package.module:function", in other processes alone; `began` hears what begins. usual: the kinds where none are
    asked for, as far as they can be had."""
    module, _, function = name.partition(":")
    job = {"function": {"module": module, "name": function}, "settings": None}
    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        return _checked(Target(name, None, job, {}, Path(folder), timeout), runs, kinds, (), began, usual)


def _importable(step: Callable[..., Any]) -> tuple[dict[str, str] | None, str]:
    """By which name another process can import the function, or why it cannot."""
    name, module = getattr(step, "__qualname__", None), getattr(step, "__module__", None)
    if not name or not module:
        return None, f"one of type {type(step).__name__} has no name by which another process could import it"
    if "<lambda>" in name:
        return None, "a lambda has no name by which another process could import it"
    if "<locals>" in name:
        return None, f"{name.rpartition('.')[2]} is defined inside another function, where another process cannot import it"
    home = sys.modules.get(module)
    found: Any = home
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not step:
        return None, f"{module}.{name} is not this function, which another process would import by that name"
    if module != "__main__":
        return {"module": module, "name": name}, ""
    spec, file = getattr(home, "__spec__", None), getattr(home, "__file__", None)
    if spec is not None:
        return {"module": spec.name, "name": name}, ""
    if file is None or not os.path.isfile(file):
        return None, "a notebook's or an interactive session's function cannot be imported by another process"
    return {"file": os.path.abspath(file), "name": name}, ""


@dataclass(frozen=True)
class Place:
    """A process and what is different there; `kind` is a key of KINDS, "same" the first process, which may be this one. The step
    gets the arguments."""

    kind: str
    environ: dict[str, str]
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """The step that is checked, and how other processes run it; everything written is in `folder`."""

    name: str
    step: Callable[[], Any] | None
    job: Mapping[str, Any]
    environ: Mapping[str, str]
    folder: Path
    timeout: float | None

    def new_folder(self) -> Path:
        """An empty one."""
        return Path(tempfile.mkdtemp(dir=self.folder))

    def measure(self, place: Place, runs: int, *, first: bool) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """(Each run beside the first one, facts: what hints depend on, and under "manifest" that of the process, as JSON)."""
        *results, last = self._results(place, {"runs": runs, "first": first, "trace": False, "split": place.kind == "split"}, {})
        return results, last["facts"] | {"manifest": last["manifest"]}

    def trace(self, place: Place, runs: int) -> list[list[Operation]]:
        """The operations of each run, by caches that are cold."""
        (result,) = self._results(place, {"runs": runs, "trace": True, "split": False}, {CACHE: str(self.new_folder())})
        return [[Operation(**operation) for operation in operations] for operations in result["traces"]]

    def _results(self, place: Place, job: dict[str, Any], environ: Mapping[str, str]) -> list[dict[str, Any]]:
        whole = {**self.job, **job, "arguments": place.arguments, "folder": str(self.folder), "main": CHILD}
        if place.kind == "same" and self.step is not None:
            from . import step

            return list(step.results(self.step, whole))
        with busy_gpu() if place.kind == "busy" else nullcontext():
            return run_process(whole, {**self.environ, **place.environ, **environ}, self.new_folder(), self.timeout)


def _checked(
    target: Target,
    runs: int,
    kinds: Sequence[str] | None,
    notes: Sequence[str],
    began: Callable[[str], None],
    usual: Sequence[str] = AGAIN,
) -> Report:
    """Run everything, and look for the first operation that differs where a run does; `began` hears what begins."""
    if type(runs) is not int or runs < 1:
        raise ValueError(f"runs={runs!r} is not a whole number of at least 1")
    for kind in kinds or ():
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is none of the kinds {', '.join(KINDS)}")
    wanted = kinds or (usual if target.job["function"] else ("same",))
    if runs == 1 and set(wanted) == {"same"}:
        raise ValueError("one run has nothing to agree with: ask for at least 2 runs")
    # A command's caches are its own, and cold at first; those of a session that calls check() stay what they are.
    warm = {} if target.step else {CACHE: str(target.new_folder())}
    first = Place("same", warm)
    began(FIRST)
    results, facts = target.measure(first, runs if "same" in wanted else 1, first=True)
    done = [Done(first, 1, KINDS["same"] if number else FIRST, each, facts) for number, each in enumerate(results)]
    for process, place in enumerate(_others(target, wanted, kinds, warm, facts), 2):
        began(KINDS[place.kind])
        results, its_facts = target.measure(place, runs, first=False)
        done += (Done(place, process, KINDS[place.kind], each, its_facts) for each in results)

    def parted(place: Place) -> tuple[Parting | None, str]:
        if place.kind == "split":
            return None, SPLIT
        began("operation by operation")
        return _parted(target, first, place, runs)

    return report_of(target.name, done, notes, parted)


class Done(NamedTuple):
    """A run: where it was, the number of its process, how it differs from the first, what came of it, and facts of its process."""

    place: Place
    process: int
    kind: str
    result: dict[str, Any]
    facts: dict[str, Any]


def report_of(
    name: str, done: Sequence[Done], notes: Sequence[str], parted: Callable[[Place], tuple[Parting | None, str]]
) -> Report:
    """The report of runs, the first of which all others have to agree with. parted: the first operation of a place that does not,
    and why, or why there is none."""
    all_runs = tuple(Run(each.kind, each.process, each.result["tensors"], each.result["differing"]) for each in done)
    number = next((number for number, run in enumerate(all_runs) if not run.identical), None)
    if number is None:
        return Report(name, all_runs, None, tuple(notes))
    first, other = done[0], done[number]
    parting, cause = parted(other.place)
    tensors = other.result["difference"]
    operation = parting.operation if parting else None
    difference = Difference(
        run=number,
        parameter=other.result["parameter"],
        index=None if tensors["index"] is None else tuple(tensors["index"]),
        ulps=tensors["ulps"],
        what=tensors["what"],
        op=operation.name if operation else None,
        source=operation.source if operation else None,
        lines=tuple(operation.lines) if operation and operation.lines != [operation.source] else (),
        cause=cause,
    )
    hints = _hints(parting, first.facts, elsewhere=other.place is not first.place)
    return Report(name, all_runs, difference, (*notes, *_of_manifests(first.facts["manifest"], other.facts["manifest"]), *hints))


def _of_manifests(first: str | None, other: str | None) -> list[str]:
    """What may change bits and is not the same in two processes; of no process without Triton."""
    if first is None or other is None:
        return []
    from ..contract import Manifest
    from ..contract.comparison import differences

    found = differences(Manifest.of_text(first), Manifest.of_text(other))
    return [f"of both processes' manifests: {each}" for each in found if each.may_change_bits][:MOST_LINES]


def _others(
    target: Target, wanted: Sequence[str], asked: Sequence[str] | None, warm: Mapping[str, str], facts: Mapping[str, Any]
) -> Iterator[Place]:
    """The other processes; of kinds that nobody asked for, those that can be had."""
    if not target.job["function"]:
        return
    reserve = facts["sm_reserve"] + (1 if facts["emulated"] else 8)
    visible = os.environ.get(VISIBLE, "0,1").split(",")
    environs = {
        **{"fresh": {}, "cold": {CACHE: str(target.new_folder())}, "seed": {SEED: str(facts["seed"] + 1)}, "busy": {}},
        **{"reserve": {RESERVE: str(reserve)}, "device": {VISIBLE: visible[-1]}, "split": {}},
    }
    cannot = {
        "reserve": RUN if facts["guarantee"] == "run" else None,
        "device": None if facts["gpus"] > 1 else "the kind device needs two GPUs",
        "split": None if facts["guarantee"] == "batch" else "the kind split needs guarantee='batch'",
        "seed": None if facts["emulated"] else "the kind seed needs emulation: set DASH_INDUCTOR_EMULATE=1",
        "busy": None if facts["gpu"] else "the kind busy needs a GPU that torch can use",
    }
    for kind, environ in environs.items():
        if kind not in wanted:
            continue
        if (problem := cannot.get(kind)) is None:
            yield Place(kind, {**warm, **environ})
        elif asked:
            raise ValueError(problem)


def _parted(target: Target, first: Place, other: Place, runs: int) -> tuple[Parting | None, str]:
    """The first operation of `other` that is not that of `first`, and why, or why there is none."""
    try:
        for _ in range(ATTEMPTS):
            if other is first:
                reference, *traces = target.trace(first, max(runs, 2))
            else:
                (reference,), traces = target.trace(first, 1), target.trace(other, runs)
            for trace in traces:
                if (parted := parting(reference, trace)) is not None:
                    return parted, parted.cause
    except StepError as error:
        return None, f"Run operation by operation, {error}."
    return None, GONE


def _hints(parted: Parting | None, facts: Mapping[str, Any], *, elsewhere: bool) -> Iterator[str]:
    """What may be the reason, of what a user can set."""
    kind = parted.kind if parted else None
    if facts["dynamic_later"] and kind != "random":
        yield (
            "a function was compiled for one size first, and for sizes that vary later, which takes other kernels: which of them a "
            "size gets depends on the sizes that came before; torch.compile(..., dynamic=True) or torch._dynamo.mark_dynamic makes "
            "one graph for all of them"
        )
    if facts["timed"] and kind != "random":
        yield (
            "Inductor chose kernels by timing them (max_autotune), which may choose others in each process, FlexAttention's "
            "among them: leave max_autotune off"
        )
    if kind == "python":
        yield "Python's random, numpy.random, the clock, the order of sets, and a DataLoader's workers may differ from run to run"
        if elsewhere and os.environ.get("PYTHONHASHSEED", "random") == "random":
            yield "PYTHONHASHSEED is not set: the order of a set of strings is another in each process"
    if kind == "random":
        yield (
            "step must seed what draws: torch.manual_seed(0) before the model is made seeds the CPU and every GPU, and a "
            "torch.Generator of your own needs its own manual_seed(0)"
        )
    if kind not in ("operation", None):
        return
    if facts["deterministic"] == 0:
        yield (
            "torch.use_deterministic_algorithms(True) was not on when step returned: with it, torch takes the deterministic form "
            "of an operation, or raises where there is none"
        )
    if facts["deterministic"] == 1:
        yield "deterministic mode is on with warn_only=True: operations that have no deterministic form run all the same"
    if facts["gpu"] and facts["benchmark"]:
        yield "torch.backends.cudnn.benchmark is on: cuDNN chooses convolutions by time"
    if facts["gpu"] and not os.environ.get("CUBLAS_WORKSPACE_CONFIG"):
        yield "CUBLAS_WORKSPACE_CONFIG is not set: matrix products on several streams may differ; :4096:8 makes them deterministic"
