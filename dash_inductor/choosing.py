"""The `choose` command: which schedule an attention gets on a device, and what it was chosen among."""

from __future__ import annotations

import argparse
import json
from typing import Any

from .config import Config
from .console import table
from .schedule import GUARANTEES, Shape, candidates, choose, known_devices, load_costs, symbolic_choice
from .schedule.table import pack_plan, row_ints
from .simulate import MASKS, at_least, show
from .template_choice import template_for
from .templates.tiles import tile

ARCHS = {"sm_80": 80, "sm_90": 90, "sm_100": 100}
FP32_BYTES = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `choose`."""
    parser.add_argument("--mask", required=True, choices=MASKS)
    for name in ("q-len", "kv-len", "batch", "heads"):
        parser.add_argument(f"--{name}", required=True, type=at_least(1), metavar="N")
    parser.add_argument("--kv-heads", type=at_least(1), metavar="N", help="key and value heads (default: as many as --heads)")
    parser.add_argument("--head-dim", required=True, type=at_least(1), metavar="N")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16"))
    parser.add_argument("--device", required=True, choices=known_devices(), help="the GPU; it need not be there")
    parser.add_argument("--guarantee", default="run", choices=GUARANTEES, help="what the bits may not depend on (default: run)")
    parser.add_argument("--json", action="store_true", help="everything, as JSON")


def main(args: argparse.Namespace) -> int:
    """Print what is chosen; ValueError for what cannot be."""
    found = report(args)
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    show({name: value for name, value in found.items() if name not in ("candidates", "piecewise")})
    names = ("family", "roles", "heads_in_flight", "stride", "predicted_us")
    table("Candidates, in order; the first is the default", [{name: row[name] for name in names} for row in found["candidates"]])
    return 0


def report(args: argparse.Namespace) -> dict[str, Any]:
    """What `--json` prints; formulas and the Piecewise are in q_len, kv_len and heads, the batch times the kv heads."""
    import sympy

    from .schedule.symbolic import SYMBOLIC

    kv_heads = args.heads if args.kv_heads is None else args.kv_heads
    if args.heads % kv_heads:
        raise ValueError(f"kv-heads must divide heads, and {kv_heads} does not divide {args.heads}")
    costs = load_costs(args.device, block_m=1, block_n=1, head_dim=1)
    used = tile(ARCHS.get(costs.arch, costs.arch), args.dtype, args.head_dim)
    blocks = {"block_m": used.block_m, "block_n": used.block_n, "head_dim": used.block_d}
    costs = load_costs(args.device, **blocks, ctas_per_sm=used.ctas_per_sm)
    how = {"group": args.heads // kv_heads, "mask": MASKS[args.mask], **blocks}
    choice = choose(Shape(args.q_len, args.kv_len, args.batch * kv_heads, **how), costs, args.guarantee)

    symbols = [sympy.Symbol(name, integer=True, positive=True) for name in ("q_len", "kv_len", "heads")]
    if args.q_len == args.kv_len:
        symbols[1] = symbols[0]
    formulas = candidates(Shape(*symbols, **how), costs, args.guarantee, SYMBOLIC)
    n_q = choice.shape.geometry.n_q
    query_heads = args.batch * args.heads
    # fp32 dq, and delta and lse of each of its rows; the table, and what else the schedule needs; the ticket, a dummy, and a
    # semaphore for each (head, Q tile)
    rows = query_heads * n_q * used.block_m
    plan = choice.plan()
    chains = max(len(list(plan.tasks(worker))) for worker in range(plan.workers))
    ints = len(pack_plan(plan)) + row_ints(plan) + 2 + query_heads * n_q
    return {
        "device": args.device,
        "guarantee": args.guarantee,
        # of two passes there is nothing to choose: what follows is then what one pass would do
        "template": template_for(Config(guarantee=args.guarantee), args.device, args.head_dim, MASKS[args.mask]),
        "tile": f"{used.block_m}x{used.block_n}x{used.block_d}",
        "family": choice.family,
        "roles": choice.roles,
        "heads_in_flight": choice.heads_in_flight,
        "stride": choice.stride or None,
        "boustrophedon": choice.boustrophedon,
        "predicted_us": None if choice.time_ns is None else choice.time_ns / 1000,
        "overhead_us": (costs.launch_ns + chains * costs.chain_ns) / 1000,
        "estimate": costs.estimate,
        "step_ns": costs.step_ns,
        "hop_ns": costs.hop_ns,
        "workers": costs.workers,
        "workspace_bytes": FP32_BYTES * (rows * (used.block_d + 2) + ints),
        "candidates": [
            {
                "family": c.family,
                "roles": c.roles,
                "heads_in_flight": c.heads_in_flight,
                "stride": c.stride or None,
                "default": c.is_default,
                "predicted_us": None if c.time.penalty else c.time.ns / 1000,
                "formula_ns": str(formula.time.ns),
                "applies_if": f"{formula.time.penalty} == 0",
            }
            for c, formula in zip(choice.considered, formulas, strict=True)
        ],
        "piecewise": str(symbolic_choice(*symbols, **how, costs=costs, guarantee=args.guarantee)),
    }
