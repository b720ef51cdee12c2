"""How long schedules take: to build, place and simulate one of 262,144 tile steps (at most 0.5 s is aimed at), and the
recursion that stands in for a simulation (at most 0.2 s, however many Q tiles).

python -m benchmarks.times.simulator
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable
from typing import Any

from benchmarks.schedules.simulator import simulate
from dash_inductor.cli.console import table
from dash_inductor.schedule import Ascending, Descending, Geometry, GroupedPlan, Plan, RoundRobinPlan, Shift, Symmetric
from dash_inductor.schedule.formulas.chained import monotone_makespan

STEPS, REPETITIONS = 2**18, 5
COSTS = {"compute_ns": 800, "reduce_ns": 200, "sync_ns": 550}


def full(n_q: int, n_kv: int) -> Geometry:
    return Geometry(n_q, n_kv, 1, 1, "full")


def causal(n: int, k: int = 1) -> Geometry:
    return Geometry(n * k, n * k, 1, k, "causal")


def jitter() -> dict[str, Any]:
    """Costs of every step, a tenth up or down."""
    rng = random.Random(0)
    return {name: [rng.randint(9 * ns // 10, 11 * ns // 10) for _ in range(STEPS)] for name, ns in COSTS.items()}


# What is simulated, and how; each plan is made anew, with nothing computed yet.
SHAPES: dict[str, tuple[Callable[[], Plan], dict[str, Any]]] = {
    "64 heads, 64 x 64, shift": (lambda: GroupedPlan(Shift(full(64, 64), 16), 64, 8), {}),
    "the same, every cost of its own": (lambda: GroupedPlan(Shift(full(64, 64), 16), 64, 8), jitter()),
    "16 x 4 heads in groups, 64 x 64": (lambda: GroupedPlan(Ascending(full(64, 64), 64), 16, 2, 4), {}),
    "16 heads, causal, descending, mirrored": (lambda: GroupedPlan(Descending(causal(128, 2), 16, True), 16, 8), {}),
    "126 heads, causal, a ticket per chain": (lambda: GroupedPlan(Descending(causal(64), 64), 126, 126), {"resident": 132}),
    "8 heads, 181 x 181, shift, round robin": (lambda: RoundRobinPlan(Shift(full(181, 181), 132), 8, 132), {}),
    "1 head, 512 x 512, shift": (lambda: GroupedPlan(Shift(full(512, 512), 128), 1, 1), {}),
    "1 head, 724 x 724, causal, symmetric": (lambda: GroupedPlan(Symmetric(causal(724), 66), 1, 1), {}),
    "1 chain of 262,144": (lambda: GroupedPlan(Ascending(full(STEPS, 1), 1), 1, 1), {}),
    "16,384 heads, 4 chains of 4": (lambda: GroupedPlan(Ascending(full(4, 4), 4), 16384, 33), {}),
    "the same, a ticket per chain": (lambda: GroupedPlan(Ascending(full(4, 4), 4), 16384, 16384), {"resident": 132}),
    "1 head, 65,536 chains of 4": (lambda: GroupedPlan(Ascending(full(4, 65536), 64), 1, 1), {}),
    "262,144 heads, 1 step each": (lambda: GroupedPlan(Ascending(full(1, 1), 1), STEPS, 132), {}),
}


LARGE = GroupedPlan(Ascending(full(65536, 128), 128), 16, 1)
OTHERS: dict[str, Callable[[], object]] = {
    "recursion: 16 heads, 65,536 x 128, ascending": lambda: monotone_makespan(LARGE, step_ns=1000, hop_ns=750),
}


def seconds_of(call: Callable[[], object]) -> float:
    """CPU seconds of the fastest call."""
    seconds = []
    for _ in range(REPETITIONS):
        start = time.process_time()
        call()
        seconds.append(time.process_time() - start)
    return min(seconds)


def _simulated(plan: Callable[[], Plan], costs: dict[str, Any]) -> None:
    simulate(plan(), **{**COSTS, **costs})


def main() -> None:
    rows = []
    for name, (plan, costs) in SHAPES.items():
        seconds = seconds_of(functools.partial(_simulated, plan, costs))
        steps = plan().steps
        rows.append({"shape": name, "steps": f"{steps:,}", "CPU s": f"{seconds:.3f}", "steps / s": f"{steps / seconds:,.0f}"})
    table("simulate(), everything included, best of 5", rows)
    table("others, best of 5", [{"call": name, "CPU s": f"{seconds_of(call):.3f}"} for name, call in OTHERS.items()])


if __name__ == "__main__":
    main()
