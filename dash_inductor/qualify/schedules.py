"""The Gluon kernel alone, without Inductor: every schedule of a shape in turns, in one process, with the clocks beside the times.

Calls of `launch` take nothing but tensors and a table, so a variant compiles in two seconds. The bits of each are told by a digest:
schedules that add in the same order have the same.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor

from ..config import GLUON, Config
from ..devices.target import Target, target_of
from ..lowering import gluon
from ..problem import Problem
from ..reference import LOG2E
from ..resolve import Resolution, resolve
from ..schedule import ROUND_ROBIN
from ..schedule.packing import pack_plan
from .clock import Clock, flushed
from .environment import sm_mhz
from .runner import say
from .samples import interleaved

FILE = "gluon_tables.csv"
ROUNDS = 15
SHAPES = tuple((head_dim, mask) for head_dim in (128, 64) for mask in ("causal", "full"))
BATCH, LENGTH, HIDDEN = 2, 8192, 2048
OFF = 0.01  # what gradients of two schedules may be apart, in norm
COMMITTED, MIRRORED = "as committed", "as committed, mirrored"
Gradients = tuple[Tensor, Tensor, Tensor]  # dq is fp32, in accumulator order and not scaled


@dataclass(frozen=True)
class Timed:
    """Times of one schedule, and the digest of its gradients; sm_mhz is the median of what was read after each round."""

    variant: str
    head_dim: int
    mask: str
    family: str
    roles: int
    heads_in_flight: int
    median_ms: float
    min_ms: float
    max_ms: float
    digest: str
    sm_mhz: int | None

    def __str__(self) -> str:
        """Without what was measured."""
        schedule = f"{self.family} (A={self.roles}, G={self.heads_in_flight})"
        return f"d = {self.head_dim}, {self.mask}, {schedule}, {self.variant}"


def run(folder: Path, seconds: float) -> int:
    """Writes FILE, shape by shape, and begins none after so many seconds; 1 if a schedule's gradients are far from the others'."""
    target, deadline = target_of(torch.device("cuda"), Config(kernel=GLUON)), time.monotonic() + seconds
    wrong = False
    for head_dim, mask in SHAPES:
        if time.monotonic() >= deadline:
            say(f"head dim {head_dim}, {mask}: not run: the time limit")
            continue
        rows, far = measured(head_dim, mask, target)
        append(folder / FILE, rows)
        for name in far:
            say(f"{name}: wrong: more than {OFF:.0%} off the first schedule")
        wrong = wrong or bool(far)
    return int(wrong)


def measured(head_dim: int, mask: str, target: Target, device: str = "cuda") -> tuple[list[Timed], list[str]]:
    """One row per schedule, and the names of those that are wrong."""
    heads = HIDDEN // head_dim
    problem = Problem(mask, BATCH, heads, heads, LENGTH, LENGTH, head_dim, "bf16")
    found = resolve(problem, Config(kernel=GLUON, template="one_pass"), target)
    launches = dict(schedules(found, device))
    clock, mhz = Clock(flushed()), list[int | None]()
    first: Gradients | None = None
    far, digests = [], {}
    for place, launch in launches.items():
        own = launch()
        digests[place] = digest(own)
        first = first or (own[0].clone(), own[1].clone(), own[2].clone())
        if not all(apart(a, b) <= OFF for a, b in zip(own, first, strict=True)):  # a NaN is wrong
            far.append(place)

    def enough() -> bool:
        mhz.append(sm_mhz())
        return False

    timers = {str(place): functools.partial(clock.milliseconds, launch) for place, launch in launches.items()}
    times = interleaved(timers, ROUNDS, warm_up=2, enough=enough)
    known = [each for each in mhz if each is not None]
    read = round(statistics.median(known)) if known else None
    rows = []
    for place in launches:
        taken = times[str(place)]
        row = replace(place, median_ms=statistics.median(taken), min_ms=min(taken), max_ms=max(taken))
        rows.append(replace(row, digest=digests[place], sm_mhz=read))
        say(f"  {place}: {rows[-1].median_ms:.3f} ms")
    return rows, list(map(str, far))


def schedules(found: Resolution, device: str) -> Iterator[tuple[Timed, Callable[[], Gradients]]]:
    """Each candidate of a resolution, and its launch, which overwrites the last one's gradients. They are full of NaN before."""
    assert found.choice and found.one_pass
    problem, tile = found.problem, found.one_pass
    generator = torch.Generator(device).manual_seed(0)

    def normal(heads: int, length: int) -> Tensor:
        size = (problem.batch, length, heads, problem.head_dim)
        return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16).transpose(1, 2)

    query, key, value = (normal(problem.heads, problem.q_len) for _ in range(3))
    causal = problem.mask == "causal"
    flash = "_scaled_dot_product_flash_attention" + ("_for_cpu" if device == "cpu" else "")
    out, logsumexp = getattr(torch.ops.aten, flash)(query, key, value, 0.0, causal)[:2]
    grad_out = normal(problem.heads, problem.q_len)
    rows = -(-problem.q_len // tile.block_m) * tile.block_m
    delta = (out.float() * grad_out.float()).sum(-1)
    statistics_of_rows = [(-logsumexp * LOG2E, -torch.inf), (delta, 0.0)]
    padded = [torch.nn.functional.pad(x, (0, rows - problem.q_len), value=fill).contiguous() for x, fill in statistics_of_rows]
    dq = torch.full((problem.batch * problem.heads, rows * problem.head_dim), torch.nan, device=device)
    dk, dv = torch.full_like(key, torch.nan), torch.full_like(value, torch.nan)
    scale = problem.softmax_scale
    for candidate in found.choice.considered:
        if candidate.family in ROUND_ROBIN:  # whose rows CTAs compute into memory of the launch
            continue
        plan = replace(found.choice, candidate=candidate).plan()
        table = torch.tensor(pack_plan(plan), dtype=torch.int32, device=device)
        workers = candidate.roles * candidate.heads_in_flight

        def once(table: Tensor = table, workers: int = workers) -> Gradients:
            inputs = query, key, value, grad_out, *padded, table, None, None, None
            gluon.launch(*inputs, dq, dk, dv, workers, True, False, False, causal, 0, 0, 1, 1, 0, scale)
            return dq, dk, dv

        variant = MIRRORED if candidate.mirrored else COMMITTED
        own = (variant, problem.head_dim, problem.mask, candidate.family, candidate.roles, candidate.heads_in_flight)
        yield Timed(*own, median_ms=0.0, min_ms=0.0, max_ms=0.0, digest="", sm_mhz=None), once


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


def append(path: Path, rows: list[Timed]) -> None:
    """Adds rows to a CSV, which begins with the names of the columns."""
    new = not path.exists()
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [each.name for each in fields(Timed)], lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(map(asdict, rows))
