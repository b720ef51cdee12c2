"""What the package adds to torch.compile: a Llama of 32 layers for an H100 that is not there, from empty caches and from full ones.

    python -m benchmarks.times.compilation [--layers 32] [--repetitions 3]

Each compilation has a process of its own, which also imports Inductor. Those with and without the package take turns. CPU seconds
are of one compiling process and what it starts; on a busy machine they are steadier than the clock's. At most 5 s more is aimed at
from empty caches, and 0.3 s from full ones.
"""

from __future__ import annotations

import argparse
import compileall
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from dash_inductor.cli.console import table

ROOT = Path(__file__).parents[2]
WITHOUT, WITH = "without", "with"  # the package
EMPTY, FULL = "empty", "full"  # caches
Seconds = dict[str, float]


def compiled(layers: int, package: str, caches: str, folder: str) -> Seconds:
    """`wall` and `cpu` of one compilation. RuntimeError where it was not the one that was asked for."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("DASH_INDUCTOR", "TORCHINDUCTOR"))}
    environ |= {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": str(Path(folder, "triton"))}
    environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = str(int(package == WITH))
    command = [sys.executable, "-m", "benchmarks.times.compile_once", str(layers)]
    found = json.loads(subprocess.run(command, env=environ, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout)
    if found.pop("rewritten") != (layers if package == WITH else 0):
        raise RuntimeError(f"{package} the package, other attentions were rewritten than expected")
    if found.pop("from_cache") != int(caches == FULL):
        raise RuntimeError(f"with {caches} caches, the graph came {'not ' if caches == FULL else ''}out of one")
    return found


def rows(seconds: dict[tuple[str, str], list[Seconds]]) -> list[dict[str, str]]:
    """By caches and clock the medians, and that of the differences within a repetition."""
    found = []
    for caches, (clock, name) in itertools.product((EMPTY, FULL), (("cpu", "CPU s"), ("wall", "wall s"))):
        without, with_it = ([each[clock] for each in seconds[package, caches]] for package in (WITHOUT, WITH))
        difference = statistics.median(b - a for a, b in zip(without, with_it, strict=True))
        row = {"caches": caches, "": name, "without": f"{statistics.median(without):.2f}"}
        found.append(row | {"with": f"{statistics.median(with_it):.2f}", "difference": f"{difference:+.2f}"})
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args(argv)
    for package in ("dash_inductor", "lowering", "templates"):
        compileall.compile_dir(ROOT / package, quiet=2)  # as an installed package is
    seconds: dict[tuple[str, str], list[Seconds]] = {}
    for repetition in range(options.repetitions):
        for package in (WITHOUT, WITH) if repetition % 2 == 0 else (WITH, WITHOUT):
            with tempfile.TemporaryDirectory() as folder:
                for caches in (EMPTY, FULL):
                    seconds.setdefault((package, caches), []).append(compiled(options.layers, package, caches, folder))
    table(f"torch.compile, {options.layers} layers, medians of {options.repetitions}", rows(seconds))


if __name__ == "__main__":
    main()
