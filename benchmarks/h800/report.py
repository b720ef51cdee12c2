"""Constants, errors and regrets as tables on the terminal."""

from __future__ import annotations

from dataclasses import fields

from dash_inductor.commands.console import table

from .constants import Constants
from .evaluation import Evaluation, Times, errors, mean_error, mean_regret, picks
from .measurements import SCHEDULES, Cell

SHORT = dict(zip(SCHEDULES, ("asc", "desc", "desc P", "shift P", "shift"), strict=True))
IN_US = ("fixed", "chain", "launch", "step", "hop")


def show(evaluation: Evaluation) -> None:
    """Print what was fitted and how well it holds."""
    table("Constants", _constants(evaluation))
    table("Error, in sample, % (P: persistent)", _cells(evaluation, evaluation.in_sample))
    table("Error, length left out of the fit, %", _cells(evaluation, evaluation.left_out))
    table("Means, %", _means(evaluation))


def _constants(evaluation: Evaluation) -> list[dict[str, str]]:
    return [
        {"constant": f.name, "unit": "us" if f.name in IN_US else ""}
        | {f"d = {d}": f"{getattr(constants, f.name):.3f}" for d, constants in evaluation.fits.items()}
        for f in fields(Constants)
    ]


def _cells(evaluation: Evaluation, predicted: Times) -> list[dict[str, object]]:
    error = errors(evaluation.measurements, predicted)
    rows = []
    for pick in picks(evaluation.measurements, predicted):
        row: dict[str, object] = {"cell": f"{pick.head_dim} {'causal' if pick.causal else 'full'} {pick.seqlen}"}
        for schedule in SCHEDULES:
            cell = Cell(schedule, pick.head_dim, pick.causal, pick.seqlen)
            row[SHORT[schedule]] = f"{100 * error[cell]:+.1f}"
        rows.append(row | {"pick": SHORT[pick.schedule], "regret": f"{100 * pick.regret:.1f}"})
    return rows


def _means(evaluation: Evaluation) -> list[dict[str, object]]:
    rows = []
    for seqlen in (*evaluation.lengths, None):
        row: dict[str, object] = {"length": seqlen or "all"}
        for name, predicted in (("in sample", evaluation.in_sample), ("left out", evaluation.left_out)):
            row[f"error {name}"] = f"{100 * mean_error(evaluation.measurements, predicted, seqlen):.2f}"
            row[f"regret {name}"] = f"{100 * mean_regret(evaluation.measurements, predicted, seqlen):.2f}"
        rows.append(row)
    return rows
