"""Runs the tests that need a GPU; exit code 3, with a line that says so, where pytest is not installed.

python -m benchmarks.gpu_tests [--minutes M]
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

HELPERS = ("pytest", "xdist", "expecttest", "hypothesis", "greenlet", "rich", "matplotlib", "pandas")
NOT_AVAILABLE = 3
TIME_LIMIT = 124  # as `timeout` has it
PROCESSES = 12
SECONDS_TO_END = 15  # more than xdist waits for a worker that hangs


@dataclass(frozen=True)
class Group:
    """Tests of one pytest, and the share of the time by which it ends."""

    paths: tuple[str, ...]
    together: bool  # several at a time, where xdist is installed
    share: float


MAIN = ("on_gpu", *(f"{name}_on_gpu" for name in ("flex", "stock_ops", "masked", "varlen", "eager")))
# The most important first. Some want the GPU for themselves; the kernel that is off by default comes last, and hangs alone.
GROUPS = (
    Group(tuple(f"tests/gpu/test_{name}.py" for name in (*MAIN, "side_by_side")), True, 0.65),
    Group(("tests/gpu/test_benchmark_on_gpu.py", "tests/gpu/test_wait.py"), False, 0.85),
    Group(("tests/gpu/test_gluon.py",), True, 1.0),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; pytest's first exit code that is not 0, or 124 past the time limit."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_tests", description=__doc__)
    parser.add_argument("--minutes", type=float, default=math.inf, metavar="M", help="interrupt pytest after so long in all")
    args = parser.parse_args(argv)
    start, seconds = time.monotonic(), 60 * args.minutes
    missing = [name for name in HELPERS if find_spec(name) is None]
    print(
        f"not installed: {', '.join(missing) or 'nothing'} (tests/gpu needs pytest, its benchmark pandas)",
        flush=True,
    )
    if "pytest" in missing:
        print("the tests were not run: pytest is not installed")
        return NOT_AVAILABLE
    codes = [_pytest(start + group.share * seconds, *group.paths, *(processes() if group.together else [])) for group in GROUPS]
    return next((code for code in codes if code), 0)


def processes() -> list[str]:
    """Arguments for pytest: compiling takes longest, so several at a time, where xdist is installed."""
    return [] if find_spec("xdist") is None else ["-n", str(min(PROCESSES, os.cpu_count() or 1))]


def _pytest(deadline: float, *arguments: str) -> int:
    """Its exit code; each test is named as it ends. Past the deadline it is interrupted, and says what failed until then."""
    environ = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", *arguments]
    process = subprocess.Popen(command, env=environ)
    try:
        return process.wait(_seconds(deadline))
    except subprocess.TimeoutExpired:
        print("the time limit: what is left of these tests was not run", flush=True)
        process.send_signal(signal.SIGINT)
        try:
            process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return TIME_LIMIT


def _seconds(deadline: float) -> float | None:
    return None if deadline == math.inf else max(0.0, deadline - time.monotonic())


if __name__ == "__main__":
    sys.exit(main())
