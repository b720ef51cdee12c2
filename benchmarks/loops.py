"""Keeps what `gates --json` says of an H100's main loops, by Triton, and writes the tables of docs/kernel-figures.md.

    make figures                                the loops compiled by each Triton, kept, and the page
    python -m benchmarks.loops FILE.json...     what `gates --json` printed, kept

A row of benchmarks/results/loops is a kernel: figures of its machine code, the cycles of a step by the replay, loop by loop, and
what these cycles are made of, in all of its loops together.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine_code.gates import FLEX_SHAPES, GLUON, IN_PARTS, SHAPES, predicted_cycles
from benchmarks.machine_code.rules import STOCK_ELEMENTS
from dash_inductor.templates.tiles import Template, dims_text

from .kept import RESULTS, rows_of, write
from .markdown import markdown

FOLDER = RESULTS / "loops"
FIGURES = ("tile", "instructions_in_loop", "local_in_loop", "registers", "shared_bytes", "stock_instructions")
# Parts of a step's cycles: in which the tensor cores work, and what they wait for most.
TENSOR, REST = "tensor cores", "the rest"
CAUSES = ("shared memory of matmuls", "issue", "mufu", "fence", "barrier", "additions")
NAMES = {  # of attentions
    "full": "full",
    "causal": "causal",
    "causal-ragged-gqa": "causal, ragged, GQA",
    "causal-dynamic-gqa": "causal, dynamic, GQA",
    "full-dropout": "full, dropout",
    "causal-dropout": "causal, dropout",
    "flex-documents": "mask in blocks",
    "flex-in-parts": "mask in blocks, in parts",
    "flex": "none, no mask",
    "flex-causal": "none, causal",
    "flex-window-soft-cap": "soft-cap, window",
    "flex-documents-alibi": "ALiBi, documents",
}
Row = Mapping[str, str]


def kept(triton: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of `gates --json` as one of the results."""
    loops = row["predicted_cycles"] or []
    exposed = [(cause, clocks) for loop in loops for cause, clocks in loop["exposed"].items()]
    causes = {cause: sum(clocks for name, clocks in exposed if name == cause) for cause in CAUSES}
    causes[REST] = sum(clocks for name, clocks in exposed if name not in CAUSES)
    return {
        "triton": triton,
        "template": row["template"],
        "head dim": dims_text(row["head_dim"], row["value_dim"] or row["head_dim"]),
        "shape": row["shape"],
        **{name: row[name] for name in FIGURES},
        "cycles": predicted_cycles(row),
        TENSOR: round(sum(loop["tensor_cycles"] for loop in loops)),
        **{cause: round(clocks) for cause, clocks in causes.items()},
    }


def results() -> list[Row]:
    """The rows that are kept, of one Triton after the other."""
    return [row for file in sorted(FOLDER.glob("triton-*.csv")) for row in rows_of(file)]


def kernel(row: Row) -> tuple[str, str, str]:
    """Which kernel a row is of, whatever the Triton."""
    return row["template"], row["head dim"], row["shape"]


def table(of: str) -> str:
    """The text of a block `loops`, of TABLES: a line per kernel, with the figures of all Tritons, or one where they agree."""
    is_in, line = TABLES[of]
    lines: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in results():
        if is_in(row):
            lines.setdefault(kernel(row), []).append(line(row))
    return markdown([{name: _joined([each[name] for each in of_one]) for name in of_one[0]} for of_one in lines.values()])


def _joined(figures: Sequence[str]) -> str:
    return figures[0] if len(set(figures)) == 1 else " / ".join(figures)


def _figures(row: Row) -> dict[str, str]:
    return {
        "head dim": row["head dim"],
        "attention": NAMES[row["shape"]],
        "cycles (estimate)": row["cycles"],
        "instructions": row["instructions_in_loop"],
        "local accesses": row["local_in_loop"],
        "registers": row["registers"],
        "shared memory": row["shared_bytes"],
    }


def _beside_stock(row: Row) -> dict[str, str]:
    block_m, block_n, _ = map(int, row["tile"].split("x"))
    of_as_many = int(row["instructions_in_loop"]) * STOCK_ELEMENTS / (block_m * block_n)
    figures = _figures(row) | {"stock's": row["stock_instructions"], "share": f"{of_as_many / int(row['stock_instructions']):.2f}"}
    names = ("cycles (estimate)", "share", "instructions", "stock's", "local accesses", "registers")
    return {"head dim": row["head dim"], "score_mod, mask": NAMES[row["shape"]]} | {name: figures[name] for name in names}


def _causes(row: Row) -> dict[str, str]:
    cell = {
        "kernel": "Gluon" if row["template"] == GLUON else "Triton",
        "head dim": row["head dim"],
        "attention": NAMES[row["shape"]],
    }
    return cell | {name: row[name] for name in (TENSOR, *CAUSES, REST)}


# By name: which rows are in a table, and what a line shows of one.
TABLES: dict[str, tuple[Callable[[Row], bool], Callable[[Row], dict[str, str]]]] = {
    "one pass": (lambda row: row["template"] == Template.ONE_PASS and row["shape"] in (*SHAPES, IN_PARTS), _figures),
    "gluon": (lambda row: row["template"] == GLUON, _figures),
    "two passes": (lambda row: row["template"] == Template.TWO_PASS and row["shape"] in SHAPES, _figures),
    "flex": (lambda row: row["template"] == Template.ONE_PASS and row["shape"] in FLEX_SHAPES, _beside_stock),
    "causes": (
        lambda row: row["triton"] == "3.7.1" and row["template"] != Template.TWO_PASS and row["shape"] not in FLEX_SHAPES,
        _causes,
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the rows of each file into the CSV of its Triton, whose rows of other kernels stay."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loops", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json", help="what `gates --json` printed, of one Triton")
    for file in parser.parse_args(arguments).files:
        printed = json.loads(file.read_text())
        path = FOLDER / f"triton-{printed['triton']}.csv"
        rows: dict[tuple[str, ...], Any] = {kernel(row): row for row in rows_of(path)} if path.exists() else {}
        rows |= {kernel(row): row for row in (kept(printed["triton"], row) for row in printed["rows"])}
        own = [_of_head_dim(row) for row in rows.values()]
        write(path, sorted(rows.values(), key=lambda row: own.index(_of_head_dim(row))))


def _of_head_dim(row: Row) -> tuple[str, str]:
    return row["template"], row["head dim"].partition("/")[0]


if __name__ == "__main__":
    main()
