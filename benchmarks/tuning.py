"""Times our attention backward against variants of itself: where a step is released, other tiles, and no order at all.

    python -m benchmarks.tuning --out FOLDER

A variant is an edit of the kernel's template or another tile (benchmarks/attention/variants.py). Rows are those of
benchmarks.attention, with `ours` as the baseline of every ratio.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.attention import runner
from benchmarks.attention.contenders import tuned
from benchmarks.attention.shapes import SHAPES

BASELINE = "ours"
TUNED = ("d128-causal-8192", "d64-causal-8192", "d128-full-2048", "d64-full-2048", "llama3-8b")
RESULTS = Path(__file__).parent / "results" / "tuning"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 2 without a GPU, and for arguments that make no sense."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tuning", description=__doc__)
    runner.add_arguments(parser)
    parser.set_defaults(out=RESULTS)
    args = parser.parse_args(argv)
    try:
        shapes = runner.chosen_shapes(args.shapes, [shape for shape in SHAPES if shape.name in TUNED])
        chosen = runner.chosen_contenders(args.contenders, tuned(), [BASELINE])
    except ValueError as error:
        parser.error(str(error))
    args.rounds = args.rounds or runner.ROUNDS
    runner.require_gpu(parser)
    return runner.command(args, "benchmarks.tuning", shapes, chosen, lambda shape: BASELINE)


if __name__ == "__main__":
    sys.exit(main())
