"""Rows as CSV and as tables."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]

COUNTS = ("calls", "rewritten", "declined", "not_seen")
OTHER_COUNTS = ("left_to_stock", "third_party")  # of those that are declined, and of all that were decided on
LISTS = ("reasons", "written_out")  # counts, by what they count
COLUMNS = ("library", "model", "case", *COUNTS, "reasons", *OTHER_COUNTS, "remedies", "written_out", "stopped", "failure")


def key_of(row: Row) -> tuple[str, str, str]:
    """What a row is of."""
    return row["library"], row["model"], row["case"]


def csv_of(rows: Sequence[Row]) -> str:
    """A line per row; reasons are told as "reason (count); ...", remedies in the order of their reasons."""
    text = io.StringIO()
    lines = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    lines.writeheader()
    for row in rows:
        shown = {name: "" if row.get(name) is None else row[name] for name in COLUMNS}
        for name in LISTS:
            shown[name] = "; ".join(f"{what} ({count})" for what, count in row.get(name, {}).items())
        lines.writerow(shown | {"remedies": "; ".join(str(one) for one in row.get("remedies", {}).values())})
    return text.getvalue()


def read(file: Path) -> list[dict[str, Any]]:
    """The rows of a CSV, its counts as numbers; those of a case that failed have none."""
    with file.open(newline="") as lines:
        rows: list[dict[str, Any]] = list(csv.DictReader(lines))
    return [{name: int(text) if name in (*COUNTS, *OTHER_COUNTS) and text else text for name, text in row.items()} for row in rows]


def line(row: Row) -> dict[str, str]:
    """A row as the terminal shows it."""
    said = f"failed: {row['failure']}" if row.get("failure") else "; ".join(row["reasons"])
    return {name: str(row.get(name, "")) for name in ("library", "model", "case", *COUNTS)} | {"why": said}


def totals(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Calls by library and of all, and what became of them; models of which all is rewritten; cases that failed."""
    libraries = list(dict.fromkeys(row["library"] for row in rows))
    return [_total(name, [row for row in rows if row["library"] == name]) for name in libraries] + [_total("all", rows)]


def _total(name: str, rows: Sequence[Row]) -> dict[str, str]:
    count: Counter[str] = Counter()
    for row in rows:
        count.update({one: row[one] for one in COUNTS if not failed(row)})
    models = {row["model"] for row in rows if not failed(row)}
    parted = {row["model"] for row in rows if not failed(row) and row["rewritten"] != row["calls"]}
    shares = {one: f"{count[one]} ({100 * count[one] / max(count['calls'], 1):.0f} %)" for one in COUNTS[1:]}
    whole = f"{len(models - parted)} of {len(models)}"
    return {"library": name, "calls": str(count["calls"]), **shares, "models whole": whole, "failed": str(sum(map(failed, rows)))}


def reasons(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Why calls were declined, the most common reason first."""
    count: Counter[str] = Counter()
    for row in rows:
        count.update(row.get("reasons") or {})
    return [{"calls": str(number), "reason": reason} for reason, number in count.most_common()]


def failed(row: Row) -> bool:
    """Whether the row says what went wrong, and has no figures."""
    return bool(row.get("failure"))
