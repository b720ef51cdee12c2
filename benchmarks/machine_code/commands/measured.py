"""Holds the replay against an H200: main kernels in ms at one clock, and the two loops that were profiled.

The clock is fit to our Gluon kernels. Loops of other packages stand in benchmarks/results/published/loops.csv. --others replays
them anew, where the versions that were timed are installed.
"""

from __future__ import annotations

import argparse

from benchmarks.kept import rows_of, write
from dash_inductor.cli.arguments import add_json
from dash_inductor.cli.console import print_json, table

from .. import others
from ..measured import LOOPS, compared, elapsed_cycles, furthest_off

EXAMPLES = ("", "--others", "--json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `measured`."""
    parser.add_argument("--others", action="store_true", help="replay the loops of other packages first, and keep the figures")
    add_json(parser)


def main(args: argparse.Namespace) -> int:
    """Print the tables; ValueError where no other package is installed, or one does not compile."""
    if args.others:
        kept = {row["kernel"]: row for row in [*rows_of(LOOPS), *others.replayed()]}
        write(LOOPS, [*kept.values()])
    clock, rows = compared()
    profiled = []
    for head_dim in (128, 64):
        cycles, worst, place = furthest_off(head_dim)
        profile = {"loop": f"Gluon d{head_dim} full", "cycles": round(cycles), "measured": round(elapsed_cycles(head_dim))}
        profiled.append(profile | {"furthest off, %": round(worst, 1), "at": place})
    if args.json:
        print_json({"clock_ghz": clock, "kernels": rows, "profiled": profiled})
        return 0
    in_ms = ("measured ms", "predicted ms")
    shown = [row | {name: f"{row[name]:.2f}" for name in in_ms} | {"error %": f"{row['error %']:+.1f}"} for row in rows]
    table(f"At {clock:.3f} GHz", shown)
    table("Profiled", profiled)
    return 0
