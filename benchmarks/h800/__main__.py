"""Fits the cost model to FlashAttention-3 with the DASH schedules, measured on an H800, and says how well it holds.

It models the paper's machine and the DASH authors' kernel, not ours, whose constants stand in dash_inductor/devices.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec

from . import report
from .evaluation import evaluate
from .fit import fit
from .measurements import cells, load
from .model import predict_all
from .plot import plot


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 2 for arguments that make no sense."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.h800", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the predicted times of all schedules at 512 to 16,384 only")
    parser.add_argument("--plot", metavar="FILE", help="draw measured and modelled throughput; needs matplotlib")
    args = parser.parse_args(argv)
    if args.plot and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    measurements = load()
    if not args.json:
        report.show(evaluate(measurements))
    if args.json or args.plot:
        predicted = predict_all(cells(), fit(measurements))
        if args.json:
            print(json.dumps([asdict(cell) | {"ms": round(ms, 4)} for cell, ms in predicted.items()], indent=2))
        if args.plot:
            plot(measurements, predicted, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
