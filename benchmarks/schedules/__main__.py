"""Times the chosen schedule over a grid of shapes, against the lower bound and the schedules of the DASH paper.

Writes benchmarks/results/model/schedules.csv and schedules.png, and prints a summary.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import statistics
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

from dash_inductor.commands.console import table

from .grid import HOP_PERCENT, KV_TILES, MASKS, WORKERS, Row, points, row

RESULTS = Path(__file__).parent.parent / "results" / "model"
TIMES = ("chosen", "cautious", "bound", "ascending", "descending", "ring")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 2 for arguments that make no sense."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.schedules", description=__doc__)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th point, and no files: a quick look")
    args = parser.parse_args(argv)
    if args.every < 1:
        parser.error("--every must be at least 1")
    rows = [row(point) for point in itertools.islice(points(), 0, None, args.every)]
    table("Time over the lower bound, and on how many shapes the best of the paper's three is faster", summary(rows))
    if args.every == 1:
        RESULTS.mkdir(parents=True, exist_ok=True)
        write(rows, RESULTS / "schedules.csv")
        if find_spec("matplotlib") is not None:
            plot(rows, RESULTS / "schedules.png")
    return 0


def summary(rows: Sequence[Row]) -> list[dict[str, str]]:
    """By mask and hop, and of all."""
    groups = [
        (mask, hop, [r for r in rows if (r.point.mask, r.point.hop_percent) == (mask, hop)])
        for mask in MASKS
        for hop in HOP_PERCENT
    ]
    return [_line(mask, f"{hop / 100:.2f}", part) for mask, hop, part in groups if part] + [_line("all", "", list(rows))]


def _line(mask: str, hop: str, rows: list[Row]) -> dict[str, str]:
    def mean(values: Iterable[float]) -> str:
        return f"{statistics.fmean(values):.3f}"

    behind = [r.chosen / r.paper for r in rows if r.chosen > r.paper]
    cautious = [r.cautious / r.paper for r in rows]
    return {
        "mask": mask,
        "lam / tau": hop,
        "shapes": str(len(rows)),
        "chosen": mean(r.chosen / r.bound for r in rows),
        "at most": f"{max(r.chosen / r.bound for r in rows):.2f}",
        "ascending": mean(r.ascending / r.bound for r in rows),
        "descending": mean(r.descending / r.bound for r in rows),
        "shift / symmetric": mean(r.ring / r.bound for r in rows),
        "paper's best": mean(r.paper / r.bound for r in rows),
        "paper faster": str(len(behind)),
        "with the margin": f"{mean(r.cautious / r.bound for r in rows)}, {max(cautious):.3f} of the paper's at most",
    }


def write(rows: Sequence[Row], path: Path) -> None:
    """One line per shape, times in ns."""
    with path.open("w", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(("mask", "n_kv", "heads", "workers", "hop_percent", "family", "roles", "heads_in_flight", *TIMES))
        for r in rows:
            p = r.point
            where = p.mask, p.n, p.heads, p.workers, p.hop_percent
            lines.writerow((*where, r.family, r.roles, r.heads_in_flight, *(getattr(r, name) for name in TIMES)))


def plot(rows: Sequence[Row], path: Path) -> None:
    """Mean time over the lower bound by number of KV tiles: the chosen schedule and the paper's three."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    panels = figure.subplots(1, len(MASKS), sharey=True)
    for panel, mask in zip(panels, MASKS, strict=True):
        ring = "shift" if mask == "full" else "symmetric"
        for name, label in (("chosen", "chosen"), ("ascending",) * 2, ("descending",) * 2, ("ring", ring)):
            mean = [
                statistics.fmean(getattr(r, name) / r.bound for r in rows if (r.point.mask, r.point.n) == (mask, n))
                for n in KV_TILES
            ]
            panel.plot(KV_TILES, mean, "o-", label=label, linewidth=2.5 if name == "chosen" else 1.2)
        panel.set_xscale("log", base=2)
        panel.set_xticks(KV_TILES, [str(n) for n in KV_TILES])
        panel.set_title(mask.replace("_", " "))
        panel.grid(alpha=0.3)
        panel.legend()
    figure.supxlabel(f"KV tiles of a head (mean over heads, P in {', '.join(map(str, WORKERS))} and hops)")
    figure.supylabel("time / lower bound")
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    sys.exit(main())
