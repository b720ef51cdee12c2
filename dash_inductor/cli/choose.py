"""Says which schedule the backward of an attention gets on a GPU, and what it is chosen among.

The choice is a pure function of sizes and of the GPU's cost file, which this command can ask on any machine: nothing is timed.
Settings (DASH_INDUCTOR_*) are obeyed. The report has the tile, the family of schedules, the time predicted for every candidate
with its formula, and the memory beside inputs and outputs. The exit status is 1 for an attention that keeps its stock kernel; the
report says why then.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import current
from ..decision import Declined
from ..devices import DEVICES
from ..devices.cost_files import arch_of, known_devices, numbers_of, require_of
from ..devices.target import Target
from ..problem import Problem
from ..resolve import Resolution, resolve
from ..schedule import GUARANTEES, MASKS, TWO_PASS, Costs
from ..schedule.candidates import Candidate, CandidateBuilder
from ..schedule.choice import ScheduleChoice, weight
from ..templates.tiles import HALF_DTYPES
from .arguments import add_attention, add_json
from .console import print_json, section, table

MOST_CHAINS = 2**22  # which are counted one by one
PLACE = ("family", "roles", "heads_in_flight", "stride")
SIZES = "--q-len 8192 --kv-len 8192 --batch 2 --heads 16 --head-dim 128"
EXAMPLES = (f"--device h100 --mask causal {SIZES}", f"--device a100 --guarantee batch --kv-heads 4 {SIZES} --json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `choose`."""
    add_attention(parser, devices=known_devices(), masks=MASKS, dtypes=(*HALF_DTYPES, "fp32"))
    parser.add_argument("--guarantee", choices=GUARANTEES, help="what the bits may not depend on (default: the setting, run)")
    add_json(parser)


def main(args: argparse.Namespace) -> int:
    """Print what is chosen, or why the attention keeps its stock kernel, the exit code being 1 then; ValueError past the limits."""
    figures = report(args)
    declined = figures["declined"] is not None
    if args.json:
        print_json(figures)
        return int(declined)
    hidden = () if declined else ("candidates", "piecewise", "declined", "remedy")
    section("Attention", {name.replace("_", " "): value for name, value in figures.items() if name not in hidden})
    if declined:
        return 1
    if figures["candidates"]:
        print()
        by_time = sorted(figures["candidates"], key=lambda row: (row["predicted_us"] is None, row["predicted_us"] or 0))
        table("Candidates, the fastest first", [_shown(row, figures) for row in by_time])
        for family, formula in {row["family"]: row["formula_ns"] for row in figures["candidates"]}.items():
            time, *parts = (formula or "no formula").split("; ")
            print(f"\n{family}, ns: {time}", *parts, sep="\n    ")
    return 0


