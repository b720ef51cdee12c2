"""What can be compiled for a GPU before one is there: the graphs of all stages, into the caches of Inductor and Triton, packed.

Triton's caches are of one build of Triton, for one version of Python, and Inductor's of one torch. So it is the same versions that
prepare, and that run with what was prepared. The Gluon kernel, which is compiled when it is launched, is so for the same tensors
without memory, and each kind of kernel that its first use would try is compiled as its trial has it.
"""

from __future__ import annotations

import itertools
import json
import platform
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode

from .. import config
from ..codegen.fake_gpu import fake_gpu
from ..codegen.mode import deterministic
from ..explanation.compiled import CompiledError, compiling_for, loading_nothing
from ..explanation.decisions import on_gpu
from ..first_use import verdict
from ..first_use.known import Verdict
from ..first_use.machine import sources_digest
from ..hooks.install import installed
from ..lowering.launch.gluon import compile_launch, compiling_launches
from ..reproduce.trial import as_tried, attention, compiled_for
from . import contenders as who
from . import kernel_times, marks, schedules, training
from .inputs import random_inputs
from .kernels import CASES
from .measure import settings
from .runner import child
from .shapes import shapes_called
from .stages import Stage

# By the task of a stage whose kernels no pair of contender and shape has: what compiles them.
WITHOUT_GRAPHS = {
    **dict.fromkeys(("schedules", "marks", "profile"), "prepare schedules"),
    "training": "prepare training",
}
PACKED, ABOUT = "caches.tar.xz", "prepared.json"
MOST_BYTES = 60 << 20  # of what a machine may be given
LEFT = (
    "FlashAttention's and cuDNN's own kernels",
    "graphs of the stages costs and tests, and the small kernels of additions and overlaps",
    "the Gluon kernel for lengths that vary in a training step",
    "code for the host, and loading each kernel",
)  # that is still done on the GPU, before first launches


@dataclass(frozen=True)
class Pair:
    """A graph: a contender at a shape, of the contenders of a job or, without one, a case of the stage `kernels`."""

    contender: str
    shape: str
    tuned: bool = False


def versions() -> dict[str, str]:
    """Versions that caches depend on, by name."""
    python = platform.python_version().rpartition(".")[0]
    return {"torch": torch.__version__, "triton": triton.__version__, "python": python, "sources": sources_digest()[:16]}


def pairs_of(stages: Iterable[Stage]) -> list[Pair]:
    """The graphs of stages, each once."""
    found: dict[Pair, None] = {}
    compiled = {name for name, contender in who.contenders().items() if contender.compiled}
    timed = ",".join(schedules.shape_of(*each).name for each in schedules.SHAPES)
    named = {"schedules": (timed, schedules.OTHERS), "kernel_times": (kernel_times.SHAPES, kernel_times.CONTENDERS)}
    for stage in stages:
        if stage.task == "kernels":
            found |= {Pair(name, ""): None for name in CASES}
        elif stage.task in named:
            shapes, others = named[stage.task]
            found |= {Pair(name, shape.name): None for shape in shapes_called(shapes) for name in others if name in compiled}
        elif stage.job is not None:
            names = [name for name, contender in stage.job.chosen().items() if contender.compiled]
            found |= {Pair(name, shape.name, stage.job.tuned): None for shape in stage.job.chosen_shapes() for name in names}
    return list(found)


def run(stages: Sequence[Stage], folder: Path, device: str, caches: Path, environ: dict[str, str], jobs: int) -> dict[str, Any]:
    """Compiles what FOLDER does not have, in `jobs` processes, and packs it there; what was done, as `ABOUT` has it.

    Raises:
        ValueError: FOLDER was prepared by other versions, or for another GPU; or a process ended before its graphs were compiled.
    """
    folder.mkdir(parents=True, exist_ok=True)
    unpack(folder, caches, device)
    before, pairs = kernels_in(caches), pairs_of(stages)
    commands = [child("prepare", device=device, pairs=[asdict(pair) for pair in pairs[n::jobs]]) for n in range(jobs)]
    others: dict[str, dict[str, Any]] = {}
    for stage in stages:
        if task := WITHOUT_GRAPHS.get(stage.task):
            of_variants = {name: path for name, path in stage.arguments.items() if name == "variants"}
            others[task] = others.get(task, {}) | of_variants
    commands += [child(task, device=device, **of_variants) for task, of_variants in others.items()]
    running = [subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) for command in commands]
    for process in running:
        assert process.stdout
        for line in process.stdout:
            print(f"  {line.rstrip()}", flush=True)
        process.wait()
    if failed := [process.returncode for process in running if process.returncode != 0]:
        raise ValueError(f"{folder} was not prepared: a process that compiled ended with status {failed[0]}")
    done = {"device": device, **versions(), "graphs": len(pairs), "kernels": kernels_in(caches)}
    if kernels_in(caches) > before:
        with tarfile.open(folder / PACKED, "w:xz") as packed:
            for path in sorted(caches.iterdir()):
                packed.add(path, path.name)
        (folder / ABOUT).write_text(json.dumps(done, indent=2) + "\n", encoding="utf-8")
    size = sum(path.stat().st_size for path in folder.iterdir())
    return done | {"compiled": kernels_in(caches) - before, "bytes": size}


