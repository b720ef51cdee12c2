"""Constants, errors and regrets as tables on the terminal."""

from __future__ import annotations

from dataclasses import fields

from dash_inductor.cli.console import table

from .constants import Constants
from .evaluation import CASE, Evaluation, errors, picks
from .measurements import SCHEDULES

SHORT = dict(zip(SCHEDULES, ("asc", "desc", "desc P", "shift P", "shift"), strict=True))
IN_US = ("fixed", "chain", "launch", "step", "hop")


def show(evaluation: Evaluation) -> None:
    """Print what was fitted and how well it holds."""
    table("Constants", _constants(evaluation))
    table("Error, in sample, % (P: persistent)", _cells(evaluation, "in_sample"))
    table("Error, length left out of the fit, %", _cells(evaluation, "left_out"))
    table("Means, %", _means(evaluation))


def _constants(evaluation: Evaluation) -> list[dict[str, str]]:
    return [
        {"constant": f.name, "unit": "us" if f.name in IN_US else ""}
        | {f"d = {d}": f"{getattr(constants, f.name):.3f}" for d, constants in evaluation.fits.items()}
        for f in fields(Constants)
    ]


def _cells(evaluation: Evaluation, name: str) -> list[dict[str, str]]:
    rows = evaluation.table.assign(error=100 * errors(evaluation.table, name))
    by_schedule = rows.pivot(index=CASE, columns="schedule", values="error")[list(SHORT)].itertuples(index=False)
    return [
        {"cell": f"{pick['head_dim']} {'causal' if pick['causal'] else 'full'} {pick['seqlen']}"}
        | {short: f"{error:+.1f}" for short, error in zip(SHORT.values(), line, strict=True)}
        | {"pick": SHORT[pick["schedule"]], "regret": f"{100 * pick['regret']:.1f}"}
        for (_, pick), line in zip(picks(rows, name).iterrows(), by_schedule, strict=True)  # both sorted by CASE
    ]


def _means(evaluation: Evaluation) -> list[dict[str, str]]:
    rows = []
    for seqlen, part in (*evaluation.table.groupby("seqlen"), ("all", evaluation.table)):
        means = {"length": str(seqlen)}
        for title, name in (("in sample", "in_sample"), ("left out", "left_out")):
            means[f"error {title}"] = f"{100 * errors(part, name).abs().mean():.2f}"
            means[f"regret {title}"] = f"{100 * picks(part, name)['regret'].mean():.2f}"
        rows.append(means)
    return rows