def _shown(row: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """A candidate in the table; the one that is taken is not the fastest where it wins by less than a margin."""
    is_chosen = all(row[name] == chosen[name] for name in PLACE)
    return {name.replace("_", " "): row[name] for name in (*PLACE, "predicted_us")} | {"": "chosen" if is_chosen else ""}


def report(args: argparse.Namespace) -> dict[str, Any]:
    """What `--json` prints, under the settings in force.

    Of an attention that the pass leaves alone just that: `declined` is the reason. ValueError for more than this command takes.
    """
    settings = current()
    if args.guarantee is not None:
        settings = replace(settings, guarantee=args.guarantee)
    kv_heads = args.heads if args.kv_heads is None else args.kv_heads
    sizes = args.batch, args.heads, kv_heads, args.q_len, args.kv_len, args.head_dim
    problem = Problem(args.mask, *sizes, args.dtype, value_dim=args.value_dim)
    arch = arch_of(args.device)
    name = DEVICES[args.device].name if args.device in DEVICES else args.device
    key = require_of(settings.costs, name, arch) if settings.costs else args.device
    numbers = numbers_of(key)
    sms = settings.sms if args.device == "emulated" else numbers["sms"]["value"]
    target = Target(key, arch, sms - settings.sm_reserve, settings.sm_reserve)
    figures: dict[str, Any] = {"device": args.device, "guarantee": settings.guarantee, "declined": None, "remedy": None}
    try:
        if target.sms < 1:
            raise Declined(f"{settings.sm_reserve} SMs are reserved (sm_reserve), and the device has {sms}", "reserve fewer")
        resolution = resolve(problem, settings, target)
    except Declined as declined:
        return figures | {"declined": str(declined), "remedy": declined.remedy}
    tile = resolution.tile
    chains = problem.kv_heads_total * (n_kv := problem.tiled(tile).geometry.n_kv)
    if chains > MOST_CHAINS:
        product = f"batch x kv-heads x KV tiles of {tile.block_n} keys"
        raise ValueError(f"{product} must be at most {MOST_CHAINS}, got {args.batch} x {kv_heads} x {n_kv} = {chains}")
    figures |= {"template": str(resolution.template), "kernel": resolution.kernel}
    figures |= _figures(resolution)
    return figures | (_why(resolution.choice) if resolution.choice else {"candidates": [], "piecewise": None})


def _figures(resolution: Resolution) -> dict[str, Any]:
    """The rows of the report."""
    (plan, time_ns), costs = resolution.schedule, resolution.costs
    figures: dict[str, Any] = {"tile": resolution.tile_text, **dict.fromkeys(PLACE), "family": TWO_PASS}
    steps: dict[str, Any]
    if resolution.one_pass:
        assert costs
        figures |= {"family": plan.family, "roles": plan.roles, "heads_in_flight": plan.heads_in_flight}
        figures["stride"] = getattr(plan.order, "stride", None)
        steps = {name: getattr(costs, name) for name in ("estimate", "step_ns", "hop_ns", "chain_ns", "workers")}
    else:
        two = resolution.two_pass_costs
        by_pass, end_ns = [two.kv_step_ns, two.q_step_ns], two.end_ns
        steps = {"estimate": two.estimate, "step_ns": by_pass, "hop_ns": 0, "chain_ns": end_ns, "workers": two.workers}
    return figures | {
        "mirrored": resolution.one_pass is not None and plan.order.mirrored,
        "predicted_us": None if time_ns is None else time_ns / 1000,
        **steps,
        "workspace_bytes": resolution.workspace_bytes(plan.heads * plan.group * plan.order.geometry.n_q, resolution.schedule_ints),
    }


def _why(choice: ScheduleChoice) -> dict[str, Any]:
    """The candidates with their formulas, and the rule by which one of them is taken."""
    builder = CandidateBuilder(choice.problem, choice.costs)
    rows = []
    for candidate in choice.considered:
        formula = builder.formula(candidate.family)
        texts = {"formula_ns": formula and str(formula), "applies_if": formula and str(formula.applies)}
        rows.append({**candidate.row(), **texts})
    return {"candidates": rows, "piecewise": rule(choice.considered, choice.costs)}


def rule(considered: tuple[Candidate, ...], costs: Costs) -> str:
    """Which candidate is taken, by position, as a Piecewise of their times t0, t1, ..: the first least one, others by a margin.

    >>> near = Costs("a", "sm_90", step_ns=50, hop_ns=3, shift_percent=0, workers=132, l2_bytes=1 << 20, estimate=True)
    >>> rule((Candidate("ascending", 3, 1, 400, is_default=True), Candidate("shift", 3, 1, 300, 2)), near)
    'Piecewise((0, 100*t0 <= 102*t1), (1, True))'
    """
    weighted = {i: f"{weight(candidate, costs)}*t{i}" for i, candidate in enumerate(considered) if candidate.ns is not None}
    branches = []
    for at, place in enumerate(weighted or [0]):
        later = list(weighted.values())[at + 1 :]
        least = f"Min({', '.join(later)})" if len(later) > 1 else "".join(later)
        branches.append(f"({place}, {f'{weighted[place]} <= {least}' if later else 'True'})")
    return f"Piecewise({', '.join(branches)})"
