"""One row per shape and contender: the one schema of every table here, written as it comes, read back with its types."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

OK = "ok"


@dataclass(frozen=True)
class Row:
    """What was measured, or why it was not. None (an empty cell): not measured, or does not apply.

    Attributes:
        run: a name for the command's run, to tell several in one file apart.
        status: "ok", or the reason why there is no time or no trust in it.
        deterministic: whether the contender promises the same bits; same_bits: whether it had them.
        times_ms: each repetition's time; round r of one contender stands beside round r of the others.
        speedup: time of `baseline` over this time, round by round.
        price: this time over that of `twin`, the same but for determinism, round by round.
        peak_bytes: most memory held at a time beside inputs and outputs; workspace_bytes: what the package says it needs.
        error: worst relative error of dq, dk, dv (Frobenius norm) against fp32.
        sm_mhz: the SM clock right after the repetitions.
    """

    run: str
    gpu: str
    sms: int
    driver: str
    torch: str
    triton: str
    shape: str
    mask: str
    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int
    dtype: str
    contender: str
    deterministic: bool
    status: str
    note: str = ""
    rounds: int | None = None
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    tflops: float | None = None
    baseline: str = ""
    speedup: float | None = None
    speedup_p20: float | None = None
    speedup_p80: float | None = None
    twin: str = ""
    price: float | None = None
    price_p20: float | None = None
    price_p80: float | None = None
    peak_bytes: int | None = None
    workspace_bytes: int | None = None
    same_bits: bool | None = None
    error: float | None = None
    schedule: str = ""
    launch: str = ""
    tile: str = ""
    predicted_ms: float | None = None
    sm_mhz: int | None = None
    times_ms: tuple[float, ...] = ()

    @property
    def ok(self) -> bool:
        return self.status == OK


def append(path: Path, rows: Iterable[Row]) -> None:
    """Writes rows to the end of a file, below the header if it is new; ValueError if its columns are others."""
    names = [f.name for f in fields(Row)]
    new = not path.exists() or not path.stat().st_size
    if not new and _header(path) != names:
        raise ValueError(f"{path} has other columns than this version writes: give another folder")
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(names)
        writer.writerows([_text(value) for value in asdict(row).values()] for row in rows)


def read(path: Path) -> list[Row]:
    """The rows of a file; ValueError, naming the column, for what is no row."""
    if _header(path) != [f.name for f in fields(Row)]:
        raise ValueError(f"{path} has not the columns of an attention table")
    with path.open(newline="", encoding="utf-8") as file:
        return [Row(**{name: _value(name, text) for name, text in line.items()}) for line in csv.DictReader(file)]  # type: ignore[arg-type]


def _header(path: Path) -> Sequence[str]:
    with path.open(newline="", encoding="utf-8") as file:
        return next(csv.reader(file), [])


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(map(_text, value))
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else str(value)


_TYPES = {f.name: str(f.type) for f in fields(Row)}


def _value(name: str, text: str) -> object:
    kind = _TYPES[name]
    if kind.endswith("| None") and not text:
        return None
    try:
        if kind.startswith("tuple"):
            return tuple(map(float, text.split()))
        if kind.startswith("bool"):
            return {"True": True, "False": False}[text]
        if kind.startswith("int"):
            return int(text)
        return float(text) if kind.startswith("float") else text
    except (ValueError, KeyError):
        raise ValueError(f"column {name}: {text!r} is not {kind}") from None
