"""Executes every kernel that `make gates` compiles, packed sequences, masks and Gluon's functions, at small sizes: `make execute`.

One interleaving of each is executed with races; of a tenth, always the same, five, whose bits must agree, and the redundant
barriers of their main kernels are counted. Results are kept in build/execute, by Triton's version and the sources, and a run goes
on where the last one stopped. The last one writes benchmarks/results/executed. The exit status is 1 if a result is bad, 3 if cells
are left.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks import kept
from benchmarks.machine_code import gates
from dash_inductor.cli.arguments import at_least
from dash_inductor.cli.console import progress, table
from dash_inductor.codegen.mods import SCORE_MODS
from dash_inductor.devices import device
from dash_inductor.templates.tiles import GLUON_HEAD_DIMS, HALF_DTYPES, Template, dims_text

from . import mutants
from .cases import Case, Prepared, Result, same_bits, unexplained

ROOT = Path(__file__).parents[2]
RESULTS = kept.RESULTS / "executed"
WORKERS = 2  # processes
LENGTH, HEADS, SMS = 256, 2, 3  # few SMs: a worker has several chains
SEEDS, ONE_IN = 5, 10
BY_GLUON = {"kernel": "gluon", "template": "one_pass"}
# Masks that a graph makes, and packed sequences; sizes of three KV tiles, with which heads straddle the rounds of a round robin.
BY_GRAPHS: dict[str, dict[str, Any]] = {
    "varlen": {"attention": "varlen", "kv_heads": 1, "mask": "causal"},
    "masked": {"attention": "masked", "batch": 2, "kv_heads": 1, "mask": "causal"},
}
IN_A_QUEUE = {"q_len": 384, "kv_len": 384}
IN_PARTS = {"q_len": 384, "kv_len": 384, "kv_heads": 1, "in_bands": True}  # three KV tiles, in two bands
# FlexAttentions of the Gluon kernel: head dims of query and value, masks that hide something of so few positions, and sizes, by how
# chains are cut. Every function of codegen/mods.py is under every mask at all head dims, in the dtype and the sizes that a digest
# picks.
FUNCTION_DIMS = ((16, 16), (40, 40), (64, 64), (64, 128), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
FUNCTION_MASKS = ("none", "causal", "narrow", "documents")
CHAINS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch": {"batch": 2, "q_len": 384, "kv_len": 384},
    "in-sets": {"kv_heads": 1},
    "in-bands": IN_PARTS,
    "whole": {"kv_heads": 1, "guarantee": "batch"},
    "ragged": {"kv_heads": 1, "q_len": LENGTH - 33, "kv_len": LENGTH - 33},
}


def cells() -> dict[str, Case]:
    """Every case by its name, in an order without order: a part of it is a sample."""
    named = dict(_named())
    return {name: named[name] for name in sorted(named, key=_place)}


def tenth() -> dict[str, Case]:
    """The part that is executed five times."""
    return {name: case for name, case in cells().items() if in_tenth(name)}


def in_tenth(name: str) -> bool:
    """Whatever other cells there are."""
    return _place(name) < 2**256 // ONE_IN


def _place(name: str) -> int:
    return int(hashlib.sha256(name.encode()).hexdigest(), 16)


def _named() -> Iterator[tuple[str, Case]]:
    for cell in gates.cells():
        dims = str(cell.head_dim) + (f"/{cell.value_dim}" if cell.value_dim else "")
        few_sms = cell.template != Template.TWO_PASS and cell.shape in gates.SHAPES
        settings = dict(BY_GLUON) if cell.template == gates.GLUON else {"template": cell.template, "kernel": "triton"}
        settings |= _few_sms(cell.arch) if few_sms else {}
        case = _case(cell.arch, cell.dtype, cell.head_dim, settings, **_of_shape(cell.shape), value_dim=cell.value_dim)
        yield f"{cell.arch} {cell.template} {cell.dtype} d={dims} {cell.shape}", case
    for dtype in HALF_DTYPES:
        for arch in gates.DEVICES:
            for template, head_dim in ((template, q) for template, dims in gates.FLEX_HEAD_DIMS.items() for q, v in dims if q == v):
                for attention, sizes in BY_GRAPHS.items():
                    case = _case(arch, dtype, head_dim, {"template": template.value, "kernel": "triton"}, **sizes)
                    yield f"{arch} {template} {dtype} d={head_dim} {attention}", case
        for head_dim in GLUON_HEAD_DIMS:
            for attention, sizes in BY_GRAPHS.items():
                yield f"sm_90 gluon {dtype} d={head_dim} {attention}", _case("sm_90", dtype, head_dim, BY_GLUON, **sizes)
            for mask, family in (("full", "shift_round_robin"), ("causal", "symmetric_round_robin")):
                case = _case("sm_90", dtype, head_dim, BY_GLUON | {"schedule": family} | _few_sms("sm_90"), mask=mask, **IN_A_QUEUE)
                yield f"sm_90 gluon {dtype} d={head_dim} {mask}-in-a-queue", case
    yield from with_functions()


def with_functions() -> Iterator[tuple[str, Case]]:
    """FlexAttentions of the Gluon kernel by their names."""
    picked = [*product(HALF_DTYPES, CHAINS)]
    for (head_dim, value_dim), score_mod, mask_mod in product(FUNCTION_DIMS, SCORE_MODS, FUNCTION_MASKS):
        name = f"d={dims_text(head_dim, value_dim)} {score_mod}-{mask_mod}"
        dtype, chains = picked[_place(name) % len(picked)]
        sizes = {"score_mod": score_mod, "mask_mod": mask_mod, "value_dim": value_dim} | CHAINS[chains]
        settings = BY_GLUON | {"guarantee": sizes.pop("guarantee", "run")}
        yield f"sm_90 gluon {dtype} {name}-{chains}", _case("sm_90", dtype, head_dim, settings, **sizes)


def _case(arch: str, dtype: str, head_dim: int, settings: dict[str, Any], **sizes: Any) -> Case:
    sizes = {"q_len": LENGTH, "kv_len": LENGTH} | sizes
    return Case(gates.DEVICES[arch], **sizes, heads=HEADS, head_dim=head_dim, dtype=dtype, settings=settings)


def _few_sms(arch: str) -> dict[str, Any]:
    return {"sm_reserve": device(gates.DEVICES[arch]).sms - SMS}


def _of_shape(shape: str) -> dict[str, Any]:
    """A shape of the gates at our sizes."""
    if flex := gates.ALL_FLEX_SHAPES.get(shape):
        return dict(flex) | (IN_PARTS if shape == gates.IN_PARTS else {})
    ours = {"kv_heads": HEADS // 2, "q_len": LENGTH - 33, "kv_len": LENGTH - 33}
    return {name: ours.get(name, value) for name, value in (gates.SHAPES | gates.GLUON_DROPOUT)[shape].items()}


def executed(case: Case, seeds: int, races: bool, barriers: bool = False) -> dict[str, Any]:
    """What came of it; `bad` says what is wrong, and is empty if nothing is.

    races: whether the first seed looks for them. barriers: whether to search the main kernel for redundant ones.
    """
    start = time.perf_counter()
    try:
        prepared = Prepared(case)
        results = [prepared.run(seed, check=races and not seed) for seed in range(seeds)]
        made = _found(prepared, results) | {"races": races, "seeds": seeds, "steps": prepared.steps * seeds}
        if barriers and not made["bad"]:
            made["barriers"] = len(mutants.barriers(prepared))
            made["redundant"] = [site.text for site in mutants.redundant_barriers(prepared)]
    except Exception as error:  # a cell must not end the run: what Triton, Inductor and the executor raise has no common class
        made = {"bad": [f"{type(error).__name__}: {error}"]}
    return made | {"seconds": round(time.perf_counter() - start, 1)}


def _found(prepared: Prepared, results: list[Result]) -> dict[str, Any]:
    bad = [result.fault for result in results if result.fault]
    races = [race for result in results for race in result.races]
    bad += [f"race: {race['kind']} in {race['kernel']} at {race['at']}" for race in unexplained(races)]
    largest = max((off for result in results for off in result.errors.values()), default=0.0)
    if any(mutants.is_wrong(prepared, result) for result in results):
        bad.append(f"an error of {largest:.1e} of the largest gradient")
    if not bad and not same_bits(results):
        bad.append("another interleaving gives other bits")
    return {"bad": [*dict.fromkeys(bad)], "error": largest, "unfenced": len(races) > len(unexplained(races))}


def fingerprint() -> str:
    """A digest of the sources that results depend on."""
    made = hashlib.sha256()
    for folder in ("dash_inductor", "lowering", "templates", "benchmarks/machine_code", "tests/ptx"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".jinja", ".toml") and not path.name.startswith("test_"):
                made.update(path.read_bytes())
    return made.hexdigest()[:12]


def run(todo: dict[str, Case], log: Path, minutes: float, races: bool) -> dict[str, dict[str, Any]]:
    """The results of all cells that have one: those in the log, one JSON a line, and those that begin within `minutes`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    lines = log.read_text().splitlines() if log.exists() else []
    done = {row["cell"]: row for row in map(json.loads, lines)}
    left, end = [name for name in todo if name not in done], time.monotonic() + 60 * minutes
    if not left or minutes <= 0:
        return {name: done[name] for name in todo if name in done}
    spawn = multiprocessing.get_context("spawn")
    step = progress(len(left))
    with ProcessPoolExecutor(WORKERS, spawn, torch.set_num_threads, (1,)) as pool, open(log, "a") as file:
        running: dict[Future[dict[str, Any]], str] = {}
        while left or running:
            while left and len(running) < WORKERS:
                name = left.pop(0)
                of_tenth = in_tenth(name)
                # Without a model of tensor memory's races, sm_100's barriers cannot be judged.
                barriers = races and of_tenth and not name.startswith("sm_100")
                running[pool.submit(executed, todo[name], SEEDS if of_tenth else 1, races or of_tenth, barriers)] = name
            for ended in wait(running, return_when=FIRST_COMPLETED).done:
                name = running.pop(ended)
                step(name)
                done[name] = {"cell": name} | ended.result()
                print(json.dumps(done[name]), file=file, flush=True)
                for text in done[name]["bad"]:
                    print(f"{name}: {text}", file=sys.stderr, flush=True)
            if time.monotonic() > end:
                left.clear()
    return {name: done[name] for name in todo if name in done}


