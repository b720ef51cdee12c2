"""The report of a first run on a GPU in Markdown: what to look at first stands first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from dash_inductor.devices import key_for
from dash_inductor.devices.cost_files import numbers_of, tomllib
from dash_inductor.qualify.costs import flat
from dash_inductor.qualify.kernels import Finding
from dash_inductor.qualify.report import has_order, predictions, shown, targets
from dash_inductor.qualify.rows import OK

from ..markdown import markdown as of_rows
from .table import rows_in

EXPECTED = ("ok", "not available: ", "refused: ", "left out: ")  # what needs nobody's attention
# run -> (title, what it is asked for)
RUNS = {
    "order": (
        "The price of order",
        "`ours` against itself without waits and releases, whose gradients are wrong: 1.03 is the target.",
    ),
    "tuning": (
        "Tuning",
        "Variants of the one-pass kernel. Where one is faster at every shape by more than p20 .. p80 are apart, the tile table, "
        "RELEASE_AFTER or `kernel` should follow.",
    ),
    "glance": ("Against stock kernels, at a glance", "Five shapes."),
    "table": ("Against all others", "Pictures: attention.png, models.png, flex.png."),
    "kinds": (
        "Kinds",
        "FlexAttention by mask and function, and fp16: dash_inductor/devices and its cost files should say of each what is here.",
    ),
    "two-pass": ("One pass or two", "`ours` should be the faster of the two."),
}


def report(
    *,
    environments: Mapping[str, Mapping[str, Any]],
    summary: str,
    rows: pd.DataFrame,
    additions: pd.DataFrame | None,
    costs: str | None,
    findings: Sequence[Finding] = (),
) -> str:
    """The text. `rows` is a table of backwards, `additions` one of `qualify.additions.Addition`, `costs` a cost file."""
    gpu = next(iter(environments.values()))["gpu"]
    parts = [f"# First run on {gpu}", _wrong(rows), _kernels(findings), _stages(summary), _targets(rows)]
    runs = {str(label): own for label, own in rows.groupby("run", sort=False)}
    parts += [_run(label, runs[label]) for label in dict.fromkeys((*RUNS, *runs)) if label in runs]
    parts += [_predictions(rows), _costs(gpu, environments, costs), _additions(additions), _environments(environments)]
    return "\n\n".join(part for part in parts if part) + "\n"


def markdown(lines: pd.DataFrame | Sequence[Mapping[str, object]]) -> str:
    """A table of rows that share their keys."""
    return of_rows(pd.DataFrame(lines, dtype=object).to_dict("records"))


def _wrong(rows: pd.DataFrame) -> str:
    """Statuses that need attention: the same one of several shapes in one line."""
    wrong = rows[~rows["status"].str.startswith(EXPECTED)]
    lines = wrong.groupby(["run", "contender", "status"], sort=False)["shape"].agg(", ".join).rename("shapes").reset_index()
    # What is wrong before what could not run, and that before what there was no time for.
    order = {start: n for n, start in enumerate(("wrong", "not deterministic", "failed", "not run"))}
    lines = lines.sort_values("status", key=lambda status: status.str.split(":").str[0].map(order).fillna(-1), kind="stable")
    return "## What went wrong\n\n" + (markdown(lines) if len(lines) else "No row says so.")


def _kernels(findings: Sequence[Finding]) -> str:
    """Every case that was checked, those that speak against a kernel first."""
    lines = [
        {"case": each.case, "status": each.status, **{name: f"{error:.1e}" for name, error in each.errors.items()}}
        if each.errors
        else {"case": each.case, "status": each.status, "dq": "", "dk": "", "dv": ""}
        for each in sorted(findings, key=lambda each: not each.is_wrong)
    ]
    return f"## Kernels, against float64\n\n{markdown(lines)}" if lines else ""


def _stages(summary: str) -> str:
    return f"## Stages\n\n```\n{summary.rstrip()}\n```\n\nWhich tests failed stands in the log.txt of the stage's folder."


def _targets(rows: pd.DataFrame) -> str:
    """Those of the table, or of a glance where there is none."""
    timed = set(rows.loc[rows["status"] == OK, "run"])
    label = next((label for label in ("table", "glance") if label in timed), None)
    if label is None:
        return ""
    held = [{**line, "": line[""] or "-"} for line in targets(rows_in(rows[rows["run"] == label]))]
    return f"## Targets, by the run `{label}`\n\n{markdown(held)}"


def _run(label: str, rows: pd.DataFrame) -> str:
    title, asked = RUNS.get(label, (label, ""))
    parts = [f"## {title}", asked]
    timed = rows[rows["median_ms"].notna()]
    if timed.empty:
        return "\n\n".join(filter(None, [*parts, "Nothing was timed."]))
    baselines = ", at shapes of FlexAttention ".join(f"`{name}`" for name in rows["baseline"].unique())
    parts.append(
        f"TFLOPS, and how many times as fast as {baselines} in the same rounds; * marks the fastest whose gradients are right."
    )
    right = timed[(timed["status"] == OK) & (timed["contender"] != "ours-unordered")]
    best = set(right.groupby("shape")["tflops"].idxmax())
    cells = rows.assign(cell=[_cell(row, row.Index in best) for row in rows.itertuples()])
    names = [name for name in rows["contender"].unique() if name in set(timed["contender"])]
    lines = cells.pivot(index="shape", columns="contender", values="cell").loc[rows["shape"].unique(), names].fillna("")
    parts.append(markdown(lines.reset_index()))
    priced = rows_in(rows[(rows["contender"] == "ours") & rows["price"].notna()])
    if prices := [row for row in priced if has_order(row)]:
        parts.append("Time of `ours` over that of `ours-unordered` (median, p20 .. p80):")
        told = zip(prices, shown(prices), strict=True)
        parts.append(markdown([{"shape": row.shape, "price": line["price"], "schedule": row.schedule} for row, line in told]))
    return "\n\n".join(filter(None, parts))


def _cell(row: Any, best: bool) -> str:
    """TFLOPS of a row that was timed, with its marks; the first words of the status of another."""
    status = "" if row.status == OK else row.status.partition(":")[0]
    if pd.isna(row.median_ms):
        return status
    speedup = "" if pd.isna(row.speedup) else f" ({row.speedup:.2f}x)"
    return f"{row.tflops:.{0 if row.tflops >= 10 else 2}f}{speedup}{'*' if best else ''}{status and ' ' + status}"


def _predictions(rows: pd.DataFrame) -> str:
    """The cost model as it was, held against what was measured; the farthest off first."""
    found = predictions(rows_in(rows))
    if not found:
        return ""
    lines = [
        {"shape": each.shape, "schedule": each.schedule, "measured ms": f"{each.measured_ms:.3f}",
         "predicted ms": f"{each.predicted_ms:.3f}", "measured / predicted": f"{each.ratio:.2f}"}
        for each in sorted(found, key=lambda each: -abs(math.log(each.ratio)))
    ]  # fmt: skip
    return "## The cost model's predictions, the farthest off first\n\n" + markdown(lines)


def _costs(gpu: str, environments: Mapping[str, Mapping[str, Any]], costs: str | None) -> str:
    """Constants beside those of the cost file that the run had."""
    if costs is None:
        return "## Cost constants\n\nNone could be fitted."
    key = key_for(gpu, next(iter(environments.values()))["arch"])
    now = {} if key is None else flat(numbers_of(key))
    lines = [
        {"constant": name, "now": now.get(name, {}).get("value", ""), "measured": "" if entry["estimate"] else entry["value"],
         "source": entry["source"]}
        for name, entry in flat(tomllib.loads(costs)).items()
    ]  # fmt: skip
    file = f"dash_inductor/devices/{key}.toml" if key else "one of a key of its own there"
    said = f"costs.toml is a cost file, which DASH_INDUCTOR_COSTS takes. What the package ships is {file}."
    return f"## Cost constants\n\n{said}\n\n{markdown(lines)}"


def _additions(additions: pd.DataFrame | None) -> str:
    if additions is None:
        return ""
    lines = [
        {"pattern": row.pattern, "operation": row.operation, "CTAs": f"{row.ctas_per_sm} per SM of {row.warps} warps",
         "TB/s": f"{row.tb_per_s:.2f}", "of plain stores": f"{row.ratio:.2f}"}
        for row in additions.itertuples()
    ]  # fmt: skip
    return "## fp32 additions in L2\n\n" + markdown(lines)


def _environments(environments: Mapping[str, Mapping[str, Any]]) -> str:
    names = dict.fromkeys(name for found in environments.values() for name in found)
    lines = [{"": name, **{folder: found.get(name, "") for folder, found in environments.items()}} for name in names]
    return "## Environment\n\n" + markdown(lines)
