"""How many bytes of fp32 additions per second the L2 takes: what bounds a backward that sums dQ in global memory.

    python -m benchmarks.red_throughput --out FOLDER

Every CTA adds tiles of 64 x 128 fp32, as the kernel's steps do, over and over: to tiles of its own, to tiles that all CTAs
sweep at a distance or in step, and to more memory than L2 holds. Beside vector additions (RED): plain stores, and load, add and
store. A backward with KV tiles of 128 rows needs 1.9 TB/s of additions at 600 TFLOPS (4 bytes for 10 * 128 FLOP).
"""

from __future__ import annotations

import argparse
import csv
import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import triton
import triton.language as tl

from benchmarks.attention.environment import environment
from benchmarks.attention.runner import require_gpu
from benchmarks.attention.samples import interleaved, ratios, summary
from dash_inductor.commands.console import table

FILE = "red_throughput.csv"
RESULTS = Path(__file__).parent / "results" / "red_throughput"
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
class Row:
    """One case; `ratio`: its throughput over that of plain stores in the same pattern, round by round."""

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


def cases() -> Iterator[Case]:
    """Every pattern, operation and width."""
    for pattern in PATTERNS:
        for warps, ctas in WIDTHS:
            for operation in OPERATIONS:
                yield Case(pattern, operation, warps, ctas)


def rows_of(times: dict[Case, list[float]], gpu: str, sms: int) -> list[Row]:
    """Throughputs from times in ms."""
    rows = []
    for case, own in times.items():
        ctas, middle = sms * case.ctas_per_sm, summary(own)
        stores = times[Case(case.pattern, "store", case.warps, case.ctas_per_sm)]
        ratio = summary(ratios(stores, own))
        added = ctas * STEPS * BLOCK * 4
        rows.append(
            Row(
                gpu=gpu,
                **asdict(case),
                mib=case.tiles(ctas) * BLOCK * 4 / 2**20,
                median_ms=middle.median,
                p20_ms=middle.p20,
                p80_ms=middle.p80,
                tb_per_s=added / middle.median / 1e9,
                ratio=ratio.median,
                ratio_p20=ratio.p20,
                ratio_p80=ratio.p80,
            )
        )
    return rows


def measure(rounds: int) -> list[Row]:
    """All cases in turns on the current CUDA device."""
    import torch

    from benchmarks.attention.clock import Clock, flushed

    found = environment()
    stopwatch, timers = Clock(flushed()), {}
    widest = max(case.tiles(found.sms * case.ctas_per_sm) for case in cases())
    memory = torch.zeros(widest * BLOCK, dtype=torch.float32, device="cuda")
    for case in cases():
        ctas = found.sms * case.ctas_per_sm
        launch = functools.partial(_launch, case, memory, ctas)
        timers[case] = functools.partial(stopwatch.milliseconds, launch)
    by_name = interleaved({str(case): timer for case, timer in timers.items()}, rounds, warm_up=2)
    return rows_of({case: by_name[str(case)] for case in timers}, found.gpu, found.sms)


def _launch(case: Case, memory: Any, ctas: int) -> None:
    operation = OPERATIONS.index(case.operation)
    add_tiles[(ctas,)](memory, *case.arguments(ctas), STEPS, OPERATION=operation, BLOCK=BLOCK, num_warps=case.warps)


def write(path: Path, rows: Sequence[Row]) -> None:
    """The table as CSV."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def read(path: Path) -> list[Row]:
    """What `write` wrote; ValueError for what is no such table."""
    types = {f.name: {"str": str, "int": int, "float": float}[str(f.type)] for f in fields(Row)}
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames != list(types):
            raise ValueError(f"{path} has not the columns of a table of additions")
        return [Row(**{name: types[name](text) for name, text in line.items()}) for line in reader]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.red_throughput", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help=f"folder of {FILE}")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help="repetitions (default %(default)s)")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    require_gpu(parser)
    rows = measure(args.rounds)
    args.out.mkdir(parents=True, exist_ok=True)
    write(args.out / FILE, rows)
    shown = [{k: f"{v:.4g}" if isinstance(v, float) else v for k, v in asdict(row).items() if k != "gpu"} for row in rows]
    table(f"fp32 additions on {rows[0].gpu}", shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
