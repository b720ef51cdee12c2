"""What benchmarks keep in CSV files of benchmarks/results."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A line per row, of which there is at least one; all have the keys of the first. A folder that is missing is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        lines = csv.DictWriter(file, [*rows[0]], lineterminator="\n")
        lines.writeheader()
        lines.writerows(rows)


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(newline="") as file:
        return [*csv.DictReader(file)]


def of_newest_torch(folder: str) -> Path:
    """The file of a folder of RESULTS that has the newest torch in its name."""
    return max((RESULTS / folder).glob("torch-*.csv"), key=lambda path: [int(part) for part in path.stem[6:].split(".")])
