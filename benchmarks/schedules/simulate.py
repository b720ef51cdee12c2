"""Replays one schedule of an attention's backward step by step, and draws it.

A head is cut into tiles of queries (Q) and of keys and values (KV). A worker (a CTA of the GPU) owns a KV tile and walks the Q
tiles that see it; each step computes, then adds its part of dQ, and waits for the parts that come before it. The report has the
time, what a formula says of it, what no schedule can beat, and how long workers wait. --plot draws a row per worker.
"""

from __future__ import annotations

import argparse
import math
from typing import Any, NamedTuple

from benchmarks.schedules.bounds import lower_bound
from benchmarks.schedules.simulator import Simulation, simulate
from dash_inductor.cli.arguments import add_json, at_least
from dash_inductor.cli.console import print_json, section
from dash_inductor.schedule import MASKS, MONOTONE, ROUND_ROBIN, Geometry, GroupedPlan, Plan, make_order, place_heads
from dash_inductor.schedule.families import REGISTER
from dash_inductor.schedule.formulas import time_of
from dash_inductor.schedule.geometry import check_range

WINDOW = "window:"
MOST_STEPS = 2**20  # half a minute's work
MOST_WORKERS = 2**16
COSTS = "--compute-ns 800 --reduce-ns 200 --sync-ns 550"
EXAMPLES = (
    f"--mask causal --q-tiles 16 --kv-tiles 8 --heads 4 --workers 8 --family symmetric --roles 4 {COSTS} --plot gantt.png",
    f"--mask full --q-tiles 6 --kv-tiles 3 --heads 2 --workers 6 --family shift --roles 3 {COSTS} --json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `simulate`."""
    add_problem(parser)
    parser.add_argument("--q-tiles", required=True, type=at_least(1), metavar="N", help="Q tiles of a head")
    parser.add_argument("--kv-tiles", required=True, type=at_least(1), metavar="N", help="KV tiles of a head, each a chain")
    families = tuple(REGISTER)
    parser.add_argument("--family", required=True, choices=families, metavar="FAMILY", help=f"of schedules: {', '.join(families)}")
    parser.add_argument(
        "--roles", required=True, type=at_least(1), metavar="A", help="workers that share a head; of a round robin, all that run"
    )
    parser.add_argument("--stride", type=at_least(1), metavar="S", help="tiles between two roles of shift (default: the most)")
    parser.add_argument(
        "--mirrored",
        action=argparse.BooleanOptionalAction,
        help="mirror roles in odd rounds (default: for ascending and descending under a causal mask)",
    )
    parser.add_argument("--plot", metavar="FILE", help="write a Gantt chart, .png or .svg")
    parser.add_argument("--from-ns", type=at_least(0), default=0, metavar="NS", help="where the chart begins")
    parser.add_argument("--to-ns", type=at_least(1), metavar="NS", help="where the chart ends (default: with the schedule)")
    add_json(parser)


def add_problem(parser: argparse.ArgumentParser) -> None:
    """What is scheduled, on how many workers, and at which costs."""
    parser.add_argument("--mask", required=True, type=mask, metavar="MASK", help="full, causal or window:N (N more KV tiles)")
    parser.add_argument("--heads", required=True, type=at_least(1), metavar="N", help="query heads, batch included")
    parser.add_argument("--kv-group", type=at_least(1), default=1, metavar="N", help="query heads per kv head (default 1)")
    parser.add_argument("--workers", required=True, type=at_least(1, MOST_WORKERS), metavar="P", help="CTAs resident at a time")
    parser.add_argument("--compute-ns", required=True, type=at_least(1), metavar="NS", help="compute of one tile step")
    parser.add_argument("--reduce-ns", required=True, type=at_least(0), metavar="NS", help="its reduction into dq")
    parser.add_argument("--sync-ns", required=True, type=at_least(0), metavar="NS", help="hand-off to another worker")
    parser.add_argument("--overlap", action="store_true", help="a step computes while the one before it reduces")


def mask(text: str) -> str:
    """An argparse type: a mask by name."""
    if text in MASKS or (text.startswith(WINDOW) and text.removeprefix(WINDOW).isdecimal()):
        return text
    raise argparse.ArgumentTypeError(f"must be full, causal or window:N, got {text!r}")


def geometry_of(mask: str, n_q: int, n_kv: int) -> Geometry:
    """A head of equal lengths in n_q x n_kv tiles.

    A window is counted in KV tiles: a Q tile sees its diagonal KV tile and those before it.

    >>> g = geometry_of("window:1", 6, 3)
    >>> [g.tiles(j) for j in range(3)]
    [(0, 1, 2, 3), (2, 3, 4, 5), (4, 5)]
    """
    if mask.startswith(WINDOW):
        before = int(mask.removeprefix(WINDOW))
        # j * k <= i < (j + 1 + before) * k, with k = n_q / n_kv
        rows = [[j * n_q <= i * n_kv < (j + 1 + before) * n_q for i in range(n_q)] for j in range(n_kv)]
        return Geometry.of_blocks(rows)
    length = math.lcm(n_q, n_kv)
    return Geometry(length, length, length // n_q, length // n_kv, mask)


class Pace(NamedTuple):
    """What the costs come to: tau, lam, and the compute that nothing overlaps."""

    step_ns: int
    hop_ns: int
    extra_ns: int


def pace(args: argparse.Namespace) -> Pace:
    """The pace of a worker: only these three matter, whatever they are made of."""
    both = args.compute_ns, args.reduce_ns
    hop_ns = args.reduce_ns + args.sync_ns
    return Pace(max(both), hop_ns, min(both)) if args.overlap else Pace(sum(both), hop_ns, 0)


def kv_heads(args: argparse.Namespace) -> int:
    """Heads of key and value; ValueError where the groups do not come out even."""
    if args.heads % args.kv_group:
        raise ValueError(f"kv-group must divide heads, got {args.kv_group} and {args.heads}")
    return args.heads // args.kv_group


def plan_of(args: argparse.Namespace, geometry: Geometry, family: str, roles: int) -> Plan:
    """The schedule on as many workers as there are heads to put in flight; ValueError names what cannot be."""
    heads = kv_heads(args)
    stride, mirrored = getattr(args, "stride", None), getattr(args, "mirrored", None)
    check_range("roles", roles, args.workers, "workers")
    if family in ROUND_ROBIN:
        return place_heads(
            family, geometry, roles, heads=heads, heads_in_flight=1, group=args.kv_group, stride=stride, mirrored=bool(mirrored)
        )
    order = make_order(
        family,
        geometry,
        roles,
        stride=stride,
        mirrored=family in MONOTONE and geometry.is_causal if mirrored is None else mirrored,
    )
    return GroupedPlan(order, heads, min(heads, args.workers // roles), args.kv_group)


def run(args: argparse.Namespace, plan: Plan) -> Simulation:
    """The plan at the costs that were asked for."""
    costs = {"compute_ns": args.compute_ns, "reduce_ns": args.reduce_ns, "sync_ns": args.sync_ns}
    return simulate(plan, **costs, overlap=args.overlap)


def bound(args: argparse.Namespace, geometry: Geometry) -> int:
    """What no schedule can beat on these workers, in ns."""
    step_ns, hop_ns, extra_ns = pace(args)
    workers = {"heads": kv_heads(args), "workers": args.workers}
    return extra_ns + lower_bound(geometry, **workers, step_ns=step_ns * args.kv_group, hop_ns=hop_ns)


def report(args: argparse.Namespace) -> tuple[dict[str, Any], Simulation]:
    """(What the command prints, the simulation); ValueError for parameters that cannot be."""
    if (steps := args.q_tiles * args.kv_tiles * args.heads) > MOST_STEPS:
        sizes = f"{args.q_tiles} x {args.kv_tiles} x {args.heads} = {steps}"
        raise ValueError(f"q-tiles x kv-tiles x heads must be at most {MOST_STEPS}, got {sizes}")
    geometry = geometry_of(args.mask, args.q_tiles, args.kv_tiles)
    plan = plan_of(args, geometry, args.family, args.roles)
    simulation = run(args, plan)
    step_ns, hop_ns, extra_ns = pace(args)
    time = time_of(plan, step_ns=step_ns, hop_ns=hop_ns)
    rows = [simulation.steps.of_worker(worker) for worker in range(plan.workers)]
    figures = {
        "family": args.family,
        "roles": plan.roles,
        "heads_in_flight": plan.heads_in_flight,
        "stride": getattr(plan.order, "stride", None),
        "mirrored": plan.order.mirrored,
        "makespan_ns": simulation.makespan_ns,
        "formula_ns": None if time is None else time.ns + extra_ns,
        "formula": None if time is None else "exact" if time.exact else "upper bound",
        "lower_bound_ns": bound(args, geometry),
        "residency": simulation.residency,
        "steps": len(simulation.steps),
        "waits": len(simulation.waits),
        "wait_ns": simulation.wait_ns,
        "utilization": round(simulation.utilization, 4),
        "workers": [list(map(list, row)) for row in rows] + [[]] * (args.workers - plan.workers),
    }
    return figures, simulation


def main(args: argparse.Namespace) -> int:
    """Print the report, and draw the chart where one is asked for; ValueError for what cannot be."""
    if args.to_ns is not None and args.to_ns <= args.from_ns:
        raise ValueError(f"to-ns must be more than from-ns, got {args.to_ns} and {args.from_ns}")
    figures, simulation = report(args)
    if args.plot is not None:
        from .plots import gantt, save

        schedule = f"{args.family}, {figures['roles']} roles, {figures['heads_in_flight']} heads in flight"
        ratio = figures["makespan_ns"] / figures["lower_bound_ns"]
        title = f"{args.mask}, {schedule}: {figures['makespan_ns'] / 1000:,} us, {ratio:.3f} of the lower bound"
        save(gantt(simulation, title=title, from_ns=args.from_ns, to_ns=args.to_ns), args.plot)
    if args.json:
        print_json(figures, indent=None)
    else:
        section("Schedule", {name.replace("_", " "): value for name, value in figures.items() if name != "workers"})
    return 0
