"""What can be compiled for a GPU before one is there: the graphs of all stages, into the caches of Inductor and Triton, packed.

Triton's caches are of one build of Triton, for one version of Python, and Inductor's of one torch. So it is the same versions that
prepare, and that run with what was prepared. The Gluon kernel is compiled when it is launched: it is in no cache.
"""

from __future__ import annotations

import json
import platform
import subprocess
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .runner import child, say

if TYPE_CHECKING:
    from .stages import Stage

PACKED, ABOUT = "caches.tar.xz", "prepared.json"
MOST_BYTES = 60 << 20  # of what a machine may be given
KERNELS = "*.cubin"


@dataclass(frozen=True)
class Pair:
    """A graph: a contender at a shape, of the contenders of a job or, without one, a case of the stage `kernels`."""

    contender: str
    shape: str
    tuned: bool = False


def versions() -> dict[str, str]:
    """Of what caches depend on."""
    import torch
    import triton

    return {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version().rpartition(".")[0]}


def pairs_of(stages: Iterable[Stage]) -> list[Pair]:
    """The graphs of stages, each once."""
    from .kernels import CASES

    found: dict[Pair, None] = {}
    for stage in stages:
        if stage.task == "kernels":
            found |= {Pair(name, ""): None for name in CASES}
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
    running = [subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) for command in commands]
    for process in running:
        assert process.stdout
        for line in process.stdout:
            say(f"  {line.rstrip()}")
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
    return sum(1 for _ in caches.rglob(KERNELS))


def compile_pairs(device: str, pairs: Sequence[dict[str, Any]]) -> int:
    """Compiles graphs in this process; a line for each that could not be. That is no error: some have no such kernel."""
    for pair in pairs:
        said = _compiled(device, Pair(**pair))
        if said:
            say(f"{pair['contender']} {pair['shape']}: {said}")
    return 0


def _compiled(device: str, pair: Pair) -> str | None:
    """Why a graph has no kernels, None where they are compiled."""
    from ..explanation.compiled import CompiledError, compiling_for
    from . import contenders as who
    from .inputs import random_inputs
    from .kernels import CASES
    from .measure import settings
    from .shapes import shapes_called

    if pair.shape:
        (shape,), contender = shapes_called(pair.shape), (who.tuned() if pair.tuned else who.contenders())[pair.contender]
    else:
        case = CASES[pair.contender]
        shape, contender = case.shape, who.ours("ours", {**case.settings, "guard": "auto"})
    try:
        with settings(), compiling_for(device):
            contender.prepare(shape, random_inputs(shape, "cpu"))
    except CompiledError:
        return None
    except Exception as error:
        return f"{type(error).__name__}: {who.first_line(error)}"
    return "it was not compiled"
