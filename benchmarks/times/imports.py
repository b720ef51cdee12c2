"""How much the installed package adds to `import torch`: it is autoloaded, and must not be felt.

    python benchmarks/times/imports.py [--repetitions 21]

Each repetition starts processes with and without autoload, one after the other, so that a machine that slows down slows both, and
compares their CPU time. The difference holds what torch does to find entry points at all; ours alone is measured too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

IMPORT = """
import time
begin = time.process_time()
import torch
print(1e3 * (time.process_time() - begin))
"""
ENTRY_POINT = """
import time, torch
begin = time.process_time()
from dash_inductor.hooks.autoload import autoload
autoload()
print(1e3 * (time.process_time() - begin))
"""


def milliseconds(code: str, *, autoload: bool) -> float:
    """What `code` prints in a process of its own."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DASH_INDUCTOR")}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is not compiled anew in each process
    environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = str(int(autoload))
    result = subprocess.run([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True, check=True)
    return float(result.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=21)
    repetitions = parser.parse_args().repetitions
    milliseconds(IMPORT, autoload=True)  # fills the disk cache, and writes bytecode
    without, with_it, entry_point = [], [], []
    for _ in range(repetitions):
        without.append(milliseconds(IMPORT, autoload=False))
        with_it.append(milliseconds(IMPORT, autoload=True))
        entry_point.append(milliseconds(ENTRY_POINT, autoload=False))
    base, loaded, ours = (statistics.median(times) for times in (without, with_it, entry_point))
    print(f"import torch, CPU time, median of {repetitions}: {base:.1f} ms without autoload, {loaded:.1f} ms with it")
    print(f"difference {loaded - base:+.1f} ms, ratio {loaded / base:.4f}; the entry point alone {ours:.1f} ms")


if __name__ == "__main__":
    main()
