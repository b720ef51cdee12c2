"""How many bytes of fp32 additions per second the L2 takes: what bounds a backward that sums dQ in global memory.

Every CTA adds tiles of 64 x 128 fp32, as the kernel's steps do, over and over: to tiles of its own, to tiles that all CTAs
sweep at a distance or in step, and to more memory than L2 holds. Beside vector additions (RED): plain stores, and load, add and
store. A backward with KV tiles of 128 rows needs 1.9 TB/s of additions at 600 TFLOPS (4 bytes for 10 * 128 FLOP).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from .clock import Clock, flushed
from .environment import environment
from .rows import write
from .samples import interleaved, named, ratios, summary

FILE = "red_throughput.csv"
BLOCK = 64 * 128  # fp32 values of a tile
STEPS = 512  # tiles per CTA and launch
ROUNDS = 20
OPERATIONS = ("red", "store", "load add store")
WIDTHS = ((8, 1), (4, 2))  # warps of a CTA, CTAs per SM
# name -> (tiles per CTA, distance between the first tiles of neighbours, whether all CTAs sweep the same tiles)
PATTERNS = {
    "own tiles in L2": (4, 4, False),
    "shared tiles at a distance": (4, 4, True),
    "shared tiles in step": (4, 0, True),
    "own tiles beyond L2": (128, 128, False),
}


@triton.jit
def add_tiles(memory, tiles, own, distance, steps, OPERATION: tl.constexpr, BLOCK: tl.constexpr):
    # Program p starts at tile p*distance and goes round: through `own` tiles from there, or through all where own = tiles.
    first = tl.program_id(0) * distance
    values = tl.arange(0, BLOCK).to(tl.float32)
    for step in range(0, steps):
        tile = first + step % own
        tile = tile % tiles
        places = memory + tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        if OPERATION == 0:
            tl.atomic_add(places, values, sem="relaxed")
        elif OPERATION == 1:
            tl.store(places, values)
        else:
            tl.store(places, tl.load(places, cache_modifier=".cg") + values, cache_modifier=".cg")


@dataclass(frozen=True)
class Case:
    pattern: str
    operation: str
    warps: int
    ctas_per_sm: int

    def tiles(self, ctas: int) -> int:
        """Tiles of all CTAs."""
        return PATTERNS[self.pattern][0] * ctas

    def arguments(self, ctas: int) -> tuple[int, int, int]:
        """(tiles, own, distance) of the kernel."""
        per_cta, distance, shared = PATTERNS[self.pattern]
        return self.tiles(ctas), self.tiles(ctas) if shared else per_cta, distance


@dataclass(frozen=True)
class Addition:
    """One row of the table: a case, and its throughput; `ratio` is that over plain stores in the same pattern, round by round."""

    gpu: str
    pattern: str
    operation: str
    warps: int
    ctas_per_sm: int
    mib: float
    median_ms: float
    p20_ms: float
    p80_ms: float
    tb_per_s: float
    ratio: float
    ratio_p20: float
    ratio_p80: float


def cases() -> list[Case]:
    """Every pattern, operation and width."""
    return [Case(pattern, operation, *width) for pattern, width, operation in product(PATTERNS, WIDTHS, OPERATIONS)]


def run(folder: Path) -> int:
    """Writes FILE."""
    write(folder / FILE, Addition, measure())
    return 0


def table_of(times: Mapping[Case, Sequence[float]], gpu: str, sms: int) -> list[Addition]:
    """Throughputs from times in ms."""
    rows = []
    for case, own in times.items():
        ctas, time = sms * case.ctas_per_sm, summary(own)
        cells: dict[str, Any] = named("ratio", ratios(times[replace(case, operation="store")], own))
        cells |= {"median_ms": time.median, "p20_ms": time.p20, "p80_ms": time.p80}
        size, rate = case.tiles(ctas) * BLOCK * 4 / 2**20, ctas * STEPS * BLOCK * 4 / time.median / 1e9
        rows.append(Addition(gpu, **asdict(case), mib=size, tb_per_s=rate, **cells))
    return rows


def measure() -> list[Addition]:
    """All cases in turns on the current CUDA device."""
    found = environment()
    stopwatch, timers = Clock(flushed()), {}
    widest = max(case.tiles(found["sms"] * case.ctas_per_sm) for case in cases())
    memory = torch.zeros(widest * BLOCK, dtype=torch.float32, device="cuda")
    for case in cases():
        ctas = found["sms"] * case.ctas_per_sm
        launch = functools.partial(_launch, case, memory, ctas)
        launch()  # compiles
        timers[case] = functools.partial(stopwatch.milliseconds, launch)
    return table_of(interleaved(timers, ROUNDS, warm_up=2), found["gpu"], found["sms"])


def _launch(case: Case, memory: Any, ctas: int) -> None:
    operation = OPERATIONS.index(case.operation)
    add_tiles[(ctas,)](memory, *case.arguments(ctas), STEPS, OPERATION=operation, BLOCK=BLOCK, num_warps=case.warps)
