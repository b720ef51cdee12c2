"""The `gates` command: every kernel of the tile tables, compiled, and the rules that it breaks."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from ..inspection.gates import DEVICES, FLEX_SHAPES, HEAD_DIMS, SHAPES, cells, judged, predicted_cycles
from ..templates.tiles import HALF_DTYPES, ONE_PASS_HEAD_DIM, Template, dims_text
from .console import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `gates`."""
    for name, choices in (
        ("arch", DEVICES),
        ("template", (Template.ONE_PASS.value, Template.TWO_PASS.value)),
        ("dtype", HALF_DTYPES),
        ("shape", (*SHAPES, *FLEX_SHAPES)),
    ):
        parser.add_argument(f"--{name}", choices=choices, action="append", help="only this (repeatable)")
    parser.add_argument("--head-dim", choices=HEAD_DIMS, type=int, action="append", help="only this (repeatable)")
    parser.add_argument("--json", action="store_true", help="every figure, as JSON")


# What the table shows; the JSON has every figure.
COLUMNS = (
    *("arch", "template", "dtype", "head_dim", "value_dim", "shape", "tile"),
    *("registers", "shared_bytes", "ctas_per_sm", "instructions_in_loop", "stock_instructions", "local_in_loop", "copies_ahead"),
)


def _line(row: Mapping[str, Any]) -> dict[str, Any]:
    judgement = "; ".join(row["gates"]) or "pass"
    return {name: row.get(name) for name in COLUMNS} | {"cycles (estimate)": predicted_cycles(row), "gates": judgement}


def main(args: argparse.Namespace) -> int:
    """Compile and judge; the exit code is 1 if a gate is violated."""
    import triton

    asked = {f"{name}s": getattr(args, name) for name in ("arch", "template", "dtype", "shape", "head_dim")}
    todo = cells(**{name: values for name, values in asked.items() if values})
    if not todo:
        problem = f"nothing has all that was asked for: one pass takes head dims to {ONE_PASS_HEAD_DIM}"
        print(f"python -m dash_inductor gates: error: {problem}", file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    for n, cell in enumerate(todo, 1):
        dims = dims_text(cell.head_dim, cell.value_dim or cell.head_dim)
        progress = f"[{n}/{len(todo)}] {cell.arch} {cell.template} {cell.dtype} d={dims} {cell.shape}"
        print(progress, file=sys.stderr, flush=True)
        rows.append(judged(cell))
    failed = sum(bool(row["gates"]) for row in rows)
    if args.json:
        print(json.dumps({"triton": triton.__version__, "rows": rows}, indent=2))
    else:
        title = f"Triton {triton.__version__}: {failed} of {len(rows)} kernels break a rule"
        table(title, [_line(row) for row in rows])
        print(title)
    return 1 if failed else 0
