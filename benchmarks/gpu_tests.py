"""Runs the tests that need a GPU; exit code 3, with a line that says so, where pytest is not installed.

python -m benchmarks.gpu_tests
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

HELPERS = ("pytest", "xdist", "expecttest", "hypothesis", "greenlet", "rich", "matplotlib")
NOT_AVAILABLE = 3
TIMED = "tests/gpu/test_benchmark_on_gpu.py"  # wants the GPU for itself


def main() -> int:
    missing = [name for name in HELPERS if find_spec(name) is None]
    print(f"not installed: {', '.join(missing) or 'nothing'} (tests/gpu needs pytest alone)", flush=True)
    if "pytest" in missing:
        print("the tests were not run: pytest is not installed")
        return NOT_AVAILABLE
    together = [] if "xdist" in missing else ["-n", "6"]  # compiling takes longest
    alone = _pytest(TIMED)
    return _pytest("tests/gpu", f"--ignore={TIMED}", *together) or alone


def _pytest(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]).returncode


if __name__ == "__main__":
    sys.exit(main())
