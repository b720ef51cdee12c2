"""Times attention backwards on this machine's GPU, ours against all others, and writes one table and its pictures.

`ours` is the kernel with the schedule that the cost model chooses, `ours-<name>` one that a setting forces, `ours-unordered`
the chosen one without its order: what determinism costs. Backwards alone are timed, by CUDA events, in turns, on a cold L2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from dash_inductor.cli.console import table

from . import runner
from .contenders import Contender, baseline_of, contenders
from .plot import plot
from .report import show
from .rows import read
from .shapes import QUICK, SHAPES, Shape

RESULTS = Path(__file__).parent.parent / "results" / "attention"
QUICK_CONTENDERS = "ours,sdpa-flash,sdpa-cudnn,flex"
QUICK_ROUNDS = 10


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 2 without a GPU, and for arguments that make no sense."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__)
    runner.add_arguments(parser)
    parser.set_defaults(out=RESULTS)
    parser.add_argument("--quick", action="store_true", help=f"a few shapes, {QUICK_CONTENDERS}, {QUICK_ROUNDS} rounds")
    parser.add_argument("--list", action="store_true", help="print shapes and contenders, and why one is not available")
    parser.add_argument("--from", dest="source", type=Path, metavar="CSV", help="measure nothing: show and draw this table")
    args = parser.parse_args(argv)
    if args.source is not None:
        return _from_file(parser, args)
    try:
        shapes = runner.chosen_shapes(args.shapes, QUICK if args.quick else SHAPES)
        named = args.contenders or (QUICK_CONTENDERS if args.quick else None)
        chosen = runner.chosen_contenders(named, contenders(), map(baseline_of, shapes))
    except ValueError as error:
        parser.error(str(error))
    args.rounds = args.rounds or (QUICK_ROUNDS if args.quick else runner.ROUNDS)
    if args.list:
        return _list(shapes, chosen)
    runner.require_gpu(parser)
    return runner.command(args, "benchmarks.attention", shapes, chosen, baseline_of)


def _list(shapes: Sequence[Shape], chosen: Mapping[str, Contender]) -> int:
    cells = ({**asdict(shape), "documents": " ".join(map(str, shape.documents))} for shape in shapes)
    table("Shapes", [{**own, "TFLOP": f"{shape.flop / 1e12:.2f}"} for own, shape in zip(cells, shapes, strict=True)])
    device = "cuda" if runner.has_gpu() else "cpu"
    rows = [
        {"contender": c.name, "promises the same bits": c.deterministic, "twin": c.twin, "not available": c.unavailable(device)}
        for c in chosen.values()
    ]
    table("Contenders", rows)
    return 0


def _from_file(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    try:
        rows = read(args.source)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    show(rows)
    if args.pictures:
        args.out.mkdir(parents=True, exist_ok=True)
        runner.say_written(plot(rows, args.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
