"""How long a choice takes: the first of a process, one for sizes that are new, one for sizes that were seen.

python -m benchmarks.times.choice

The first comes on top of what Inductor imports anyway: at most 150 ms is aimed at. A graph with dynamic shapes pays the others at
each launch: at most 100 us and 1 us.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
import timeit

from dash_inductor.cli.console import table
from dash_inductor.devices.cost_files import load_costs
from dash_inductor.schedule import MASKS
from dash_inductor.schedule.choice import RunTimeChoice

PROCESSES, LENGTHS, CALLS, REPETITIONS = 5, 500, 1000, 30
FIRST = """
import time, torch._inductor.compile_fx, torch._inductor.select_algorithm
begin = time.perf_counter()
from benchmarks.times.choice import rule
rule({mask!r}, {guarantee!r})(0, 8192, 8192, 32)
print(1e3 * (time.perf_counter() - begin))
"""


def rule(mask: str, guarantee: str) -> RunTimeChoice:
    """What a graph with dynamic shapes asks on an H100, for heads of 128."""
    costs = load_costs("h100", block_m=64, block_n=128, head_dim=128)
    return RunTimeChoice(mask, 1, 128, 64, 128, costs, guarantee, family="auto", chained=False)


def first_ms(mask: str, guarantee: str) -> float:
    """The median over some processes of their own, in ms; importing the package is part of it."""
    command = [sys.executable, "-c", FIRST.format(mask=mask, guarantee=guarantee)]
    environment = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    return statistics.median(
        float(subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout)
        for _ in range(PROCESSES)
    )


def new_us(choice: RunTimeChoice) -> float:
    """The median over lengths that were never asked for."""
    seconds = []
    for length in range(1024, 1024 + 8 * LENGTHS, 8):
        begin = time.perf_counter()
        choice(0, length, length, 32)
        seconds.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(seconds)


def seen_us(choice: RunTimeChoice) -> float:
    """The median for one length asked for again and again."""
    seconds = timeit.repeat(lambda: choice(0, 8192, 8192, 32), number=CALLS, repeat=REPETITIONS)
    return 1e6 * statistics.median(seconds) / CALLS


def main() -> None:
    rows = []
    for mask in MASKS:
        for guarantee in ("run", "batch"):
            choice = rule(mask, guarantee)
            times = {
                "first, ms": first_ms(mask, guarantee),
                "new, us": new_us(choice),
                "seen, us": seen_us(choice),
            }
            rows.append({"mask": mask, "guarantee": guarantee} | {name: f"{value:.2f}" for name, value in times.items()})
    table("A choice", rows)


if __name__ == "__main__":
    main()
