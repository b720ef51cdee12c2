"""Pictures of a table: throughput, the price of determinism and memory over length, and the models."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .rows import Row
from .shapes import HEAD_DIMS, LENGTHS, MASKS, MODELS, SWEEP

MIB = 1 << 20


def plot(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Writes attention.png (the sweep) and models.png, where there are rows for them; nothing without matplotlib."""
    if find_spec("matplotlib") is None:
        return []
    timed = [row for row in rows if row.ok and row.median_ms is not None]
    names = list(dict.fromkeys(row.contender for row in timed))
    written = []
    for file, shapes, draw in (("attention.png", SWEEP, _sweep), ("models.png", MODELS, _models)):
        part = [row for row in timed if row.shape in {shape.name for shape in shapes}]
        if part:
            draw(part, names).savefig(folder / file, dpi=120)
            written.append(folder / file)
    return written


def _style(row: Row, names: list[str]) -> dict[str, Any]:
    """One colour per contender; solid if it promises the same bits, dashed if not."""
    return {"color": f"C{names.index(row.contender) % 10}", "linestyle": "-" if row.deterministic else "--"}


def _sweep(rows: list[Row], names: list[str]) -> Any:
    """A line of panels per head dim and mask: TFLOPS, price, memory."""
    from matplotlib.figure import Figure

    cells = [(d, mask) for d in sorted(HEAD_DIMS) for mask in MASKS]
    cells = [(d, mask) for d, mask in cells if any((row.head_dim, row.mask) == (d, mask) for row in rows)]
    figure = Figure(figsize=(16, 4 * len(cells)), layout="constrained")
    panels = figure.subplots(len(cells), 3, squeeze=False)
    quantities = (
        ("TFLOPS (median, p20 .. p80)", _tflops),
        ("time over that of the twin without order", _price),
        ("peak MiB beside outputs", _peak),
    )
    for line, (d, mask) in zip(panels, cells, strict=True):
        for panel, (title, quantity) in zip(line, quantities, strict=True):
            for name in names:
                own = sorted((r for r in rows if (r.head_dim, r.mask, r.contender) == (d, mask, name)), key=lambda r: r.length)
                points = [(row.length, quantity(row)) for row in own]
                known = [(length, *values) for length, values in points if values is not None]
                if known:
                    lengths, middle, low, high = zip(*known, strict=True)
                    panel.plot(lengths, middle, marker=".", label=name, **_style(own[0], names))
                    panel.fill_between(lengths, low, high, alpha=0.15, color=_style(own[0], names)["color"])
            panel.set_xscale("log", base=2)
            panel.set_xticks(sorted(LENGTHS), [str(n) for n in sorted(LENGTHS)])
            panel.set_title(f"{title}, d = {d}, {mask}")
            panel.grid(alpha=0.3)
    panels[0, 0].legend(fontsize="small")
    figure.suptitle(f"Attention backward on {rows[0].gpu}; solid lines promise the same bits, dashed ones do not")
    figure.supxlabel("sequence length")
    return figure


def _models(rows: list[Row], names: list[str]) -> Any:
    """TFLOPS of every model, a bar per contender."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 5), layout="constrained")
    panel = figure.subplots()
    shown = [shape.name for shape in MODELS if any(row.shape == shape.name for row in rows)]
    for n, name in enumerate(names):
        own = [row for row in rows if row.contender == name]
        places = [shown.index(row.shape) + (n - len(names) / 2) * 0.8 / len(names) for row in own]
        hatch = "" if own and own[0].deterministic else "//"
        heights = [row.tflops or 0 for row in own]
        panel.bar(places, heights, 0.8 / len(names), align="edge", label=name, color=f"C{n % 10}", hatch=hatch, edgecolor="white")
    panel.set_xticks(range(len(shown)), shown)
    panel.set_ylabel("TFLOPS; hatched bars do not promise the same bits")
    panel.legend(fontsize="small")
    panel.grid(alpha=0.3, axis="y")
    return figure


Values = tuple[float, float, float]


def _tflops(row: Row) -> Values | None:
    if row.tflops is None or row.median_ms is None or not row.p20_ms or not row.p80_ms:
        return None
    return row.tflops, row.tflops * row.median_ms / row.p80_ms, row.tflops * row.median_ms / row.p20_ms


def _price(row: Row) -> Values | None:
    if row.price is None or row.price_p20 is None or row.price_p80 is None:
        return None
    return row.price, row.price_p20, row.price_p80


def _peak(row: Row) -> Values | None:
    return None if row.peak_bytes is None else (row.peak_bytes / MIB,) * 3
