"""Runs a training step several times, compares every bit of its gradients, and names the first operation that differs.

FUNCTION does one training step, from its seeds on: it takes no arguments, makes model and data anew, calls backward(), and
returns the model, whose gradients are compared, or a dict of tensors.

It runs again in the same process, in a fresh process with warm compile caches and in one with cold caches; under emulation with the
CTAs of each kernel in another order, and on a GPU beside a process that keeps it busy. Where a bit differs, the step runs once more
operation by operation, compiled graphs kernel by kernel, and the first one that makes something else of the same inputs is named
with your line. The gradients of the first run lie in the temporary folder meanwhile (TMPDIR); no setting is changed.

The exit status is 0 if all runs agree, 1 if one differs, 2 if the step cannot be run.
"""

from __future__ import annotations

import argparse
import sys

from ..reproduce import StepError
from ..reproduce.check import KINDS, RUNS, TIMEOUT, check_named
from .arguments import add_json, at_least
from .console import progress

EXAMPLES = ("train:step", "train:step --runs 5 --kinds same cold", "train:step --json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `check`."""
    parser.add_argument("function", metavar="FUNCTION", help="package.module:function, which does one training step")
    parser.add_argument("--runs", type=at_least(1), default=RUNS, metavar="N", help="runs in each process (default %(default)s)")
    kinds = "; ".join(f"{name}: {purpose}" for name, purpose in KINDS.items())
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), metavar="KIND", help=f"which runs (default: all); {kinds}")
    parser.add_argument(
        "--timeout", type=at_least(1), default=int(TIMEOUT), metavar="SECONDS", help="of each process (default %(default)s)"
    )
    parser.add_argument("--traceback", action="store_true", help="where the step cannot be run: show the whole traceback")
    add_json(parser)


def main(args: argparse.Namespace) -> int:
    """Print the report; 1 if a run differs."""
    try:
        began = progress(1 + len(set(args.kinds or KINDS) - {"same"}))
        report = check_named(args.function, args.runs, args.kinds, args.timeout, began)
    except StepError as error:
        if args.traceback:
            print(error.traceback, file=sys.stderr)
        raise
    print(report.to_json() if args.json else report)
    return int(not report.identical)
