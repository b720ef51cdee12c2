"""The `choose` command: which schedule an attention gets on a device, and what it was chosen among."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .config import ONE_PASS, Config
from .console import table
from .devices.cost_files import known_devices, load_costs, load_two_pass, numbers_of
from .reasons import sizes_decline
from .schedule import (
    GUARANTEES,
    INTEGER,
    TWO_PASS,
    Choice,
    Shape,
    TwoPass,
    candidates,
    choose,
    symbolic_choice,
    two_pass_time,
)
from .schedule.candidates import Candidate
from .schedule.choice import SIZES
from .schedule.table import row_ints, table_ints
from .simulate import MASKS, at_least, show
from .template_choice import template_for
from .templates.tiles import HALF_DTYPES, Tile, TwoPassTile, tile, two_pass_tile

ARCHS = {"sm_80": 80, "sm_90": 90, "sm_100": 100}
FP32_BYTES = 4
MOST_CHAINS = 2**22  # which are counted one by one
MOST = 2**31 - 1  # of each size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `choose`."""
    parser.add_argument("--mask", required=True, choices=MASKS)
    for name in ("q-len", "kv-len", "batch", "heads"):
        parser.add_argument(f"--{name}", required=True, type=at_least(1, MOST), metavar="N")
    parser.add_argument("--kv-heads", type=at_least(1, MOST), metavar="N", help="key and value heads (default: as many as --heads)")
    parser.add_argument("--head-dim", required=True, type=at_least(1, MOST), metavar="N")
    parser.add_argument("--dtype", default="bf16", choices=(*HALF_DTYPES, "fp32"))
    parser.add_argument("--device", required=True, choices=known_devices(), help="the GPU; it need not be there")
    parser.add_argument("--guarantee", default="run", choices=GUARANTEES, help="what the bits may not depend on (default: run)")
    parser.add_argument("--json", action="store_true", help="everything, as JSON")


def main(args: argparse.Namespace) -> int:
    """Print what is chosen, or why the attention keeps its stock kernel, the exit code being 1 then; ValueError past the limits."""
    found = report(args)
    declined = found["declined"] is not None
    if args.json:
        print(json.dumps(found, indent=2))
        return int(declined)
    hidden = ("candidates", "piecewise") if declined else ("candidates", "piecewise", "declined")
    show({name: value for name, value in found.items() if name not in hidden})
    if declined:
        return 1
    names = ("family", "roles", "heads_in_flight", "stride", "predicted_us")
    if considered := [{name: row[name] for name in names} for row in found["candidates"]]:
        table("Candidates, in order; the first is the default", considered)
    return 0


def report(args: argparse.Namespace) -> dict[str, Any]:
    """What `--json` prints; formulas and the Piecewise are in q_len, kv_len and heads, the batch times the kv heads.

    Of an attention that the pass leaves alone just that: `declined` is the reason. ValueError for more than this command takes.
    """
    kv_heads = args.heads if args.kv_heads is None else args.kv_heads
    mask = MASKS[args.mask]
    numbers = numbers_of(args.device)
    how = ARCHS.get(numbers["arch"], numbers["arch"]), args.dtype, args.head_dim
    found: dict[str, Any] = {"device": args.device, "guarantee": args.guarantee, "declined": None}
    try:
        template = template_for(Config(guarantee=args.guarantee), args.device, args.head_dim, mask)
        one = None if template == TWO_PASS else tile(*how)
        two = None if template == ONE_PASS else two_pass_tile(*how)
    except ValueError as error:
        return found | {"declined": str(error)}
    lengths = {"q_len": args.q_len, "kv_len": args.kv_len}
    causal = mask.startswith("causal")
    reason = sizes_decline(one, is_causal=causal, heads=args.heads, key_heads=kv_heads, value_heads=kv_heads, **lengths)
    if reason is not None:
        return found | {"declined": reason}
    two_costs = two and load_two_pass(args.device, **two.sizes())
    rows = one or two
    assert rows
    sizes = args.q_len, args.kv_len, args.batch * kv_heads, args.heads // kv_heads
    shape = Shape(*sizes, rows.block_d, rows.block_m, rows.block_n, mask)
    if (chains := shape.heads * shape.geometry.n_kv) > MOST_CHAINS:
        product = f"batch x kv-heads x KV tiles of {rows.block_n} keys"
        raise ValueError(
            f"{product} must be at most {MOST_CHAINS}, got {args.batch} x {kv_heads} x {shape.geometry.n_kv} = {chains}"
        )
    found["template"] = template
    choice = None
    if one:
        blocks = {"block_m": one.block_m, "block_n": one.block_n, "head_dim": one.block_d}
        costs = replace(load_costs(args.device, **blocks, ctas_per_sm=one.ctas_per_sm), two_pass=two_costs)
        choice = choose(shape, costs, args.guarantee)
    if one and choice and choice.family != TWO_PASS:
        found |= _in_one_pass(choice, one)
    else:
        assert two and two_costs
        found |= _in_two_passes(shape, two, two_costs, numbers)
    return found | (_why(choice) if choice else {"candidates": [], "piecewise": None})


