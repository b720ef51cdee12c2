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
from .report import by_kernel, failed, keep, key_of, line, not_gluon, reasons, totals

MODELS = (*libraries.MODELS, *RECIPES)
LIBRARIES = (*libraries.LIBRARIES, "recipes")
LIMIT = 300.0  # seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 1 if a case of an installed library failed, and 2 for arguments that make no sense."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reach", description=__doc__)
    parser.add_argument("libraries", nargs="*", metavar="LIBRARY", help=f"those to ask (default all): {', '.join(LIBRARIES)}")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the rows as CSV")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the rows here")
    parser.add_argument("--limit", type=float, default=LIMIT, metavar="S", help="seconds for a case (default %(default)g)")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.libraries if name not in LIBRARIES]:
        parser.error(f"no library is called {unknown[0]!r}; those known are {', '.join(LIBRARIES)}")
    every = {(model.library, model.name, case): model for model in MODELS for case in model.cases}
    cases = {key: model for key, model in every.items() if model.library in (args.libraries or LIBRARIES)}
    known = json.loads(args.json.read_text()) if args.json is not None and args.json.exists() else []
    found = {key_of(row): row for row in known}
    for number, (key, model) in enumerate(cases.items(), start=1):
        if key in found and not failed(found[key]):
            continue
        found[key] = measured(model, key[2], args.limit)
        if args.json is not None:
            args.json.write_text(json.dumps(list(found.values()), indent=1) + "\n")
        print(f"{number} of {len(cases)}: {', '.join(key)}", file=sys.stderr)
    rows = [found[key] for key in every if key in found]
    if args.out is not None:
        keep(rows, args.out)
    table("Reach", [line(row) for row in rows])
    table("Totals", totals(rows))
    table("Why not", reasons(rows))
    table("Kernels", by_kernel(rows))
    table("Why not Gluon", not_gluon(rows))
    return int(any(row.get("failure", NOT_INSTALLED) != NOT_INSTALLED for row in rows))


if __name__ == "__main__":
    sys.exit(main())
