"""Rows of a qualification as a data frame, whose columns are the fields of `Row`.

A number or bool that was not measured, or does not apply, is missing (NA or NaN); text is "" there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

import pandas as pd

from dash_inductor.qualify.rows import KINDS, NAMES, Row, cells_of, parsed, read_cells

_DTYPES = {
    "str": "object",
    "int": "int64",
    "int | None": "Int64",
    "float | None": "float64",
    "bool": "boolean",
    "bool | None": "boolean",
    "tuple[int, ...]": "object",
    "tuple[float, ...]": "object",
}


def read(path: Path) -> pd.DataFrame:
    """The table in a file, but for a last row that was cut off; ValueError, naming the column, for what is none."""
    return typed(read_cells(path))


def typed(cells: Iterable[Mapping[str, str]]) -> pd.DataFrame:
    """The table whose cells have this text; ValueError, naming the column, for a cell of another type."""
    table = pd.DataFrame([asdict(parsed(row)) for row in cells], columns=NAMES, dtype="object")
    return table.astype({name: _DTYPES[kind] for name, kind in KINDS.items()})


def table_of(rows: Iterable[Row]) -> pd.DataFrame:
    """What `read` gives of a file with these rows."""
    return typed(map(cells_of, rows))


def rows_in(table: pd.DataFrame) -> list[Row]:
    """The rows of a table."""
    present = table.astype("object").where(table.notna(), None)
    return [Row(**cells) for cells in present.to_dict("records")]