def _in_one_pass(choice: Choice, used: Tile) -> dict[str, Any]:
    costs, plan, n_q = choice.costs, choice.plan(), choice.shape.geometry.n_q
    chains = max(sum(1 for _ in plan.tasks(worker)) for worker in range(plan.workers))
    # fp32 dq, and delta and lse of each of its rows; the table, and what else the schedule needs; the ticket, a dummy, and a
    # semaphore for each (head, Q tile)
    query_heads = choice.shape.heads * choice.shape.group
    ints = table_ints(plan) + row_ints(plan) + 2 + query_heads * n_q
    return {
        "tile": str(used),
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
        "workspace_bytes": FP32_BYTES * (query_heads * n_q * used.block_m * (used.block_d + 2) + ints),
    }


def _in_two_passes(shape: Shape, used: TwoPassTile, two: TwoPass, numbers: dict[str, Any]) -> dict[str, Any]:
    """Of the overhead the launch alone: what a CTA loads and stores at its ends is not known yet."""
    time = two_pass_time(shape, two, INTEGER)
    return {
        "tile": str(used),
        "family": TWO_PASS,
        "roles": None,
        "heads_in_flight": None,
        "stride": None,
        "boustrophedon": False,
        "predicted_us": None if time.penalty else time.ns / 1000,
        "overhead_us": numbers["launch_ns"]["value"] / 1000,
        "estimate": two.estimate or numbers["launch_ns"]["estimate"],
        "step_ns": [two.kv_step_ns, two.q_step_ns],
        "hop_ns": 0,
        "workers": two.workers,
        "workspace_bytes": FP32_BYTES * 2 * shape.heads * shape.group * shape.geometry.n_q * used.block_m,
    }


def _why(choice: Choice) -> dict[str, Any]:
    """The candidates with their formulas, and the decision as one expression."""
    import sympy

    from .schedule.symbolic import SYMBOLIC

    shape, costs, guarantee = choice.shape, choice.costs, choice.guarantee
    symbols = [sympy.Symbol(name, integer=True, positive=True) for name in SIZES]
    if shape.q_len == shape.kv_len:
        symbols[1] = symbols[0]
    symbolic = replace(shape, **dict(zip(SIZES, symbols, strict=True)))
    formulas = candidates(symbolic, costs, guarantee, SYMBOLIC)
    how = {name: getattr(shape, name) for name in ("group", "head_dim", "block_m", "block_n", "mask")}
    default = _place(choice.considered[0])
    return {
        "candidates": [
            {
                "family": c.family,
                "roles": c.roles or None,
                "heads_in_flight": c.heads_in_flight or None,
                "stride": c.stride or None,
                "default": _place(c) == default,
                "predicted_us": None if c.time.penalty else c.time.ns / 1000,
                "formula_ns": str(formula.time.ns),
                "applies_if": f"{formula.time.penalty} == 0",
            }
            for c, formula in ((choice.considered[index], formulas[index]) for index in _each_once(choice.considered))
        ],
        "piecewise": str(symbolic_choice(*symbols, **how, costs=costs, guarantee=guarantee)),
    }


def _place(candidate: Candidate) -> tuple[Any, ...]:
    return candidate.family, candidate.roles, candidate.heads_in_flight, candidate.stride


def _each_once(considered: Sequence[Candidate]) -> list[int]:
    """Positions of different candidates, where the first of its kind stood; with the least time, which is the one that counts."""
    best: dict[tuple[Any, ...], int] = {}
    for index, candidate in enumerate(considered):
        held = considered[best.setdefault(_place(candidate), index)].time
        if (candidate.time.penalty > 0, candidate.time.ns) < (held.penalty > 0, held.ns):
            best[_place(candidate)] = index
    return list(best.values())
