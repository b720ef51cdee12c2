"""The Gluon kernel alone, without Inductor: every schedule of a shape and every variant in turns, and the clocks beside them.

Launches take nothing but tensors and a table, so a variant compiles in two seconds. The bits of each are told by a digest, which
schedules that add in one order share, and so do variants of the kernel. Whole backwards of others take turns with them.

A variant is a copy of templates/gluon, changed.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from .. import templates
from ..config import GLUON, Config
from ..devices.target import target_of
from ..lowering.launch import gluon
from ..problem import Problem
from ..reference import LOG2E
from ..resolve import Resolution, resolve
from ..schedule import ROUND_ROBIN
from ..schedule.packing import pack_plan
from ..templates.operands import Operands
from . import contenders as who
from .clock import Clock, flushed
from .environment import sm_mhz
from .inputs import random_inputs
from .measure import settings
from .rows import write
from .samples import interleaved
from .shapes import Shape, shapes_called

FILE = "gluon_tables.csv"
ROUNDS = 15
SHAPES = tuple((head_dim, mask) for head_dim in (128, 64) for mask in ("causal", "full"))
BATCH, LENGTH, HIDDEN = 2, 8192, 2048
OFF = 0.01  # what gradients of two schedules may be apart, in norm
COMMITTED, MIRRORED = "as committed", "as committed, mirrored"
OTHERS = ("fa4-deterministic", "fa4", "flex", "ours-two-pass")  # whole backwards, as contenders are called
Gradients = tuple[Tensor, ...]  # dq, dk, dv; ours has dq in fp32, in accumulator order and not scaled


@dataclass(frozen=True)
class Timed:
    """Times of one schedule, and the digest of its gradients; sm_mhz is the median of what was read after each round.

    Of another's backward `variant` is its name, and it has no schedule.
    """

    variant: str
    head_dim: int
    mask: str
    family: str = ""
    roles: int = 0
    heads_in_flight: int = 0
    median_ms: float = 0.0
    min_ms: float = 0.0
    max_ms: float = 0.0
    digest: str = ""
    sm_mhz: int | None = None

    def __str__(self) -> str:
        """Without what was measured."""
        schedule = f"{self.family} (A={self.roles}, G={self.heads_in_flight}), " if self.family else ""
        return f"d = {self.head_dim}, {self.mask}, {schedule}{self.variant}"


def kernel_in(folder: Path) -> ModuleType:
    """The launch of a variant: `folder` is a copy of templates/gluon, whose functions may differ and whose arguments may not.

    Raises:
        ValueError: it is no such copy.
    """
    if not (folder / "launch.py").is_file():
        raise ValueError(f"{folder} is no copy of templates/gluon: it has no launch.py")
    name = f"{templates.__name__}.variant_{re.sub(r'[^0-9A-Za-z]', '_', folder.name)}"  # beside the package's own
    found = importlib.util.spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])
    assert found and found.loader
    sys.modules[name] = package = importlib.util.module_from_spec(found)
    found.loader.exec_module(package)
    return importlib.import_module(f"{name}.launch")


def kernels(variants: str = "") -> dict[str, ModuleType]:
    """The kernel as it is, and its variants in a folder, if one is named."""
    copies = sorted(path for path in Path(variants).iterdir() if path.is_dir()) if variants else []
    return {COMMITTED: templates.gluon_kernel()} | {path.name: kernel_in(path) for path in copies}


def run(folder: Path, seconds: float, variants: str = "") -> int:
    """Writes FILE, shape by shape, and begins none after so many seconds; 1 if a schedule's gradients are far from the others'.

    variants: a folder of them, "" for none.
    """
    deadline, wrong, known = time.monotonic() + seconds, False, kernels(variants)
    for head_dim, mask in SHAPES:
        if time.monotonic() >= deadline:
            print(f"head dim {head_dim}, {mask}: not run: the time limit")
            continue
        rows, far = measured(head_dim, mask, known)
        write(folder / FILE, Timed, rows, "a")
        for name in far:
            print(f"{name}: wrong: more than {OFF:.0%} off the first schedule")
        wrong = wrong or bool(far)
    return int(wrong)


def measured(head_dim: int, mask: str, kernels: Mapping[str, ModuleType], device: str = "cuda") -> tuple[list[Timed], list[str]]:
    """One row per schedule, variant and other that is there, and the names of those of ours that are wrong."""
    found = resolution(head_dim, mask)
    assert found.choice
    tables = dict(schedules(found, device))
    launches: dict[Timed, Callable[[], Gradients]] = {
        place: functools.partial(launched, kernels[COMMITTED], operands) for place, operands in tables.items()
    }
    as_chosen = (place for place in tables if (place.family, place.roles, place.heads_in_flight) == found.choice.candidate[:3])
    chosen = next(as_chosen, next(iter(tables)))  # the first, where it is none that is timed
    for name in sorted(kernels.keys() - {COMMITTED}):
        launches[replace(chosen, variant=name)] = functools.partial(launched, kernels[name], tables[chosen])
    digests, far = {}, []
    first: Gradients = ()
    for place, launch in launches.items():
        own = launch()
        digests[place] = digest(own)
        first = first or tuple(x.clone() for x in own)
        if not all(apart(a, b) <= OFF for a, b in zip(own, first, strict=True)):  # a NaN is wrong
            far.append(str(place))
    for place in launches:
        if place.variant in kernels and place not in tables and digests[place] != digests[chosen]:
            print(f"  {place}: other bits than as committed")
    with settings():
        for name, launch in _others(shape_of(head_dim, mask), device):
            launches[Timed(name, head_dim, mask)] = launch
            digests[Timed(name, head_dim, mask)] = digest(launch())
        times, mhz = _timed(launches)
    rows = []
    for place, taken in times.items():
        row = replace(place, median_ms=statistics.median(taken), min_ms=min(taken), max_ms=max(taken))
        rows.append(replace(row, digest=digests[place], sm_mhz=mhz))
        print(f"  {place}: {rows[-1].median_ms:.3f} ms")
    return rows, far


def _timed(launches: Mapping[Timed, Callable[[], Gradients]]) -> tuple[dict[Timed, list[float]], int | None]:
    """Milliseconds of each in turns, and the median of the clocks."""
    clock, mhz = Clock(flushed()), list[int | None]()

    def enough() -> bool:
        mhz.append(sm_mhz())
        return False

    timers = {place: functools.partial(clock.milliseconds, launch) for place, launch in launches.items()}
    times = interleaved(timers, ROUNDS, warm_up=2, enough=enough)
    known = [each for each in mhz if each is not None]
    return times, round(statistics.median(known)) if known else None


def _others(shape: Shape, device: str) -> Iterator[tuple[str, Callable[[], Gradients]]]:
    """Those that are there and take the shape."""
    for name in OTHERS:
        try:
            yield name, who.prepared(name, shape, device).launch
        except who.RefusedError as refused:
            print(f"  {name}: {refused}")


def launched(kernel: ModuleType, operands: Operands) -> Gradients:
    """dq, dk, dv of a launch, which overwrites those of the last one."""
    gluon.launch_of(kernel, operands).run()
    return operands.dq, operands.dk, operands.dv


def shape_of(head_dim: int, mask: str) -> Shape:
    """What is timed, as contenders have it."""
    heads = HIDDEN // head_dim
    (found,) = shapes_called(f"{mask}:{BATCH}x{heads}x{heads}x{LENGTH}x{head_dim}")
    return found


def resolution(head_dim: int, mask: str) -> Resolution:
    """What the package would choose for a shape that is timed, on the GPU that is there."""
    shape, target = shape_of(head_dim, mask), target_of(torch.device("cuda"), Config(kernel=GLUON))
    problem = Problem(mask, BATCH, shape.heads, shape.kv_heads, LENGTH, LENGTH, head_dim, shape.dtype)
    return resolve(problem, Config(kernel=GLUON, template="one_pass"), target)


def schedules(found: Resolution, device: str) -> Iterator[tuple[Timed, Operands]]:
    """Each candidate of a resolution, and what its launch is given. Gradients are full of NaN before."""
    assert found.choice and found.one_pass
    problem, tile = found.problem, found.one_pass
    inputs = random_inputs(shape_of(problem.head_dim, problem.mask), device)
    query, key, value = (x.detach() for x in inputs.leaves)
    causal = problem.mask == "causal"
    flash = "_scaled_dot_product_flash_attention" + ("_for_cpu" if device == "cpu" else "")
    out, logsumexp = getattr(torch.ops.aten, flash)(query, key, value, 0.0, causal)[:2]
    delta = (out.float() * inputs.grad_out.float()).sum(-1)
    rows = (-logsumexp * LOG2E).contiguous(), delta.contiguous()
    # LENGTH is a multiple of every tile, so that no row is padding.
    dq = torch.full((problem.batch * problem.heads, problem.q_len * problem.head_dim), torch.nan, device=device)
    dk, dv = torch.full_like(key, torch.nan), torch.full_like(value, torch.nan)
    for candidate in found.choice.considered:
        if candidate.family in ROUND_ROBIN:  # whose rows CTAs compute into memory of the launch
            continue
        plan = replace(found.choice, candidate=candidate).plan()
        table = torch.tensor(pack_plan(plan), dtype=torch.int32, device=device)
        workers = candidate.roles * candidate.heads_in_flight
        variant = MIRRORED if candidate.mirrored else COMMITTED
        place = Timed(variant, problem.head_dim, problem.mask, candidate.family, candidate.roles, candidate.heads_in_flight)
        tensors = query, key, value, inputs.grad_out, *rows, table, None, None, None, dq, dk, dv
        numbers = {"block_m": tile.block_m, "block_n": tile.block_n, "causal": causal, "scale": problem.softmax_scale}
        yield place, Operands(*tensors, [], [], workers, cooperative=True, **numbers)


def apart(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|, in Frobenius norms."""
    norm = torch.linalg.vector_norm
    return float(norm(a.float() - b.float()) / norm(b.float()))


def digest(gradients: Gradients) -> str:
    """The first letters of the SHA-256 of all bits."""
    hashed = hashlib.sha256()
    for x in gradients:
        hashed.update(x.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return hashed.hexdigest()[:12]
