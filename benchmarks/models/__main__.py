"""Trains transformers' models at toy size in the emulation, and writes which attentions were rewritten, how right and how equal.

A process per family. --keep needs the rows of all families: those of families that are not named come from --json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from dash_inductor.cli.console import table

from ..child import lines_of
from .families import FAMILIES
from .report import keep, line

Rows = list[dict[str, Any]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 1 if a row failed, and 2 for arguments that make no sense."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"those to train (default all): {', '.join(FAMILIES)}")
    parser.add_argument("--keep", action="store_true", help="keep what was found in benchmarks/results/models")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the rows here")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help="families at a time (default %(default)s)")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.families if name not in FAMILIES]:
        parser.error(f"no family is called {unknown[0]!r}; those known are {', '.join(FAMILIES)}")
    found: dict[str, Rows] = json.loads(args.json.read_text()) if args.json is not None and args.json.exists() else {}
    with ThreadPoolExecutor(max(args.jobs, 1)) as pool:
        running = {pool.submit(_in_a_process, name): name for name in args.families or FAMILIES}
        for done in as_completed(running):
            found[running[done]] = done.result()
            if args.json is not None:
                args.json.write_text(json.dumps(found, indent=1) + "\n")
    rows = [row for name in FAMILIES for row in found.get(name, ())]
    table("Models", [line(row) for row in rows])
    if args.keep:
        keep(rows)
    return int(any("failure" in row for row in rows))


def _in_a_process(name: str) -> Rows:
    """The family's rows, measured in a process of its own; of one that died, the cases that are missing say so."""
    rows, failed = lines_of("benchmarks.models.measure", name, TRITON_INTERPRET="1")
    print(f"{name}: {len(rows)} cases", file=sys.stderr)
    missing = FAMILIES[name].cases[len(rows) :]
    return [*rows, *({"family": name, "case": case, "failure": f"the process {failed}"} for case in missing)]


if __name__ == "__main__":
    sys.exit(main())
