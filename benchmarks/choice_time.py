"""How long one decision takes: what a graph with dynamic shapes pays per call. At most 20 us is aimed at.

python -m benchmarks.choice_time
"""

from __future__ import annotations

import statistics
import timeit

from dash_inductor.console import table
from dash_inductor.devices.cost_files import load_costs
from dash_inductor.schedule import MASKS, Shape, choose

CALLS, REPETITIONS = 100, 30


def main() -> None:
    costs = load_costs("h100", block_m=64, block_n=128, head_dim=64)
    rows = []
    for mask in MASKS:
        for guarantee in ("run", "batch"):
            shape = Shape(8192, 8192, 32, 1, 64, 64, 128, mask)
            seconds = timeit.repeat(lambda s=shape, g=guarantee: choose(s, costs, g), number=CALLS, repeat=REPETITIONS)  # type: ignore[misc]
            low, median, high = (1e6 * q / CALLS for q in (min(seconds), statistics.median(seconds), max(seconds)))
            rows.append(
                {
                    "mask": mask,
                    "guarantee": guarantee,
                    "min us": f"{low:.1f}",
                    "median us": f"{median:.1f}",
                    "max us": f"{high:.1f}",
                }
            )
    table("choose()", rows)


if __name__ == "__main__":
    main()
