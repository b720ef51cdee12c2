"""How far the model is from the measurements, in sample and for lengths left out of the fit."""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd

from .fit import fit
from .measurements import Cell
from .model import Fits, predict_all

CASE = ["head_dim", "causal", "seqlen"]  # what a schedule is picked for


class Evaluation(NamedTuple):
    """The constants fitted to all rows; and the rows with predicted times in ms, by that fit in the column `in_sample`, by the fit
    to the rows of the other lengths in `left_out`."""

    fits: Fits
    table: pd.DataFrame


def evaluate(measured: pd.DataFrame) -> Evaluation:
    """Fit once to all rows, and once without each length."""
    fits = fit(measured)
    left_out: dict[Cell, float] = {}
    for seqlen, rows in measured.groupby("seqlen"):
        left_out |= predict_all(rows["cell"], fit(measured[measured["seqlen"] != seqlen]))
    cells = measured["cell"]
    return Evaluation(fits, measured.assign(in_sample=cells.map(predict_all(cells, fits)), left_out=cells.map(left_out)))


def errors(table: pd.DataFrame, name: str) -> pd.Series:
    """Predicted time, in the column `name`, over measured time, minus 1.

    >>> errors(pd.DataFrame({"ms": [2.0, 4.0], "in_sample": [3.0, 3.0]}), "in_sample").tolist()
    [0.5, -0.25]
    """
    return table[name] / table["ms"] - 1


def picks(table: pd.DataFrame, name: str) -> pd.DataFrame:
    """The row that the model takes to be the fastest for every head dim, mask and length, by the times in the column `name`.

    The column `regret` is what that costs: its measured time over the best, minus 1.
    """
    cases = table.groupby(CASE)
    return table.assign(regret=table["ms"] / cases["ms"].transform("min") - 1).loc[cases[name].idxmin()]
