"""Holds the replay against published speeds of other people's kernels on an H100: predicted and published TFLOPS, and the errors.

figures.csv has what was published, loops.csv the replayed clocks of those kernels' main loops. --replay makes loops.csv anew from
the SASS in build/published, where `python -m benchmarks.published.extract` puts it. No kernel of this project is in it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from benchmarks.machine_code.replay.pricing import LAW
from dash_inductor.cli.console import table

from . import loops
from .errors import Row, errors, rows
from .extract import SASS
from .kernels import KERNELS
from .model import LONG, exact_ghz, figures, fit


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 2 for arguments that make no sense."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    parser.add_argument("--replay", action="store_true", help="replay the SASS in build/published and write loops.csv first")
    parser.add_argument("--plot", metavar="FILE", help="draw predicted over published TFLOPS; needs matplotlib")
    args = parser.parse_args(argv)
    if args.plot and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    if args.replay:
        missing = [kernel.file for kernel in KERNELS.values() if not (SASS / kernel.file).exists()]
        if missing:
            parser.error(f"{SASS}: {', '.join(missing)} not there; python -m benchmarks.published.extract makes them")
        loops.write({label: loops.replayed(kernel, (SASS / kernel.file).read_text()) for label, kernel in KERNELS.items()})
    known = loops.read()
    made = rows(figures(), known)
    fitted = fit([row.figure for row in made if not row.figure.is_held_out], known)
    for title, law in (("Clock law", LAW), ("The fit to these figures", fitted)):
        print(f"{title}: {law.idle:.3f} - {law.slope:.3f} x share of the tensor cores, in GHz")
    for title, values in summaries(made).items():
        print(f"{title}: {errors(values)}")
    table("Main loops", [vars(loop) for loop in known.values()])
    lines = [line(row, exact_ghz(row.figure, known[row.figure.kernel.label])) for row in made]
    table("TFLOPS on an H100, published and predicted", lines)
    if args.plot:
        from .plot import plot

        plot(made, args.plot)
    return 0


def line(row: Row, ghz: float) -> dict[str, object]:
    """Of the table."""
    figure = row.figure
    marked = figure.kernel.marked and "head dim 64 of FlashAttention-3, by FlashAttention-4's loop"
    return {
        "kernel": figure.kernel.label + (" deterministic" if figure.deterministic else ""),
        "B x H x S": f"{figure.batch}x{figure.heads}x{figure.length}",
        "published": f"{figure.tflops:.1f}",
        "predicted": f"{row.predicted:.1f}",
        "error": f"{row.error:+.1%}",
        "kernel left out": f"{row.left_out_error:+.1%}",
        "exact GHz": f"{ghz:.2f}",
        "source": figure.source + (f"; {marked}; in no error" if marked else "; in no fit" if figure.is_held_out else ""),
    }


def summaries(made: Sequence[Row]) -> dict[str, list[float]]:
    """Errors by what they are of."""
    counting = [row for row in made if row.counts]
    return {
        f"From {LONG} positions on": [row.error for row in counting],
        "The same, by a law fitted without the kernel": [row.left_out_error for row in counting],
        "The same, backwards alone": [row.error for row in counting if row.figure.kernel.backward],
        f"Below {LONG} positions": [row.error for row in made if row.figure.length < LONG and not row.figure.is_held_out],
        "In no fit": [row.error for row in made if row.figure.is_held_out],
    }


if __name__ == "__main__":
    sys.exit(main())
