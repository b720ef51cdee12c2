"""Rows of a qualification as a data frame, whose columns are the fields of `Row`.

A number or bool that was not measured, or does not apply, is missing (NA or NaN); text is "" there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict

import pandas as pd

from dash_inductor.qualify.rows import KINDS, NAMES, Row, parsed

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


def typed(cells: Iterable[Mapping[str, str]]) -> pd.DataFrame:
    """The table whose cells have this text; ValueError, naming the column, for a cell of another type."""
    table = pd.DataFrame([asdict(parsed(row)) for row in cells], columns=NAMES, dtype="object")
    return table.astype({name: _DTYPES[kind] for name, kind in KINDS.items()})


def rows_in(table: pd.DataFrame) -> list[Row]:
    """The rows of a table."""
    present = table.astype("object").where(table.notna(), None)
    return [Row(**cells) for cells in present.to_dict("records")]
