"""The replayed main loops of the published kernels: loops.csv, and the command's part that makes it from SASS."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from benchmarks.machine_code.replay import Replay, loops_in, replay_loop
from benchmarks.machine_code.replay.operations import Operation

from .kernels import KERNELS, Kernel

FILE = Path(__file__).with_name("loops.csv")
MAIN_LOOPS = 6  # more than any has


@dataclass(frozen=True)
class Loop:
    """Of one kernel: SASS instructions, FLOP and clocks of a CTA's step in its steady state."""

    kernel: str  # its label
    package: str
    instructions: int
    flop: int
    cycles: float


def replayed(kernel: Kernel, sass: str) -> Loop:
    """From the text of cuobjdump. Of several loops the fastest by FLOP counts: others are of tiles at an edge.

    ValueError for what the replay has no model of.
    """
    function = sass.split("Function : ")[1]

    def of(loop: list[Operation]) -> Replay:
        return replay_loop(loop, warps=kernel.warps, ctas=kernel.ctas, tma_bytes=kernel.tma_bytes)

    best = max(map(of, loops_in(function, MAIN_LOOPS)), key=lambda replay: replay.flop / replay.cycles)
    return Loop(kernel.label, kernel.package, best.instructions, best.flop, round(best.cycles, 1))


def read() -> dict[str, Loop]:
    """loops.csv, by the label of the kernel."""
    with open(FILE, newline="") as file:
        rows = [
            Loop(row["kernel"], row["package"], int(row["instructions"]), int(row["flop"]), float(row["cycles"]))
            for row in csv.DictReader(file)
        ]
    return {row.kernel: row for row in rows}


def write(loops: Mapping[str, Loop]) -> None:
    """loops.csv, in the order of KERNELS."""
    rows: Iterable[Loop] = (loops[label] for label in KERNELS if label in loops)
    with open(FILE, "w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Loop)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, rows))
