"""Holds the replay against an H200: main kernels in ms at one clock, and the two loops that were profiled.

The clock is fit to our Gluon kernels. Loops of other packages stand in benchmarks/results/published/loops.csv; --others replays
them anew: FlashAttention 4's where flash-attn-4 is installed, FlexAttention's of the installed torch.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec

from benchmarks.kept import rows_of, write
from dash_inductor.cli.arguments import add_json
from dash_inductor.cli.console import print_json, table

from .. import others
from ..measured import LOOPS, TMA_BYTES, compared, elapsed_cycles, furthest_off

EXAMPLES = ("", "--others", "--json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `measured`."""
    parser.add_argument("--others", action="store_true", help="replay the loops of other packages first, and keep the figures")
    add_json(parser)


def main(args: argparse.Namespace) -> int:
    """Print the tables; ValueError where a package does not compile."""
    if args.others:
        new = [*others.flex_attention(), *(others.replayed(TMA_BYTES) if find_spec("flash_attn.cute") else ())]
        kept = {row["kernel"]: row for row in rows_of(LOOPS)} | {row["kernel"]: row for row in new}
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
    shown = [row | {"predicted ms": f"{row['predicted ms']:.2f}", "error %": f"{row['error %']:+.1f}"} for row in rows]
    table(f"At {clock:.3f} GHz", shown)
    table("Profiled", profiled)
    return 0
