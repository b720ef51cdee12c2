"""Rows as CSV and as tables."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dash_inductor.config import GLUON

from ..kept import rows_of, write

Row = Mapping[str, Any]

COUNTS = ("calls", "rewritten", "declined", "not_seen")
OTHER_COUNTS = ("left_to_stock", "third_party")  # of those that are declined, and of all that were decided on
LISTS = ("kernels", "not_gluon", "reasons", "written_out")  # counts, by what they count
BETWEEN_REMEDIES = " | "
BY_PRICE, FEW_CHAINS = "by price", "by size: two passes are faster for so few chains"  # why it is not the Gluon kernel
MANY_CHAINS = "Gluon, of many chains"
COUNTED = re.compile(r"(.+?) \((\d+)\)(?:; |$)")
COLUMNS = (
    "library",
    "model",
    "case",
    *COUNTS,
    "kernels",
    "not_gluon",
    "reasons",
    *OTHER_COUNTS,
    "remedies",
    "written_out",
    "stopped",
    "failure",
    "better",
    "version",
)


def key_of(row: Row) -> tuple[str, str, str]:
    """What a row is of."""
    return row["library"], row["model"], row["case"]


def keep(rows: Sequence[Row], file: Path) -> None:
    """Write a CSV. What is counted is told as "reason (count); ...", and remedies stand in the order of their reasons."""
    lines = []
    for row in rows:
        shown = {name: "" if row.get(name) is None else row[name] for name in COLUMNS}
        shown |= {name: "; ".join(f"{what} ({count})" for what, count in row.get(name, {}).items()) for name in LISTS}
        lines.append(shown | {"remedies": BETWEEN_REMEDIES.join(row["remedies"][why] for why in row.get("reasons", {}))})
    write(file, lines)


def read(file: Path) -> list[dict[str, Any]]:
    """The rows of a CSV as they were measured; those of a case that failed have no figures."""
    return list(map(_of_text, rows_of(file)))


def _of_text(row: Mapping[str, str]) -> dict[str, Any]:
    counts = {name: int(row[name]) for name in (*COUNTS, *OTHER_COUNTS) if row.get(name)}
    lists = {name: {what: int(count) for what, count in COUNTED.findall(row.get(name, ""))} for name in LISTS}
    remedies = dict(zip(lists["reasons"], row.get("remedies", "").split(BETWEEN_REMEDIES), strict=False))
    return {**row, **lists, **counts, "remedies": remedies}


def line(row: Row) -> dict[str, str]:
    """A row as the terminal shows it."""
    said = f"failed: {row['failure']}" if row.get("failure") else "; ".join(row["reasons"])
    return {name: str(row.get(name, "")) for name in ("library", "model", "case", *COUNTS)} | {"why": said}


def totals(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Calls by library and of all, and what became of them; models of which all is rewritten; cases that have no figures."""
    libraries = list(dict.fromkeys(row["library"] for row in rows))
    return [*(_total(name, [row for row in rows if row["library"] == name]) for name in libraries), _total("all", rows)]


def _total(name: str, rows: Sequence[Row]) -> dict[str, str]:
    known = [row for row in rows if not failed(row)]
    count = {one: sum(row[one] for row in known) for one in COUNTS}
    models, in_part = ({row["model"] for row in known if row["rewritten"] < row["calls"] or whole} for whole in (True, False))
    shares = {one.replace("_", " "): f"{count[one]} ({100 * count[one] / max(count['calls'], 1):.0f} %)" for one in COUNTS[1:]}
    whole = f"{len(models - in_part)} of {len(models)}"
    return {"library": name, "calls": str(count["calls"]), **shares, "models whole": whole, "failed": str(len(rows) - len(known))}


def by_kernel(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Rewritten calls by library that has some, and of all: by their kernel, and how many take Gluon where chains are many."""
    libraries = list(dict.fromkeys(row["library"] for row in rows if row.get("rewritten")))
    parts = {name: [row for row in rows if row["library"] == name] for name in libraries} | {"all": rows}
    kernels = sorted(_sum(rows, "kernels"))
    return [_of_kernels(name, part, kernels) for name, part in parts.items()]


def _of_kernels(name: str, rows: Sequence[Row], kernels: Sequence[str]) -> dict[str, str]:
    count, gluon = _sum(rows, "kernels"), sum(map(by_gluon, rows))
    return {
        "library": name,
        "rewritten": str(count.total()),
        **{kernel.replace("_", " "): str(count[kernel]) for kernel in kernels},
        MANY_CHAINS: f"{gluon} ({100 * gluon / max(count.total(), 1):.0f} %)",
    }


def by_gluon(row: Row) -> int:
    """How many calls take the Gluon kernel where chains are many: longer sequences, larger batches, more heads."""
    here = sum(count for kernel, count in row.get("kernels", {}).items() if kernel.startswith(GLUON))
    return here + int(row.get("not_gluon", {}).get(FEW_CHAINS, 0))


def not_gluon(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Why rewritten calls do not take the Gluon kernel, the most common reason first."""
    return [{"calls": str(number), "reason": why} for why, number in _sum(rows, "not_gluon").most_common()]


def _sum(rows: Sequence[Row], name: str) -> Counter[str]:
    return sum((Counter(row.get(name, {})) for row in rows), Counter[str]())


def reasons(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Why calls were declined, the most common reason first, and what to do about each."""
    remedies: dict[str, str] = {}
    for row in rows:
        remedies.update(row.get("remedies", {}))
    count = _sum(rows, "reasons").most_common()
    return [{"calls": str(number), "reason": why, "remedy": remedies.get(why) or ""} for why, number in count]


def failed(row: Row) -> bool:
    """Whether the row says what went wrong, and has no figures."""
    return bool(row.get("failure"))
