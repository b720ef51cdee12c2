"""Writes down what decides the bits of a training, or holds another training to that.

RUN is package.module:function, which trains, and is called here without arguments; or a file that this command has written. Of one
RUN the manifest is printed: JSON, the same bytes for equal runs.

Of two, the first of which is a file, the second is compared with the first: of a function each graph as it is compiled or comes out
of a cache. A line is a difference, with its consequence for bits.

The exit status is 0 if no difference may change bits, 1 if one may, 2 if a run or a file cannot be had.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import add_json
from .console import CommandError, print_json, section, table

if TYPE_CHECKING:
    from ..contract import Manifest

EXAMPLES = ("train:main --out run.json", "run.json train:main", "run.json other.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `manifest`."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="package.module:function, or a file; two are compared")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the manifest of the last RUN there")
    add_json(parser)


def main(args: argparse.Namespace) -> int:
    """Print, write or compare manifests; 1 if bits may differ."""
    if len(args.runs) > 2 or (len(args.runs) == 2 and _is_function(args.runs[0])):
        raise CommandError("give one RUN, or a file and a RUN that is compared with it")
    from ..contract import Manifest
    from ..contract.comparison import differences, never_met

    *files, run = args.runs
    recorded = Manifest.read(files[0]) if files else None
    found = _trained(run, recorded) if _is_function(run) else Manifest.read(run)
    if args.out is not None:
        found.write(args.out)
    if recorded is None:
        if args.out is None:
            print(found.to_json(), end="")
        return 0
    rows = differences(recorded, found)
    left = never_met(recorded.graphs, found.graphs)
    if args.json:
        print_json({"differences": [asdict(row) for row in rows], "never_met": left})
    else:
        table("Differences", [{name: value for name, value in asdict(row).items() if name != "may_change_bits"} for row in rows])
        section("Graphs that were never met", {str(n): name for n, name in enumerate(left, 1)})
    return int(any(row.may_change_bits for row in rows))


def _is_function(run: str) -> bool:
    return ":" in run and not Path(run).exists()


def _trained(name: str, recorded: Manifest | None) -> Manifest:
    """The manifest of this process when the function has returned; what it prints goes to stderr."""
    from ..contract import manifest
    from ..contract.live import hold
    from ..reproduce.function import load

    train = load(name)
    held = None if recorded is None else hold(recorded)  # from its first graph on: the function sets torch's modes
    try:
        with contextlib.redirect_stdout(sys.stderr):
            train()
    except (Exception, SystemExit) as error:
        if held is None or held:  # else it may be ManifestError, as it is or as Dynamo reports it: what was met is compared
            traceback.print_exc()
            raise CommandError(f"{name} raised {type(error).__name__}: {error}") from None
    finally:
        if held is not None:
            held.release()
    return manifest()
