"""What became of the attentions of each family and case, as a table that a run prints and benchmarks/results/models keeps."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
RESULTS = Path(__file__).parents[1] / "results" / "models"
COUNT, VERSION = "rewritten of called", "transformers"


def keep(rows: Sequence[Row]) -> None:
    """Write the rows to the file of this torch."""
    lines = [line(row) | {COUNT: _count(row), VERSION: version("transformers")} for row in rows]
    with (RESULTS / f"torch-{version('torch').partition('+')[0]}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*lines[0]], lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def line(row: Row) -> dict[str, str]:
    """A row as it is shown.

    error: of the worst gradient of a parameter against float64, relative to the largest element; in brackets, that of fp32 with
    attention written out. bits: of all gradients, in two interleavings of the CTAs.
    """
    shown = {"family": row["family"], "case": row["case"]}
    rest = dict.fromkeys(("calls", "decided on", "rewritten", "declined", "error", "bits"), "")
    if said := row.get("failure", row.get("left_out")):
        return shown | rest | {"declined": f"failed: {said}" if "failure" in row else f"not run: {said}"}
    different = len(row["different_bits"])
    return shown | {
        "calls": str(row["calls"]),
        "decided on": str(row["decisions"]),
        "rewritten": ", ".join(f"{count} {_mask(mask)}" for mask, count in row["rewritten"].items()),
        "declined": "; ".join(f"{count}: {reason}" for reason, count in row["declined"].items()),
        "error": f"{row['error']:.0e}" + ("" if row["eager_error"] is None else f" ({row['eager_error']:.0e})"),
        "bits": f"{different} gradients differ" if different else "equal",
    }


def _mask(mask: str) -> str:
    return "by a mask" if mask == "block_mask" else mask


def _count(row: Row) -> str:
    if "failure" in row:
        return "failed"
    return "no dropout" if "left_out" in row else f"{sum(row['rewritten'].values())} of {row['calls']}"
