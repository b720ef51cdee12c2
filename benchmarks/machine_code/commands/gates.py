"""Compiles the kernels of the tile tables for GPUs that need not be there, and names the rules that their machine code breaks.

Rules are, for example: nothing spills to memory, matrix instructions are asynchronous, an SM holds as many CTAs as the schedule
counts on. All kernels take three quarters of an hour; select some by the options. The exit status is 1 if a rule is broken.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from dash_inductor.cli.arguments import add_json
from dash_inductor.cli.console import CommandError, print_json, progress, table
from dash_inductor.templates.tiles import GLUON_HEAD_DIMS, ONE_PASS_HEAD_DIM, dims_text

from ..gates import CHOICES, Cell, cells, judged, predicted_cycles

EXAMPLES = ("--arch sm_90 --dtype bf16 --head-dim 128", "--arch sm_80 --template two_pass --head-dim 64 --json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `gates`."""
    for name in ("arch", "template", "dtype", "shape", "head_dim"):
        choices = CHOICES[name]
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            choices=choices,
            type=type(choices[0]),
            metavar="X",
            action="append",
            help=f"only X (repeatable), one of {', '.join(map(str, choices))}",
        )
    parser.add_argument("--no-cycles", action="store_true", help="leave out the estimate of cycles, which takes half the time")
    add_json(parser)


# What the table shows, by its name among the figures; the JSON has every figure.
COLUMNS = {
    "tile": "tile",
    "registers": "registers",
    "shared bytes": "shared_bytes",
    "CTAs per SM": "ctas_per_sm",
    "loop": "instructions_in_loop",
    "stock loop": "stock_instructions",
    "local in loop": "local_in_loop",
    "copies ahead": "copies_ahead",
}


def _line(cell: Cell, row: Mapping[str, Any]) -> dict[str, Any]:
    figures = {column: row.get(name) for column, name in COLUMNS.items()}
    judgement = "; ".join(row["gates"]) or "pass"
    return {"kernel": _name(cell), **figures, "cycles (estimate)": predicted_cycles(row), "gates": judgement}


def _name(cell: Cell) -> str:
    dims = dims_text(cell.head_dim, cell.value_dim or cell.head_dim)
    return f"{cell.arch} {cell.template} {cell.dtype} d={dims} {cell.shape}"


def main(args: argparse.Namespace) -> int:
    """Compile and judge; the exit code is 1 if a gate is violated."""
    import triton

    todo = cells(**{name: values for name in CHOICES if (values := getattr(args, name))})
    if not todo:
        *some, last = map(str, GLUON_HEAD_DIMS)
        gluon = f"Gluon is for sm_90 and head dims {', '.join(some)} and {last}"
        raise CommandError(f"no kernel has all that was asked for: one pass takes head dims up to {ONE_PASS_HEAD_DIM}, {gluon}")
    rows: list[dict[str, Any]] = []
    step = progress(len(todo))
    for cell in todo:
        step(_name(cell))
        rows.append(judged(cell, replayed=not args.no_cycles))
    failed = sum(bool(row["gates"]) for row in rows)
    if args.json:
        print_json({"triton": triton.__version__, "rows": rows})
    else:
        table("Kernels", list(map(_line, todo, rows)))
        print(f"\nTriton {triton.__version__}: {failed} of {len(rows)} kernels break a rule")
    return 1 if failed else 0
