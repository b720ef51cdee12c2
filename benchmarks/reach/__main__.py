"""Counts the attentions of many libraries' models at real head dims, and asks `explain` what an H100 would make of each.

A process per case. A case that fails, takes too long or whose library is not installed is a row that says so. Cases that --json has
are not measured again, but for those that failed. `make reach` installs the libraries first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from dash_inductor.cli.console import table

from . import libraries
from .measure import NOT_INSTALLED, measured
from .recipes import RECIPES
from .report import Row, changes, csv_of, failed, key_of, line, read, reasons, totals

MODELS = (*libraries.MODELS, *RECIPES)
LIBRARIES = (*libraries.LIBRARIES, "recipes")
LIMIT = 300.0  # seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 1 if a case of an installed library failed, and 2 for arguments that make no sense."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reach", description=__doc__)
    parser.add_argument("libraries", nargs="*", metavar="LIBRARY", help=f"those to ask (default all): {', '.join(LIBRARIES)}")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the rows as CSV")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the rows here")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="say what differs from the rows of this CSV")
    parser.add_argument("--limit", type=float, default=LIMIT, metavar="S", help="seconds for a case (default %(default)g)")
    parser.add_argument("--list", action="store_true", help="list the cases, and measure none")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.libraries if name not in LIBRARIES]:
        parser.error(f"no library is called {unknown[0]!r}; those known are {', '.join(LIBRARIES)}")
    wanted = args.libraries or list(LIBRARIES)
    cases = {(model.library, model.name, case): model for model in MODELS if model.library in wanted for case in model.cases}
    if args.list:
        print("\n".join(", ".join(key) for key in cases))
        return 0
    rows = json.loads(args.json.read_text()) if args.json is not None and args.json.exists() else []
    for number, (key, model) in enumerate(cases.items(), start=1):
        if any(key_of(row) == key and not failed(row) for row in rows):
            continue
        rows = _with(rows, measured(model, key[2], args.limit))
        if args.json is not None:
            args.json.write_text(json.dumps(rows, indent=1) + "\n")
        print(f"{number} of {len(cases)}: {', '.join(key)}", file=sys.stderr)
    if args.out is not None:
        args.out.write_text(csv_of(rows))
    table("Reach", [line(row) for row in rows])
    table("Totals", totals(rows))
    table("Why not", reasons(rows))
    if args.compare is not None:
        table(f"Beside {args.compare}", changes(rows, read(args.compare)))
    return int(any(row.get("failure", NOT_INSTALLED) != NOT_INSTALLED for row in rows))


def _with(rows: list[Row], row: Row) -> list[Row]:
    """The rows with one in the place of what stood there of its case, in the order of MODELS."""
    order = [(model.library, model.name, case) for model in MODELS for case in model.cases]
    others = [other for other in rows if key_of(other) in order and key_of(other) != key_of(row)]
    return sorted([*others, row], key=lambda one: order.index(key_of(one)))


if __name__ == "__main__":
    sys.exit(main())
