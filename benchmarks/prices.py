"""Who gets which kernel, and at what price, as `resolve` decides at the level run: a table.

Prices are TFLOPS of the main kernel at lengths that keep all SMs busy, measured where the cost file and dash_inductor/devices/
stock_kernels.py say so, and else estimated. The ratio is our time over stock's; below 1 ours is faster.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dash_inductor.cli.console import table
from dash_inductor.config import Config
from dash_inductor.decision import Kernel, LeftToStock, Stock
from dash_inductor.devices import DEVICES, device
from dash_inductor.devices.stock_kernels import Speed
from dash_inductor.devices.target import Target
from dash_inductor.dropout import FLASH, OPERATIONS, Dropout
from dash_inductor.problem import BLOCK_MASK, Problem
from dash_inductor.resolve import resolve
from dash_inductor.resolve.prices import of_one_pass, of_stock, of_two_passes

BATCH, HEADS, LENGTH = 2, 32, 16384
FLEX = Stock(Kernel.FLEX, strict=True)
STRICT, EFFICIENT = Stock(Kernel.FLASH, strict=True), Stock(Kernel.EFFICIENT, strict=True)
BLOCKS = {"block_size": (128, 128)}
# How many operations the functions of codegen/mods.py do, as the pass counts them.
ALIBI, SOFT_CAP, MASK = 10, 55, 4


@dataclass(frozen=True)
class Kind:
    """Attentions that differ in the head dim alone."""

    name: str
    mask: str
    stock: Stock
    dtype: str = "bf16"
    head_dims: Sequence[int] = (32, 64, 96, 128)
    others: dict[str, Any] = field(default_factory=dict)
    length: int = LENGTH

    def problem(self, head_dim: int, heads: int = HEADS, length: int | None = None, batch: int = BATCH) -> Problem:
        """One of them."""
        length = length or self.length
        sizes = (batch, heads, heads, length, length, head_dim, self.dtype)
        others = self.others | (BLOCKS if self.mask == BLOCK_MASK else {})
        return Problem(self.mask, *sizes, stock=self.stock, is_flex=self.stock is FLEX, **others)


# Sequences short enough for bits that the Gluon kernel takes.
DROPPED: dict[str, Any] = {"others": {"function_ops": OPERATIONS[FLASH], "dropout": Dropout(0.1, FLASH)}, "length": LENGTH // 4}
FA3 = Stock(Kernel.FLASH, strict=True, implementation="FA3", called=True)  # its op, called with deterministic=True
FA4 = Stock(Kernel.FLASH, strict=True, implementation="FA4")  # of torch's registry


KINDS = (
    Kind("SDPA", "full", STRICT),
    Kind("SDPA, causal", "causal", STRICT),
    Kind("SDPA in fp16, causal", "causal", STRICT, "fp16"),
    Kind("SDPA with dropout, causal", "causal", STRICT, **DROPPED),
    Kind("SDPA under masks", BLOCK_MASK, EFFICIENT, others={"function_ops": MASK}),
    Kind("packed sequences", BLOCK_MASK, STRICT, others={"function_ops": MASK}),
    Kind("FlexAttention", "full", FLEX),
    Kind("FlexAttention, causal", "causal", FLEX, others={"function_ops": 1}),
    Kind("FlexAttention in fp16, causal", "causal", FLEX, "fp16", others={"function_ops": 1}),
    Kind("FlexAttention, documents or a window", BLOCK_MASK, FLEX, others={"function_ops": MASK}),
    Kind("FlexAttention, ALiBi", "full", FLEX, others={"function_ops": ALIBI, "changes_scores": True}),
    Kind("FlexAttention, ALiBi, causal", BLOCK_MASK, FLEX, others={"function_ops": ALIBI, "changes_scores": True}),
    Kind("FlexAttention, soft-cap, window", BLOCK_MASK, FLEX, others={"function_ops": SOFT_CAP + MASK, "changes_scores": True}),
    Kind("FA3 with deterministic=True, causal", "causal", FA3, head_dims=(64, 128)),
    Kind("FA3 with deterministic=True, a window", BLOCK_MASK, FA3, head_dims=(64, 128), others={"function_ops": MASK}),
    Kind("SDPA with FA4 active, full", "full", FA4, head_dims=(64, 128)),
    Kind("SDPA with FA4 active, causal", "causal", FA4, head_dims=(64, 128)),
)


@dataclass(frozen=True)
class Row:
    """What one attention gets, and the prices."""

    kind: str
    head_dim: int
    kernel: str
    ours: Speed
    stock: Speed | None

    @property
    def ratio(self) -> float | None:
        """Our time over stock's."""
        return self.stock.tflops / self.ours.tflops if self.stock else None

    @property
    def is_left(self) -> bool:
        """Whether stock's kernel keeps it."""
        return self.kernel == STOCK


STOCK = "stock's"


def row(name: str, problem: Problem, target: Target) -> Row:
    """What `resolve` says of an attention; of one that it leaves to stock, our fastest kernel."""
    stock = of_stock(problem, target)
    try:
        found, kernel = resolve(problem, Config(), target), ""
    except LeftToStock:
        found, kernel = resolve(problem, Config(template="one_pass"), target), STOCK
    prices = {}
    if found.one_pass:
        prices["one pass, " + found.kernel.capitalize()] = of_one_pass(problem, target, found.one_pass, found.kernel)
    if found.two_pass or kernel == STOCK:
        prices["two passes, Triton"] = of_two_passes(problem, target)
    best = max(prices, key=lambda name: prices[name].tflops)
    return Row(name, problem.head_dim, kernel or best, prices[best], stock)


def rows(key: str) -> Iterator[Row]:
    """A row for each kind and head dim, on a GPU of the package's cost files."""
    known = device(key)
    for kind in KINDS:
        for head_dim in kind.head_dims:
            yield row(kind.name, kind.problem(head_dim), Target(key, known.arch, known.sms))


def line(row: Row) -> dict[str, object]:
    """The row as a line of the table."""
    ratio = "not known" if row.ratio is None else f"{row.ratio:.2f}"
    stock = "" if row.stock is None else f"{row.stock.tflops:.0f}"
    own = {"attention": row.kind, "d": row.head_dim, "takes": row.kernel}
    return own | {"ours": f"{row.ours.tflops:.0f}", "stock": stock, "ours/stock, time": ratio}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prices", description=__doc__)
    parser.add_argument("device", nargs="*", help=f"of {', '.join(DEVICES)}; h100 and h200 by default")
    names: dict[tuple[Row, ...], list[str]] = {}
    keys = parser.parse_args(argv).device or ["h100", "h200"]
    if unknown := [key for key in keys if key not in DEVICES]:
        parser.error(f"no device {unknown[0]!r}: {', '.join(DEVICES)}")
    for key in keys:
        names.setdefault(tuple(rows(key)), []).append(device(key).name)
    for found, of in names.items():
        table(f"{' and '.join(of)}: who takes what, TFLOPS", [line(row) for row in found])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
