"""Compiles the cases of suites without the package and with it, in processes of their own, and writes what differs: nothing should.

A page needs the rows of all suites: those of suites that are not named come from --json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from dash_inductor.cli.console import table

from ..child import lines_of
from .compare import DIFFERS
from .report import lines, page
from .settings import PAIRS, SETTINGS
from .suites import SUITES

Outcomes = dict[str, dict[str, list[dict[str, Any]]]]  # by suite and setting
# Variables of caches, of Triton's interpreter, and of whether the package switches itself on: a setting says what they are.
LEFT_OUT = ("TORCHINDUCTOR_", "TRITON_INTERPRET", "TORCH_DEVICE_BACKEND_AUTOLOAD")
CACHES = ("TORCHINDUCTOR_FX_GRAPH_CACHE", "TORCHINDUCTOR_AUTOGRAD_CACHE")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 1 if a case differs, and 2 for arguments that make no sense."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.harm", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"those to run (default all): {', '.join(SUITES)}")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the page, such as docs/no_harm.md")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the outcomes here")
    parser.add_argument("--cache", type=Path, metavar="FOLDER", help="keep compiled C++ here, for a next run (default nowhere)")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="one case of N, for a quick look (default all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help="processes at a time (default %(default)s)")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.suites if name not in SUITES]:
        parser.error(f"no suite is called {unknown[0]!r}; those known are {', '.join(SUITES)}")
    if args.every < 1:
        parser.error(f"--every {args.every}: it must be 1 or more")
    outcomes: Outcomes = json.loads(args.json.read_text()) if args.json is not None and args.json.exists() else {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max(args.jobs, 1)) as pool:
        caches = {name: folder if suite.caches or args.cache is None else str(args.cache) for name, suite in SUITES.items()}
        running = {pool.submit(_suite, name, args.every, caches[name]): name for name in args.suites or SUITES}
        for done in as_completed(running):
            outcomes[running[done]] = done.result()
            if args.json is not None:
                args.json.write_text(json.dumps(outcomes, indent=1) + "\n")
    rows = lines(outcomes)
    table("No harm", rows)
    if args.out is not None:
        args.out.write_text(page(outcomes, args.every))
    return int(any(row[DIFFERS] for row in rows))


def _suite(name: str, every: int, cache: str) -> dict[str, list[dict[str, Any]]]:
    """The outcomes of a suite, by setting. All share a folder of caches: of compiled C++, which is found by its text, and where
    torch's are on, of graphs too, so that one setting that took those of another would count other hits."""
    suite = SUITES[name]
    variables = {**dict.fromkeys(CACHES, str(int(suite.caches))), "TORCHINDUCTOR_CACHE_DIR": cache}
    found = {}
    for setting in (one for pair in PAIRS.values() for one in pair if suite.emulated or not SETTINGS[one].emulated):
        own = SETTINGS[setting].environment | variables
        found[setting], failed = lines_of("benchmarks.harm.measure", name, setting, str(every), left_out=LEFT_OUT, **own)
        if failed:
            found[setting].append({"case": "the process", "outcome": failed})
        print(f"{name}, {setting}: {len(found[setting])} cases", file=sys.stderr)
    return found


if __name__ == "__main__":
    sys.exit(main())
