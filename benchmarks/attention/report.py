"""Rows from results, a table of them on the terminal, and what became of the project's targets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd

from dash_inductor.cli.console import table
from dash_inductor.schedule import TWO_PASS
from dash_inductor.templates.tiles import padded

from .contenders import BASELINE, Contender
from .environment import Environment
from .measure import Result
from .rows import OK, Row
from .samples import named, ratios, summary
from .shapes import SHAPES, Shape

MIB = 1 << 20
FLAGSHIP = SHAPES[0].name


def rows_of(
    shape: Shape, results: Sequence[Result], *, run: str, environment: Environment, baseline: str, mhz: int | None
) -> list[Row]:
    """One row per result; ratios are of times of the same round. `mhz` is the SM clock after the measurement."""
    times = {r.contender.name: r.times_ms for r in results if r.times_ms}
    sizes = asdict(shape)
    common = {"run": run, **asdict(environment), "shape": sizes.pop("name"), **sizes, "dtype": "bf16", "baseline": baseline}
    return [Row(**common, **_measured(shape, r, times, baseline, mhz)) for r in results]


def not_run(shape: Shape, contenders: Iterable[Contender], status: str, **common: Any) -> list[Row]:
    """Rows of a shape that was not measured."""
    return rows_of(shape, [Result(contender, status) for contender in contenders], mhz=None, **common)


def _measured(shape: Shape, result: Result, times: Mapping[str, Sequence[float]], baseline: str, mhz: int | None) -> dict[str, Any]:
    """The cells that are a contender's own."""
    contender, own = result.contender, result.times_ms
    cells: dict[str, Any] = {"contender": contender.name, "deterministic": contender.deterministic, "twin": contender.twin or ""}
    cells |= {"status": result.status, "note": result.note}
    if own:
        time = summary(own)
        cells |= {"rounds": len(own), "times_ms": own, "sm_mhz": mhz, "tflops": shape.flop / time.median / 1e9}
        cells |= {"median_ms": time.median, "p20_ms": time.p20, "p80_ms": time.p80}
        cells |= _ratio("speedup", times.get(baseline), own) | _ratio("price", own, times.get(contender.twin or ""))
    if result.prepared is not None:
        cells |= {"peak_bytes": result.peak_bytes, "same_bits": result.same_bits, "error": result.error}
        decision = result.prepared.decision
        if decision is not None:
            cells |= {"schedule": decision.schedule, "launch": decision.launch or "", "tile": decision.tile or ""}
            cells |= {"workspace_bytes": decision.workspace_bytes}
            cells |= {"predicted_ms": None if decision.predicted_us is None else decision.predicted_us / 1000}
    return cells


def _ratio(name: str, above: Sequence[float] | None, below: Sequence[float] | None) -> dict[str, float]:
    if not above or not below or len(above) != len(below):  # one of them took no turns
        return {}
    return named(name, ratios(above, below))


def line(row: Row) -> str:
    """A row that was timed, in one line."""
    parts = [f"{row.contender}: {row.median_ms:.3f} ms", f"{row.tflops:.0f} TFLOPS"]
    if row.speedup is not None and row.contender != row.baseline:
        parts.append(f"{row.speedup:.2f}x {row.baseline}")
    if row.price is not None:
        parts.append(f"{row.price:.3f} of {row.twin}'s time")
    return ", ".join(parts) + ("" if row.status == OK else f" ({row.status})")


def show(rows: pd.DataFrame) -> None:
    """Prints the table, and the targets."""
    if len(rows):
        table("Attention backward (median; ratios: median, p20 .. p80)", shown(rows))
        table("Targets", targets(rows))


def shown(rows: pd.DataFrame) -> list[dict[str, str]]:
    """Lines of text, in the columns of the terminal's table."""

    def text(form: str, *columns: pd.Series) -> list[str]:
        return ["" if any(map(pd.isna, cells)) else form.format(*cells) for cells in zip(*columns, strict=True)]

    def ratio(name: str) -> list[str]:
        return text("{:.3f} ({:.3f} .. {:.3f})", *(rows[f"{name}{quantile}"] for quantile in ("", "_p20", "_p80")))

    columns = {
        "shape": rows["shape"],
        "contender": rows["contender"],
        "det.": rows["deterministic"].map({True: "yes", False: "no"}),
        "ms": text("{:.3f}", rows["median_ms"]),
        "TFLOPS": text("{:.0f}", rows["tflops"]),
        "speedup": ratio("speedup"),
        "price": ratio("price"),
        "peak MiB": text("{:.1f}", rows["peak_bytes"] / MIB),
        "same bits": text("{}", rows["same_bits"].map({True: "yes", False: "no"})),
        # That of gradients with NaN is NaN, which is not the same as none: their bits were compared.
        "error": rows["error"].map("{:.1e}".format).where(rows["error"].notna() | rows["same_bits"].notna(), ""),
        "schedule": rows["schedule"],
        "status": rows["status"],
    }
    return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]


def targets(rows: pd.DataFrame) -> list[dict[str, str]]:
    """The project's targets held against our kernel as chosen, the worst row counting."""
    ours = rows[(rows["contender"] == "ours") & (rows["status"] == OK)]
    flagship = ours[(ours["shape"] == FLAGSHIP) & (ours["baseline"] == BASELINE)]
    # fp32 dq and 8 bytes (delta, lse) for every query row and head; the head dim as padded.
    allowed = ours["batch"] * ours["heads"] * ours["length"] * (4 * ours["head_dim"].map(padded) + 8)
    # What the package says it needs, and what the allocator saw.
    spare = ours[["workspace_bytes", "peak_bytes"]].max(axis=1) - allowed
    speedup, price, beside = flagship["speedup"].min(), ours.loc[has_order(ours), "price"].max(), spare.max()
    return [
        _target(f"speedup over {BASELINE}, {FLAGSHIP}", "at least 2.5", speedup, speedup >= 2.5),
        _target("time with order over time without", "at most 1.03", price, price <= 1.03),
        _target("bytes beside outputs, fp32 dq, delta, lse", "at most 1 MiB", beside, beside <= MIB),
    ]


def _target(name: str, wanted: str, worst: Any, met: Any) -> dict[str, str]:
    measured = not pd.isna(worst)
    verdict = "not measured" if not measured else "met" if met else "MISSED"
    return {"target": name, "wanted": wanted, "found": f"{worst:.6g}" if measured else "", "": verdict}


def has_order(rows: pd.DataFrame) -> pd.Series:
    """Whether our kernel waits at all: two passes do not, and their twin without order is another kernel."""
    return ~rows["schedule"].str.startswith(TWO_PASS)
