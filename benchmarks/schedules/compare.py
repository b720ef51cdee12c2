"""Compares the times of all schedules over the length of a sequence, each as a multiple of what no schedule can beat.

Each family of schedules that serves the mask has its best number of roles (workers that share a head). 1.000 cannot be improved
on. `simulate` explains tiles, workers and costs.
"""

from __future__ import annotations

import argparse
from typing import Any

from dash_inductor.cli.arguments import add_json, at_least
from dash_inductor.cli.console import print_json, table
from dash_inductor.schedule import Geometry, make_order
from dash_inductor.schedule.families import REGISTER

from .simulate import COSTS, MOST_STEPS, add_problem, bound, geometry_of, kv_heads, plan_of, run

EXAMPLES = (
    f"--mask causal --heads 8 --kv-tiles 6 --workers 12 {COSTS}",
    f"--mask full --heads 8 --kv-tiles 32 --every 4 --workers 132 {COSTS} --plot families.svg",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `compare`."""
    add_problem(parser)
    parser.add_argument("--kv-tiles", required=True, type=at_least(1), metavar="N", help="most KV tiles of a head")
    parser.add_argument("--every", type=at_least(1), default=1, metavar="N", help="only multiples of N KV tiles")
    parser.add_argument("--ratio", type=at_least(1), default=2, metavar="K", help="Q tiles per KV tile (default 2)")
    parser.add_argument("--plot", metavar="FILE", help="write a chart, .png or .svg")
    add_json(parser)


def main(args: argparse.Namespace) -> int:
    """Print a row per number of KV tiles, and draw the chart where one is asked for; ValueError for what cannot be."""
    if args.every > args.kv_tiles:
        raise ValueError(f"every must be at most kv-tiles, got {args.every} and {args.kv_tiles}")
    lengths = range(args.every, args.kv_tiles + 1, args.every)
    many = len(lengths)
    steps = args.heads * args.ratio * args.every**2 * (many * (many + 1) * (2 * many + 1) // 6)
    if steps > MOST_STEPS:
        raise ValueError(
            f"heads x q-tiles x kv-tiles of all lengths must be at most {MOST_STEPS}, got {steps}: take a larger every"
        )
    rows = [compare(args, n_kv) for n_kv in lengths]
    if args.plot is not None:
        from .plots import over_bound, save

        save(over_bound(rows, title=f"{args.mask}, {args.heads} heads on {args.workers} workers"), args.plot)
    if args.json:
        print_json(rows)
        return 0
    names = {name: None for row in rows for name in row["families"]}
    lines = []
    for row in rows:
        ratios = {name: time["makespan_ns"] / row["lower_bound_ns"] for name, time in row["families"].items()}
        cells = {name: f"{ratios[name]:.3f}" if name in ratios else None for name in names}
        lines.append({"KV tiles": row["kv_tiles"], "bound, us": row["lower_bound_ns"] / 1000, **cells})
    table("Time over the lower bound", lines)
    return 0


def compare(args: argparse.Namespace, n_kv: int) -> dict[str, Any]:
    """Every family that serves the mask, each with its best number of roles."""
    geometry = geometry_of(args.mask, n_kv * args.ratio, n_kv)
    families: dict[str, dict[str, int]] = {}
    for family in REGISTER:
        plans = [plan_of(args, geometry, family, roles) for roles in roles_of(family, geometry, args.workers)]
        times = [
            {"makespan_ns": run(args, plan).makespan_ns, "roles": plan.roles, "heads_in_flight": plan.heads_in_flight}
            for plan in plans
        ]
        if times:
            families[family] = min(times, key=lambda time: time["makespan_ns"])
    sizes = {"kv_tiles": geometry.n_kv, "q_tiles": geometry.n_q, "kv_heads": kv_heads(args)}
    return {**sizes, "lower_bound_ns": bound(args, geometry), "families": families}


def roles_of(family: str, geometry: Geometry, workers: int) -> list[int]:
    """Roles that share a head evenly in 1, 2, 4, 8 .. passes, where there are workers for them; none if the mask is not served.

    A round robin takes all workers; or, where a head has more chains than Q tiles, no more than those.

    >>> causal = geometry_of("causal", 24, 12)
    >>> roles_of("symmetric", causal, workers=4), roles_of("shift", causal, workers=4)
    ([3, 2, 1], [])
    """
    known, units = REGISTER[family], REGISTER[family].units(geometry.n_kv)
    try:
        make_order(known.queue_of or family, geometry, 1)
    except ValueError:  # of a mask or a window that it does not serve
        return []
    if known.queue_of:
        return [min(workers, geometry.n_q) if known.roles_at_most_q_tiles and units > geometry.n_q else workers]
    most = min(workers, geometry.n_q if known.roles_at_most_q_tiles else units)
    passes = [2**e for e in range(units.bit_length() + 1)]
    return list(dict.fromkeys(roles for p in passes if (roles := -(-units // p)) <= most))
