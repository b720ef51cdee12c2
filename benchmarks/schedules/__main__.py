"""Schedules in the cost model: one replayed, all compared, and the chosen one over a grid of shapes."""

from __future__ import annotations

from dash_inductor.cli.program import Program

from . import compare, report, simulate

PROGRAM = Program(
    "benchmarks.schedules",
    __doc__,
    examples=("simulate --help", "grid --every 440"),
    commands={
        "simulate": (simulate, "replay one schedule: its time, its waits, a Gantt chart"),
        "compare": (compare, "compare the times of all schedules over the sequence length"),
        "grid": (report, "time the chosen schedule over a grid of shapes"),
    },
)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.run()
