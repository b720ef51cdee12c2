"""What became of the attentions of each family and case, as a table that a run prints and benchmarks/results/models keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from ..kept import RESULTS, write

Row = Mapping[str, Any]
COUNT, VERSION = "rewritten of called", "transformers"


def keep(rows: Sequence[Row]) -> None:
    """Write the rows to the file of this torch."""
    lines = [line(row) | {COUNT: _count(row), VERSION: version("transformers")} for row in rows]
    write(RESULTS / "models" / f"torch-{version('torch').partition('+')[0]}.csv", lines)


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
