"""Cases that are measured in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def lines_of(module: str, *arguments: str, left_out: tuple[str, ...] = (), **variables: str) -> tuple[list[dict[str, Any]], str]:
    """What a process of the module wrote into the file that is its last argument, a line of JSON each; and if it failed, how.

    It has one thread, imports this checkout, and has none of this package's settings, nor variables that begin as those `left_out`.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith(("DASH_INDUCTOR", *left_out))}
    own |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "lines"
        command = [sys.executable, "-m", module, *arguments, str(file)]
        ended = subprocess.run(command, cwd=ROOT, env=own | variables, capture_output=True, text=True)
        found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if not ended.returncode:
        return found, ""
    print(f"{module} {' '.join(arguments)} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}", file=sys.stderr)
    return found, f"ended with {ended.returncode}"
