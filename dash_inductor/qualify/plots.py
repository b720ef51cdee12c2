"""Plots and a report of what a folder has, by the repository's own command, which an installation does not have."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from .gpu_tests import NOT_AVAILABLE, ROOT

FOLDER = "report"  # in the folder that is reported
NEEDED = ("pandas", "matplotlib")


def run(folder: Path) -> int:
    """The command's exit code, or NOT_AVAILABLE and a line that says why there are no plots."""
    if not (ROOT / "benchmarks" / "attention").is_dir():
        print("no plots were made: this is no checkout of the repository, whose benchmarks make them")
        return NOT_AVAILABLE
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        print(f"no plots were made: {', '.join(missing)} is not installed (the extra bench)")
        return NOT_AVAILABLE
    return subprocess.call(
        [sys.executable, "-m", "benchmarks.attention.merge", str(folder), "--out", str(folder / FOLDER)], cwd=ROOT
    )