def kernels_of(name: str) -> str:
    """The line of the summary that a cell is in."""
    arch, template = name.split()[:2]
    return f"{arch}, Gluon" if template == gates.GLUON else arch


def summary(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each architecture and kernel."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for name, row in sorted(results.items()):
        groups.setdefault(kernels_of(name), []).append(row)
    return [
        {
            "kernels": group,
            "cells": len(rows),
            "bad": sum(bool(row["bad"]) for row in rows),
            "with races": sum(row.get("races", False) for row in rows),
            "fence left out": sum(row.get("unfenced", False) for row in rows),
            "steps": sum(row.get("steps", 0) for row in rows),
            "seconds": round(sum(row["seconds"] for row in rows)),
            **{f"error, {dtype}": f"{max(_errors(rows, dtype), default=0.0):.1e}" for dtype in HALF_DTYPES},
            "bar.sync": sum(row.get("barriers", 0) for row in rows),
            "redundant": sum(len(row.get("redundant", ())) for row in rows),
        }
        for group, rows in groups.items()
    ]


def _errors(rows: list[dict[str, Any]], dtype: str) -> list[float]:
    return [row.get("error", 0.0) for row in rows if f" {dtype} " in row["cell"]]


def write(triton: str, rows: list[dict[str, Any]]) -> Path:
    """The lines of a summary in the CSV file that docs/executions.md shows, with the commit; others stay there."""
    commit, changed = map(_git, ("describe --always", "diff --stat HEAD -- . :!benchmarks/results"))
    commit += "-dirty" if changed else ""
    path = RESULTS / f"triton-{triton}.csv"
    lines: dict[str, dict[str, Any]] = {row["kernels"]: row for row in kept.rows_of(path)} if path.exists() else {}
    lines |= {row["kernels"]: {"triton": triton, **row, "commit": commit} for row in rows}
    kept.write(path, list(lines.values()))
    return path


def _git(command: str) -> str:
    return subprocess.run(["git", *command.split()], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def main() -> int:
    """0: all right; 1: something is bad; 3: cells are left."""
    import triton

    parser = argparse.ArgumentParser(prog="python -m tests.ptx.cells", description=__doc__)
    parser.add_argument("--values", action="store_true", help="races are looked for in the tenth alone")
    parser.add_argument("--kernels", choices=sorted({*map(kernels_of, cells())}), help="only those of one line of the summary")
    parser.add_argument("--minutes", type=at_least(1), default=90, metavar="N", help="begins no cell later than that (default 90)")
    args = parser.parse_args()
    todo = {name: case for name, case in cells().items() if args.kernels in (None, kernels_of(name))}
    log = ROOT / "build" / "execute" / f"{triton.__version__}-{fingerprint()}{'-values' if args.values else ''}.jsonl"
    results = run(todo, log, args.minutes, not args.values)
    rows = summary(results)
    table(f"Executed, Triton {triton.__version__}", rows)
    bad = sum(bool(row["bad"]) for row in results.values())
    print(f"\n{len(results)} of {len(todo)} cells executed, {bad} bad: {log.relative_to(ROOT)}")
    if len(results) == len(todo):
        print(f"Written: {write(triton.__version__, rows).relative_to(ROOT)}")
    return 1 if bad else 3 if len(results) < len(todo) else 0


if __name__ == "__main__":
    sys.exit(main())
