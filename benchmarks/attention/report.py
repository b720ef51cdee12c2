"""Rows from results, a table of them on the terminal, and what became of the project's targets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from dash_inductor.commands.console import table
from dash_inductor.schedule import TWO_PASS
from dash_inductor.templates.tiles import padded

from .contenders import BASELINE, Contender
from .environment import Environment
from .measure import Result
from .rows import OK, Row
from .samples import ratios, summary
from .shapes import SHAPES, Shape

MIB = 1 << 20
FLAGSHIP = SHAPES[0].name


def rows_of(
    shape: Shape,
    results: Sequence[Result],
    *,
    run: str,
    environment: Environment,
    baseline: str,
    mhz: int | None,
) -> list[Row]:
    """One row per result; ratios are of times of the same round."""
    times = {r.contender.name: r.times_ms for r in results if r.times_ms}
    return [_row(shape, r, times, run=run, environment=environment, baseline=baseline, mhz=mhz) for r in results]


def not_run(shape: Shape, contenders: Iterable[Contender], status: str, **common: Any) -> list[Row]:
    """Rows of a shape that was not measured."""
    return rows_of(shape, [Result(contender, status) for contender in contenders], mhz=None, **common)


def _row(
    shape: Shape,
    result: Result,
    times: Mapping[str, tuple[float, ...]],
    *,
    run: str,
    environment: Environment,
    baseline: str,
    mhz: int | None,
) -> Row:
    contender, own = result.contender, result.times_ms
    decision = result.prepared.decision if result.prepared is not None else None
    measured: dict[str, Any] = {}
    if own:
        middle = summary(own)
        measured = {"rounds": len(own), "times_ms": own, "sm_mhz": mhz, "tflops": shape.flop / middle.median / 1e9}
        measured |= {"median_ms": middle.median, "p20_ms": middle.p20, "p80_ms": middle.p80}
        measured |= _ratio("speedup", times.get(baseline), own) | _ratio("price", own, times.get(contender.twin or ""))
    if result.prepared is not None:
        measured |= {"peak_bytes": result.peak_bytes, "same_bits": result.same_bits, "error": result.error}
    if decision is not None:
        measured |= {"schedule": decision.schedule, "launch": decision.launch or "", "tile": decision.tile or ""}
        measured["workspace_bytes"] = decision.workspace_bytes
        if decision.predicted_us is not None:
            measured["predicted_ms"] = decision.predicted_us / 1000
    return Row(
        run=run,
        **asdict(environment),
        shape=shape.name,
        mask=shape.mask,
        batch=shape.batch,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        length=shape.length,
        head_dim=shape.head_dim,
        dtype="bf16",
        contender=contender.name,
        deterministic=contender.deterministic,
        status=result.status,
        note=result.note,
        baseline=baseline,
        twin=contender.twin or "",
        **measured,
    )


def _ratio(name: str, above: Sequence[float] | None, below: Sequence[float] | None) -> dict[str, float]:
    if not above or not below or len(above) != len(below):  # one of them took no turns
        return {}
    found = summary(ratios(above, below))
    return {name: found.median, f"{name}_p20": found.p20, f"{name}_p80": found.p80}


def line(row: Row) -> str:
    """A row that was timed, in one line."""
    parts = [f"{row.contender}: {row.median_ms:.3f} ms", f"{row.tflops:.0f} TFLOPS"]
    if row.speedup is not None and row.contender != row.baseline:
        parts.append(f"{row.speedup:.2f}x {row.baseline}")
    if row.price is not None:
        parts.append(f"{row.price:.3f} of {row.twin}'s time")
    return ", ".join(parts) + ("" if row.status == OK else f" ({row.status})")


def show(rows: Sequence[Row]) -> None:
    """The table, and the targets."""
    if rows:
        table("Attention backward (median; ratios: median, p20 .. p80)", [_shown(row) for row in rows])
        table("Targets", targets(rows))


def _shown(row: Row) -> dict[str, object]:
    def ratio(name: str) -> str:
        values = [getattr(row, f"{name}{which}") for which in ("", "_p20", "_p80")]
        return "" if None in values else "{:.3f} ({:.3f} .. {:.3f})".format(*values)

    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    return {
        "shape": row.shape,
        "contender": row.contender,
        "det.": "yes" if row.deterministic else "no",
        "ms": number(row.median_ms, ".3f"),
        "TFLOPS": number(row.tflops, ".0f"),
        "speedup": ratio("speedup"),
        "price": ratio("price"),
        "peak MiB": number(None if row.peak_bytes is None else row.peak_bytes / MIB, ".1f"),
        "same bits": {True: "yes", False: "no", None: ""}[row.same_bits],
        "error": number(row.error, ".1e"),
        "schedule": row.schedule,
        "status": row.status,
    }


def targets(rows: Sequence[Row]) -> list[dict[str, str]]:
    """The project's targets held against our kernel as chosen, the worst row counting."""
    ours = [row for row in rows if row.contender == "ours" and row.ok]
    flagship = [row.speedup for row in ours if row.shape == FLAGSHIP and row.baseline == BASELINE and row.speedup is not None]
    prices = [row.price for row in ours if row.price is not None and has_order(row)]
    # What the package says it needs, and what the allocator saw.
    spare = [memory - _allowed_bytes(row) for row in ours for memory in (row.workspace_bytes, row.peak_bytes) if memory is not None]
    return [
        _target(f"speedup over {BASELINE}, {FLAGSHIP}", "at least 2.5", min(flagship, default=None), lambda found: found >= 2.5),
        _target("time with order over time without", "at most 1.03", max(prices, default=None), lambda found: found <= 1.03),
        _target("bytes beside outputs, fp32 dq, delta, lse", "at most 1 MiB", max(spare, default=None), lambda found: found <= MIB),
    ]


def has_order(row: Row) -> bool:
    """Whether our kernel waits at all: two passes do not, and their twin without order is another kernel."""
    return not row.schedule.startswith(TWO_PASS)


def _allowed_bytes(row: Row) -> int:
    """fp32 dq and 8 bytes (delta, lse) for every query row and head; the head dim as padded."""
    return row.batch * row.heads * row.length * (4 * padded(row.head_dim) + 8)


def _target(name: str, wanted: str, found: float | None, met: Callable[[float], bool]) -> dict[str, str]:
    verdict = "not measured" if found is None else "met" if met(found) else "MISSED"
    return {"target": name, "wanted": wanted, "found": "" if found is None else f"{found:.6g}", "": verdict}
