"""Trains transformers' models at toy size in the emulation, and writes which attentions were rewritten, how right and how equal.

A process per family. --keep needs the rows of all families: those of families that are not named come from --json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from dash_inductor.cli.console import table

from .families import FAMILIES
from .report import keep, line

ROOT = Path(__file__).parents[2]
Rows = list[dict[str, Any]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 1 if a row failed, and 2 for arguments that make no sense."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"those to train (default all): {', '.join(FAMILIES)}")
    parser.add_argument("--keep", action="store_true", help="keep what was found in benchmarks/results/models")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the rows here")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help="families at a time (default %(default)s)")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)  # where a process of one family writes
    args = parser.parse_args(argv)
    if unknown := [name for name in args.families if name not in FAMILIES]:
        parser.error(f"no family is called {unknown[0]!r}; those known are {', '.join(FAMILIES)}")
    if args.rows is not None:
        _write_rows(args.families[0], args.rows)
        return 0
    rows = json.loads(args.json.read_text()) if args.json is not None and args.json.exists() else []
    with ThreadPoolExecutor(max(args.jobs, 1)) as pool:
        for done in as_completed([pool.submit(_in_a_process, name) for name in args.families or FAMILIES]):
            rows = _with(rows, done.result())
            if args.json is not None:
                args.json.write_text(json.dumps(rows, indent=1) + "\n")
    table("Models", [line(row) for row in rows])
    if args.keep:
        keep(rows)
    return int(any("failure" in row for row in rows))


def _with(rows: Rows, family: Rows) -> Rows:
    """The rows with those of a family in the place of what stood there of it, in the order of FAMILIES."""
    names = list(FAMILIES)
    others = [row for row in rows if row["family"] != family[0]["family"]]
    return sorted([*others, *family], key=lambda row: names.index(row["family"]))


def _in_a_process(name: str) -> Rows:
    """The family's rows, measured in a process of its own; of one that died, the cases that are missing say so."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows"
        command = [sys.executable, "-m", "benchmarks.models", name, "--rows", str(file)]
        ended = subprocess.run(command, cwd=ROOT, env=_environment(os.environ))
        rows = [json.loads(text) for text in file.read_text().splitlines()] if file.exists() else []
    missing = FAMILIES[name].cases[len(rows) :]
    return [*rows, *({"family": name, "case": case, "failure": f"the process ended with {ended.returncode}"} for case in missing)]


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Without settings of this package, and with Triton's interpreter."""
    own = {name: value for name, value in environ.items() if not name.startswith("DASH_INDUCTOR")}
    return own | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}


def _write_rows(name: str, file: Path) -> None:
    from .measure import measure

    for case in FAMILIES[name].cases:
        start = time.perf_counter()
        row = measure(name, case)
        with file.open("a") as out:
            print(json.dumps(row), file=out)
        print(f"{name}, {case}: {time.perf_counter() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
