"""One row per shape and contender: the schema of every table of backwards, written as it comes, read back with its types.

A number or bool that was not measured, or does not apply, is None, and an empty cell of the file; text is "" there.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any

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
        kernel: of one pass, TRITON or GLUON; empty for what is not ours.
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
    window: int | None
    documents: tuple[int, ...]
    softcap: float | None
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
    kernel: str = ""
    launch: str = ""
    tile: str = ""
    predicted_ms: float | None = None
    sm_mhz: int | None = None
    times_ms: tuple[float, ...] = ()


KINDS = {f.name: str(f.type) for f in fields(Row)}
NAMES = list(KINDS)
_HEADER = ",".join(NAMES).encode() + b"\n"
_BOOLS = {"True": True, "False": False}
# Kind -> a value, from the text of its cell; KeyError or ValueError for what is none.
_PARSED: dict[str, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "int | None": lambda text: int(text) if text else None,
    "float | None": lambda text: float(text) if text else None,
    "bool": _BOOLS.__getitem__,
    "bool | None": lambda text: _BOOLS[text] if text else None,
    "tuple[int, ...]": lambda text: tuple(map(int, text.split())),
    "tuple[float, ...]": lambda text: tuple(map(float, text.split())),
}


def write(path: Path, kind: Any, records: Iterable[Any], mode: str = "w") -> list[Any]:
    """Writes records of another kind, a dataclass, as CSV below the names of its fields, each as it comes, and returns them. In the
    mode "a" they stand behind what a file has."""
    written = []
    with path.open(mode, encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if not file.tell():
            writer.writerow(each.name for each in fields(kind))
        for record in records:
            writer.writerow(astuple(record))
            file.flush()
            written.append(record)
    return written


def append(path: Path, rows: Iterable[Row]) -> None:
    """Writes rows to the end of a file, below the header if it is new; ValueError if its columns are others.

    A last row that was cut off, since a process ended while it wrote, is overwritten.
    """
    path.touch()
    data = path.read_bytes()
    if not data.startswith(_HEADER) and not _HEADER.startswith(data):
        raise ValueError(f"{path} has other columns than this version writes: give another folder")
    end = len(_whole_rows(data))
    os.truncate(path, end)
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([NAMES] if not end else [])
        writer.writerows(cells_of(row).values() for row in rows)


def read(path: Path) -> list[Row]:
    """The rows in a file, but for a last one that was cut off; ValueError, naming the column, for what is none."""
    return [parsed(cells) for cells in read_cells(path)]


def read_cells(path: Path) -> list[dict[str, str]]:
    """The rows of `read` as text: every cell by its column, "" for an empty one."""
    data = _whole_rows(path.read_bytes())
    if not data.startswith(_HEADER):
        raise ValueError(f"{path} has not the columns of an attention table")
    return list(csv.DictReader(io.StringIO(data.decode(), newline="")))


def parsed(cells: Mapping[str, str]) -> Row:
    """The row whose cells have this text; ValueError, naming the column, for a cell of another type."""
    values: dict[str, Any] = {}
    for name, kind in KINDS.items():
        try:
            values[name] = _PARSED[kind](cells[name])
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"column {name}: {cells.get(name)!r} is no {kind}") from None
    return Row(**values)


def cells_of(row: Row) -> dict[str, str]:
    """The text of its cells, by their columns."""
    return {name: _text(value) for name, value in asdict(row).items()}


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(map(_text, value))
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else str(value)


def _whole_rows(data: bytes) -> bytes:
    """A file's bytes up to its last row that has an end; a line that ends inside quotes ends no row."""
    end = data.rfind(b"\n") + 1
    while data.count(b'"', 0, end) % 2:
        end = data.rfind(b"\n", 0, end - 1) + 1
    return data[:end]
