"""Times the chosen schedule over a grid of shapes, against the lower bound and the schedules of the DASH paper.

It writes benchmarks/results/model/schedules.csv and schedules.png in about five minutes, and prints a summary. It needs the extra
`bench`.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from dash_inductor.cli.arguments import at_least
from dash_inductor.cli.console import table

from .grid import HOP_PERCENT, KV_TILES, MASKS, WORKERS, Row, points, row

if TYPE_CHECKING:
    import pandas as pd

EXAMPLES = ("--every 440",)
RESULTS = Path(__file__).parent.parent / "results" / "model"
PAPER = ["ascending", "descending", "ring"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `grid`."""
    parser.add_argument(
        "--every", type=at_least(1), default=1, metavar="N", help="only every N-th point, and no files: a quick look"
    )


def main(args: argparse.Namespace) -> int:
    """Time the grid, print the summary, and write the files where all of it was timed."""
    rows = table_of([row(point) for point in itertools.islice(points(), 0, None, args.every)])
    table("Time over the lower bound, and on how many shapes the best of the paper's three is faster", summary(rows))
    if args.every == 1:
        RESULTS.mkdir(parents=True, exist_ok=True)
        write(rows, RESULTS / "schedules.csv")
        if find_spec("matplotlib") is not None:
            plot(rows, RESULTS / "schedules.png")
    return 0


def table_of(rows: Sequence[Row]) -> pd.DataFrame:
    """One line per shape, times in ns."""
    import pandas as pd

    table = pd.DataFrame([asdict(row.point) | asdict(row) for row in rows])
    return table.drop(columns="point").rename(columns={"n": "n_kv"})


def write(rows: pd.DataFrame, path: Path) -> None:
    """The table as CSV."""
    rows.to_csv(path, index=False, lineterminator="\n")


def over_bound(rows: pd.DataFrame) -> pd.DataFrame:
    """The times of each line over its lower bound, and in the column `paper` the best of the paper's three."""
    times = rows[["chosen", "cautious", *PAPER]].assign(paper=rows[PAPER].min(axis=1))
    return times.div(rows["bound"], axis=0)


def summary(rows: pd.DataFrame) -> list[dict[str, str]]:
    """By mask and hop, and of all."""
    groups = [(m, h, rows[(rows["mask"] == m) & (rows["hop_percent"] == h)]) for m, h in itertools.product(MASKS, HOP_PERCENT)]
    return [_line(mask, f"{hop / 100:.2f}", part) for mask, hop, part in groups if len(part)] + [_line("all", "", rows)]


def _line(mask: str, hop: str, rows: pd.DataFrame) -> dict[str, str]:
    over = over_bound(rows)
    mean = {name: f"{value:.3f}" for name, value in over.mean().items()}
    cautious = (over["cautious"] / over["paper"]).max()
    return {
        "mask": mask,
        "lam / tau": hop,
        "shapes": str(len(rows)),
        "chosen": mean["chosen"],
        "at most": f"{over['chosen'].max():.2f}",
        "ascending": mean["ascending"],
        "descending": mean["descending"],
        "shift / symmetric": mean["ring"],
        "paper's best": mean["paper"],
        "paper faster": str((over["chosen"] > over["paper"]).sum()),
        "with the margin": f"{mean['cautious']}, {cautious:.3f} of the paper's at most",
    }


def plot(rows: pd.DataFrame, path: Path) -> None:
    """Mean time over the lower bound by number of KV tiles: the chosen schedule and the paper's three."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    panels = figure.subplots(1, len(MASKS), sharey=True)
    means = over_bound(rows).groupby([rows["mask"], rows["n_kv"]]).mean()
    for panel, mask in zip(panels, MASKS, strict=True):
        ring = "shift" if mask == "full" else "symmetric"
        for name, label in (("chosen", "chosen"), ("ascending",) * 2, ("descending",) * 2, ("ring", ring)):
            panel.plot(KV_TILES, means.loc[mask, name], "o-", label=label, linewidth=2.5 if name == "chosen" else 1.2)
        panel.set_xscale("log", base=2)
        panel.set_xticks(KV_TILES, [str(n) for n in KV_TILES])
        panel.set_title(mask.replace("_", " "))
        panel.grid(alpha=0.3)
        panel.legend()
    figure.supxlabel(f"KV tiles of a head (mean over heads, P in {', '.join(map(str, WORKERS))} and hops)")
    figure.supylabel("time / lower bound")
    figure.savefig(path, dpi=100)
