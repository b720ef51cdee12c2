"""Runs the repository's tests of a GPU, tests/gpu, which an installation does not have."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
HELPERS = ("pytest", "xdist", "expecttest", "hypothesis", "greenlet", "matplotlib", "pandas")
NOT_AVAILABLE = 3
TIME_LIMIT = 124  # as the program `timeout` has it
PROCESSES = 12
SECONDS_TO_END = 15  # more than xdist waits for a worker that hangs


@dataclass(frozen=True)
class Group:
    """Tests of one pytest, and the share of the time by which it ends."""

    paths: tuple[str, ...]
    together: bool  # several at a time, where xdist is installed
    share: float


MAIN = ("on_gpu", *(f"{name}_on_gpu" for name in ("flex", "stock_ops", "masked", "varlen", "dropout", "eager")))
# The most important first: on other GPUs than Hopper the first group skips all. Some want the GPU for themselves.
GROUPS = (
    Group(("tests/gpu/test_gluon.py",), True, 0.5),
    Group(tuple(f"tests/gpu/test_{name}.py" for name in (*MAIN, "side_by_side")), True, 0.9),
    Group(("tests/gpu/test_benchmark_on_gpu.py", "tests/gpu/test_wait.py"), False, 1.0),
)


def run(seconds: float) -> int:
    """pytest's first exit code that is not 0, TIME_LIMIT past so long, or NOT_AVAILABLE and a line that says why nothing runs."""
    start = time.monotonic()
    if not (ROOT / "tests" / "gpu").is_dir():
        print("the tests were not run: this is no checkout of the repository, whose tests/gpu they are")
        return NOT_AVAILABLE
    missing = [name for name in HELPERS if find_spec(name) is None]
    print(f"not installed: {', '.join(missing) or 'nothing'} (tests/gpu needs pytest)", flush=True)
    if "pytest" in missing:
        print("the tests were not run: pytest is not installed")
        return NOT_AVAILABLE
    # Compiling takes longest, so several at a time.
    several = [] if "xdist" in missing else ["-n", str(min(PROCESSES, os.cpu_count() or 1))]
    codes = [_pytest(start + group.share * seconds, *group.paths, *(several if group.together else [])) for group in GROUPS]
    return next((code for code in codes if code), 0)


def _pytest(deadline: float, *arguments: str) -> int:
    """The exit code of pytest, which names each test as it ends, and is interrupted at the deadline."""
    environ = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", *arguments]
    # What a shell starts in the background ignores interrupts, and so would what it starts.
    process = subprocess.Popen(command, env=environ, cwd=ROOT, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        print("the time limit: what is left of these tests was not run", flush=True)
        process.send_signal(signal.SIGINT)
        try:
            process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return TIME_LIMIT
