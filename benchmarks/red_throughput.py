"""How many bytes of fp32 additions per second the L2 takes: what bounds a backward that sums dQ in global memory.

    python -m benchmarks.red_throughput --out FOLDER

Every CTA adds tiles of 64 x 128 fp32, as the kernel's steps do, over and over: to tiles of its own, to tiles that all CTAs
sweep at a distance or in step, and to more memory than L2 holds. Beside vector additions (RED): plain stores, and load, add and
store. A backward with KV tiles of 128 rows needs 1.9 TB/s of additions at 600 TFLOPS (4 bytes for 10 * 128 FLOP).
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import pandas as pd
import triton
import triton.language as tl

from benchmarks.attention.environment import environment
from benchmarks.attention.runner import require_gpu
from benchmarks.attention.samples import interleaved, named, ratios, summary
from dash_inductor.cli.console import table

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


# Of a table: one row per case; `ratio` is its throughput over that of plain stores in the same pattern, round by round.
COLUMNS = (
    "gpu", *(f.name for f in fields(Case)), "mib", "median_ms", "p20_ms", "p80_ms", "tb_per_s", "ratio", "ratio_p20", "ratio_p80",
)  # fmt: skip


def cases() -> Iterator[Case]:
    """Every pattern, operation and width."""
    for pattern in PATTERNS:
        for warps, ctas in WIDTHS:
            for operation in OPERATIONS:
                yield Case(pattern, operation, warps, ctas)


def table_of(times: Mapping[Case, Sequence[float]], gpu: str, sms: int) -> pd.DataFrame:
    """Throughputs from times in ms."""
    rows = []
    for case, own in times.items():
        ctas, time = sms * case.ctas_per_sm, summary(own)
        row = {"gpu": gpu, **asdict(case), "mib": case.tiles(ctas) * BLOCK * 4 / 2**20}
        row |= {"median_ms": time.median, "p20_ms": time.p20, "p80_ms": time.p80}
        row |= {"tb_per_s": ctas * STEPS * BLOCK * 4 / time.median / 1e9}
        rows.append(row | named("ratio", ratios(times[replace(case, operation="store")], own)))
    return pd.DataFrame(rows, columns=COLUMNS)


def measure(rounds: int) -> pd.DataFrame:
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
    return table_of({case: by_name[str(case)] for case in timers}, found.gpu, found.sms)


def _launch(case: Case, memory: Any, ctas: int) -> None:
    operation = OPERATIONS.index(case.operation)
    add_tiles[(ctas,)](memory, *case.arguments(ctas), STEPS, OPERATION=operation, BLOCK=BLOCK, num_warps=case.warps)


def write(path: Path, rows: pd.DataFrame) -> None:
    """The table as CSV."""
    rows.to_csv(path, index=False, lineterminator="\n")


def read(path: Path) -> pd.DataFrame:
    """What `write` wrote; ValueError for what is no such table."""
    rows = pd.read_csv(path)
    if tuple(rows) != COLUMNS:
        raise ValueError(f"{path} has not the columns of a table of additions")
    return rows


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
    lines = rows.drop(columns="gpu").to_dict("records")
    shown = [{name: f"{cell:.4g}" if isinstance(cell, float) else cell for name, cell in line.items()} for line in lines]
    table(f"fp32 additions on {rows['gpu'].iloc[0]}", shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
