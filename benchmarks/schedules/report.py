"""Times the chosen schedule over a grid of shapes, against the lower bound and the schedules of the DASH paper.

It writes benchmarks/results/model/schedules.csv in about five minutes, and prints a summary. It needs the extra `bench`.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from dash_inductor.cli.arguments import at_least
from dash_inductor.cli.console import table

from .grid import HOP_PERCENT, MASKS, Row, points, row

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
        rows.to_csv(RESULTS / "schedules.csv", index=False, lineterminator="\n")
    return 0


def table_of(rows: Sequence[Row]) -> pd.DataFrame:
    """One line per shape, times in ns."""
    import pandas as pd

    table = pd.DataFrame([asdict(row.point) | asdict(row) for row in rows])
    return table.drop(columns="point").rename(columns={"n": "n_kv"})


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
