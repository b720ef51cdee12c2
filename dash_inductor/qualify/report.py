"""Rows from results, lines of a table of them, and what became of the project's targets and of predictions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..config import AUTO, GLUON, TRITON
from ..schedule import TWO_PASS
from ..templates.tiles import padded
from .contenders import BASELINE, Contender
from .measure import Result
from .rows import OK, Row
from .samples import named, ratios, summary
from .shapes import SHAPES, Shape

MIB = 1 << 20
FLAGSHIP = SHAPES[0].name
TOLERANCE = 1.25  # how far a measured time may be from the predicted one, either way, for a prediction that held


def rows_of(
    shape: Shape, results: Sequence[Result], *, run: str, environment: Mapping[str, Any], baseline: str, mhz: int | None
) -> list[Row]:
    """One row per result; ratios are of times of the same round. `mhz` is the SM clock after the measurement."""
    times = {r.contender.name: r.times_ms for r in results if r.times_ms}
    sizes = asdict(shape)
    del sizes["alibi"]  # which a shape's name says
    common = {"run": run, **environment, "shape": sizes.pop("name"), **sizes, "baseline": baseline}
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
            cells |= {"schedule": decision.schedule, "kernel": decision.kernel or "", "launch": decision.launch or ""}
            cells |= {"tile": decision.tile or "", "workspace_bytes": decision.workspace_bytes}
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


def shown(rows: Iterable[Row]) -> list[dict[str, str]]:
    """Lines of text, in the columns of a table."""
    return [
        {
            "shape": row.shape,
            "contender": row.contender,
            "ms": _text("{:.3f}", row.median_ms),
            "TFLOPS": _text("{:.0f}", row.tflops),
            "speedup": _text("{:.3f} ({:.3f} .. {:.3f})", row.speedup, row.speedup_p20, row.speedup_p80),
            "price": _text("{:.3f} ({:.3f} .. {:.3f})", row.price, row.price_p20, row.price_p80),
            "error": _text("{:.1e}", row.error),
            "status": row.status,
        }
        for row in rows
    ]


def _text(form: str, *cells: float | None) -> str:
    return "" if None in cells else form.format(*cells)


def kernels(rows: Iterable[Row]) -> list[dict[str, str]]:
    """The setting `kernel` to use, of each head dim at which both were timed: GLUON if it is right, and faster at every shape, else
    TRITON, and AUTO where that is the same."""
    rows = list(rows)
    faults = ("wrong", "not deterministic", "failed")
    faulty = {row.head_dim for row in rows if row.contender == "ours-gluon" and row.status.startswith(faults)}
    timed = {(row.run, row.shape, row.contender): row for row in rows if row.status == OK and row.median_ms is not None}
    ratios_of: dict[int, list[float]] = {}
    for (run, shape, contender), row in timed.items():
        others = (timed.get((run, shape, name)) for name in ("ours-triton", "ours"))
        other = next((other for other in others if other and other.kernel != GLUON), None)
        if contender == "ours-gluon" and other:
            ratios_of.setdefault(row.head_dim, []).append((row.median_ms or 0) / (other.median_ms or 1))
    faster = {head_dim: max(ratios) < 1 and head_dim not in faulty for head_dim, ratios in ratios_of.items()}
    chosen = {row.head_dim: row.kernel == GLUON for row in rows if row.contender == "ours"}
    return [
        {
            "d": str(head_dim),
            "shapes": str(len(ratios)),
            "time by gluon / by triton": f"{min(ratios):.3f} to {max(ratios):.3f}",
            "use": f"kernel={AUTO if faster[head_dim] == chosen.get(head_dim) else GLUON if faster[head_dim] else TRITON!r}",
        }
        for head_dim, ratios in sorted(ratios_of.items())
    ]


def targets(rows: Iterable[Row]) -> list[dict[str, str]]:
    """The project's targets held against our kernel as chosen, the worst row counting."""
    ours = [row for row in rows if row.contender == "ours" and row.status == OK]
    speedups = [row.speedup for row in ours if row.shape == FLAGSHIP and row.baseline == BASELINE and row.speedup is not None]
    prices = [row.price for row in ours if has_order(row) and row.price is not None]
    beside = [spare for row in ours if (spare := _spare_bytes(row)) is not None]
    wanted = (
        (f"speedup over {BASELINE}, {FLAGSHIP}", "at least 2.5", min(speedups, default=None), lambda found: found >= 2.5),
        ("time with order over time without", "at most 1.03", max(prices, default=None), lambda found: found <= 1.03),
        ("bytes beside outputs, fp32 dq, delta, lse", "at most 1 MiB", max(beside, default=None), lambda found: found <= MIB),
    )
    lines = []
    for target, asked, worst, is_met in wanted:
        verdict = "not measured" if worst is None else "met" if is_met(worst) else "MISSED"
        lines.append({"target": target, "wanted": asked, "found": _text("{:.6g}", worst), "": verdict})
    return lines


def _spare_bytes(row: Row) -> int | None:
    """What the package says it needs or the allocator saw, less fp32 dq (the head dim as padded), delta and lse."""
    allowed = row.batch * row.heads * row.length * (4 * padded(row.head_dim) + 8)
    seen = [size for size in (row.workspace_bytes, row.peak_bytes) if size is not None]
    return max(seen) - allowed if seen else None


def has_order(row: Row) -> bool:
    """Whether `ours-unordered` is the same kernel without its order: one pass by Triton."""
    return not row.schedule.startswith(TWO_PASS) and row.kernel != GLUON


@dataclass(frozen=True)
class Prediction:
    """The cost model's time of a main kernel beside the measured one of the whole backward, in ms."""

    shape: str
    schedule: str
    predicted_ms: float
    measured_ms: float

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured_ms / self.predicted_ms

    @property
    def held(self) -> bool:
        """Whether the two are no more than TOLERANCE apart."""
        return 1 / TOLERANCE <= self.ratio <= TOLERANCE


def predictions(rows: Iterable[Row]) -> list[Prediction]:
    """A prediction for each shape, schedule and kernel of ours that was timed and is right."""
    found: dict[tuple[str, str], Prediction] = {}
    for row in rows:
        if row.status == OK and row.predicted_ms and row.median_ms:
            schedule = f"{row.schedule}, Gluon" if row.kernel == GLUON else row.schedule
            found.setdefault((row.shape, schedule), Prediction(row.shape, schedule, row.predicted_ms, row.median_ms))
    return list(found.values())
