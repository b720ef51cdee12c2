"""Times SPT on block masks against other orders that need no plan: tickets from the last KV tile down, Q tiles upwards.

Also what it gains that chains are cut into parts where they are few. Writes benchmarks/results/model/block_masks.csv,
block_masks.png and few_chains.csv, and prints a summary.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pandas as pd

from dash_inductor.cli.console import table

from .grid import FEW_CHAINS, HEADS, HOP_PERCENT, ORDERS, PARTS, WORKERS, few_chains, masks, points, row

RESULTS = Path(__file__).parent.parent / "results" / "model"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 2 for arguments that make no sense."""
    argparse.ArgumentParser(prog="python -m benchmarks.block_masks", description=__doc__).parse_args(argv)
    rows = pd.DataFrame(itertools.starmap(row, points()))
    table("Makespan over the bound: mean and worst", summary(rows))
    few = pd.DataFrame(itertools.starmap(few_chains, FEW_CHAINS))
    table("Few causal chains: makespan over the work shared out", few.to_dict("records"))
    RESULTS.mkdir(parents=True, exist_ok=True)
    write(rows, RESULTS / "block_masks.csv")
    write(few, RESULTS / "few_chains.csv")
    if find_spec("matplotlib") is not None:
        plot(rows, RESULTS / "block_masks.png")
    return 0


def write(rows: pd.DataFrame, path: Path) -> None:
    """The table as CSV."""
    rows.to_csv(path, index=False, lineterminator="\n")


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


def plot(rows: pd.DataFrame, path: Path) -> None:
    """Mean over heads of the makespan over the bound: a panel per hop, a line per mask, a marker per order."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    panels = figure.subplots(1, len(HOP_PERCENT), sharex=True, sharey=True)
    means = over_bound(rows).groupby(["hop_percent", "mask"]).mean()
    for panel, hop in zip(panels, HOP_PERCENT, strict=True):
        for name, marker in zip(ORDERS, "o^vs+x", strict=True):
            panel.plot(means.loc[hop][name][list(masks())], list(masks()), marker, fillstyle="none", label=name.replace("_", " "))
        panel.set_xscale("log", base=2)
        panel.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
        panel.set_title(f"lam / tau = {hop / 100:.2f}")
        panel.grid(alpha=0.3)
    panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(ORDERS))
    figure.supxlabel(f"makespan / bound on {WORKERS} CTAs (mean over {', '.join(map(str, HEADS))} heads)")
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    sys.exit(main())