def unpack(folder: Path, caches: Path, device: str | None = None) -> dict[str, Any] | None:
    """Fills the folder of caches with what FOLDER has; what that is, None where there is nothing.

    Raises:
        ValueError: it was prepared by other versions, or for another GPU than `device`.
    """
    if not (folder / ABOUT).exists():
        return None
    about: dict[str, Any] = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    wanted = versions() | ({} if device is None else {"device": device})
    if different := {name: (about[name], mine) for name, mine in wanted.items() if about[name] != mine}:
        said = ", ".join(f"{name} {theirs}, and here is {mine}" for name, (theirs, mine) in different.items())
        raise ValueError(f"{folder} was prepared with {said}")
    caches.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / PACKED) as packed:
        packed.extractall(caches, filter="data")
    return about


def kernels_in(caches: Path) -> int:
    """How many compiled kernels Triton's cache holds."""
    return sum(1 for _ in caches.rglob("*.cubin"))


def compile_pairs(device: str, pairs: Sequence[dict[str, Any]]) -> int:
    """Compiles graphs in this process, and what their trials have; a line for each that could not be, and why. That is no error:
    some have no such kernel."""
    trials: dict[Any, Any] = {}
    for pair in pairs:
        said = _compiled(device, Pair(**pair), trials)
        if said:
            print(f"{pair['contender']} {pair['shape']}: {said}")
    for kind, tried in trials.items():
        if said := _compiled_trial(device, kind, tried):
            print(f"the trial of {kind}: {said}")
    return 0


def compile_schedules(device: str, variants: str = "") -> int:
    """Compiles what the stages `schedules`, `profile` and `marks` launch, and the variants in a folder."""
    with tempfile.TemporaryDirectory() as copies, fake_gpu(device):
        marked = marks.marked(Path(copies, "marked"))
        marked.MEMORY[:] = [torch.empty(1, dtype=torch.int32, device="meta")]
        kernels = [*schedules.kernels(variants).values(), marked]
        for head_dim, mask in schedules.SHAPES:
            with FakeTensorMode(allow_non_fake_inputs=True):
                for _, operands in schedules.schedules(schedules.resolution(head_dim, mask), "cpu"):
                    for kernel in kernels:
                        compile_launch(kernel, operands)
    return 0


def compile_training(device: str) -> int:
    """Compiles training steps, but for their kernels at lengths that vary."""
    for mode, way in itertools.product(training.MODES, training.WAYS):
        with suppress(CompiledError), compiling_for(device), compiling_launches():
            for step in training.steps(way, mode, device="cpu"):
                print(f"{way}, {mode}: {step.status}")
    return 0


def _compiled(device: str, pair: Pair, trials: dict[Any, Any]) -> str | None:
    """Why a graph has no kernels, None where they are compiled. Adds the kinds that would be tried, with their settings."""
    if pair.shape:
        (shape,), contender = shapes_called(pair.shape), (who.tuned() if pair.tuned else who.contenders())[pair.contender]
    else:
        case = CASES[pair.contender]
        shape, contender = case.shape, who.ours("ours", {**case.settings, "guard": "auto"})
    try:
        with settings(), compiling_for(device), compiling_launches(), _tried(trials):
            contender.prepare(shape, random_inputs(shape, "cpu"))
    except CompiledError:
        return None
    except Exception as error:
        return f"{type(error).__name__}: {who.first_line(error)}"
    return "it was not compiled"


@contextmanager
def _tried(trials: dict[Any, Any]) -> Iterator[None]:
    """Inside, each kind of kernel that would be tried on the GPU is noted, and fit."""

    def fit(kind: Any, device: str, settings: Any, always: bool) -> Verdict:
        trials[kind] = settings
        return Verdict(True, "it is not tried here")

    there = SimpleNamespace(is_there=lambda device: True)
    with mock.patch.object(verdict, "target", there), mock.patch.object(verdict, "_verdict", fit):
        yield


def _compiled_trial(device: str, kind: Any, settings: Any) -> str | None:
    """Why the trial of a kind is not compiled, None where it is."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with (
            fake_gpu(device),
            loading_nothing(),
            compiling_launches(),
            mode,
            V.set_fake_mode(mode),
            config.within(settings),
            as_tried(kind),
            installed(),
            deterministic(),
        ):
            inputs, _ = attention(kind, torch.device("cpu"))
            compiled_for(kind, [on_gpu(x) for x in inputs])
    except Exception as error:
        return f"{type(error).__name__}: {who.first_line(error)}"
    return None
