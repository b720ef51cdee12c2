"""Times SPT on block masks against other orders that need no plan: tickets from the last KV tile down, Q tiles upwards.

Also what it gains that chains are cut into parts where they are few. Writes benchmarks/results/model/block_masks.csv and
few_chains.csv, and prints a summary.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from dash_inductor.cli.console import table

from .grid import FEW_CHAINS, ORDERS, PARTS, few_chains, points, row

RESULTS = Path(__file__).parent.parent / "results" / "model"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 2 for arguments that make no sense."""
    argparse.ArgumentParser(prog="python -m benchmarks.block_masks", description=__doc__).parse_args(argv)
    rows = pd.DataFrame(itertools.starmap(row, points()))
    table("Makespan over the bound: mean and worst", summary(rows))
    few = pd.DataFrame(itertools.starmap(few_chains, FEW_CHAINS))
    table("Few causal chains: makespan over the work shared out", few.to_dict("records"))
    for name, kept in (("block_masks", rows), ("few_chains", few)):
        kept.to_csv(RESULTS / f"{name}.csv", index=False, lineterminator="\n")
    return 0


def over_bound(rows: pd.DataFrame) -> pd.DataFrame:
    """The makespans of each line over its bound, by hop, mask and heads."""
    rows = rows.set_index(["hop_percent", "mask", "heads"])
    return rows[[*ORDERS, *PARTS]].div(rows["bound"], axis=0)


def summary(rows: pd.DataFrame) -> list[dict[str, str]]:
    """A line per hop, a column per order."""
    return [
        {"lam / tau": f"{hop / 100:.2f}"} | {name: f"{part[name].mean():.2f}, {part[name].max():.2f}" for name in part}
        for hop, part in over_bound(rows).groupby("hop_percent")
    ]


if __name__ == "__main__":
    sys.exit(main())
