"""Runs a training step several times, compares every bit of its gradients, and names the first operation that differs.

FUNCTION does one training step, from its seeds on: it takes no arguments, makes model and data anew, calls backward(), and
returns the model, whose gradients are compared, or a dict of tensors.

It runs again in the same process, in a fresh process with warm compile caches and in one with cold caches; under emulation with the
CTAs of each kernel in another order, and on a GPU beside a process that keeps it busy. Where a bit differs, the step runs once more
operation by operation, compiled graphs kernel by kernel, and the first one that makes something else of the same inputs is named
with your line. The gradients of the first run lie in the temporary folder meanwhile (TMPDIR); no setting is changed.

With --resume N, FUNCTION is train(steps, save=None, resume=None): it trains so many steps in all. At the path `save` it saves what
it goes on from where it gets that path as `resume`, with the states of all that draws. It trains once without a stop. Then it
trains N steps, and is resumed in other processes, with warm and with cold caches. What it returns has to have the same bits.

The exit status is 0 if all runs agree, 1 if one differs, 2 if the step cannot be run.
"""

from __future__ import annotations

import argparse
import sys

from ..reproduce import StepError
from ..reproduce.check import AGAIN, ELSEWHERE, KINDS, RUNS, TIMEOUT, check_named
from ..reproduce.report import Report
from ..reproduce.resume import RESUMED, check_resumed
from .arguments import add_json, at_least
from .console import CommandError, progress

EXAMPLES = ("train:step", "train:step --runs 5 --kinds same cold", "train:train --resume 3", "train:step --json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `check`."""
    parser.add_argument("function", metavar="FUNCTION", help="package.module:function, which does one training step")
    parser.add_argument("--runs", type=at_least(1), default=RUNS, metavar="N", help="runs in each process (default %(default)s)")
    kinds = "; ".join(f"{name}: {purpose}" for name, purpose in KINDS.items())
    parser.add_argument("--elsewhere", action="store_true", help=f"the kinds {', '.join(ELSEWHERE)}, as far as they can be had")
    parser.add_argument(
        "--kinds", nargs="+", choices=tuple(KINDS), metavar="KIND", help=f"which runs (default: the first five); {kinds}"
    )
    parser.add_argument(
        "--timeout", type=at_least(1), default=int(TIMEOUT), metavar="SECONDS", help="of each process (default %(default)s)"
    )
    parser.add_argument("--resume", type=at_least(1), metavar="N", help="stop a training behind N steps, and resume it")
    parser.add_argument("--steps", type=at_least(2), metavar="M", help="of that training in all (default: twice N)")
    parser.add_argument("--traceback", action="store_true", help="where the step cannot be run: show the whole traceback")
    add_json(parser)


def main(args: argparse.Namespace) -> int:
    """Print the report; 1 if a run differs."""
    try:
        report = _resumed(args) if args.resume else _again(args)
    except StepError as error:
        if args.traceback:
            print(error.traceback, file=sys.stderr)
        raise
    print(report.to_json() if args.json else report)
    return int(not report.identical)


def _again(args: argparse.Namespace) -> Report:
    if args.steps:
        raise CommandError("--steps goes with --resume")
    usual = ELSEWHERE if args.elsewhere else AGAIN
    began = progress(1 + len(set(args.kinds or usual) - {"same"}))
    return check_named(args.function, args.runs, args.kinds, args.timeout, began, usual)


def _resumed(args: argparse.Namespace) -> Report:
    if args.kinds or args.elsewhere or args.runs != RUNS:
        raise CommandError("--resume has runs of its own: leave out --kinds, --elsewhere and --runs")
    return check_resumed(args.function, args.resume, args.steps or 2 * args.resume, args.timeout, progress(2 + len(RESUMED)))
