"""Pictures of a table: throughput, the price of determinism and memory over length, and the models."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd

from dash_inductor.qualify.report import MIB
from dash_inductor.qualify.shapes import FLEX, KINDS, LENGTHS, MODELS, SHAPES, SWEEP

# Title of a panel -> the columns of its line, and of the lower and upper edge of the band around it.
PANELS = {
    "TFLOPS (median, p20 .. p80)": ["tflops", "tflops_p20", "tflops_p80"],
    "time over that of the twin without order": ["price", "price_p20", "price_p80"],
    "peak MiB beside outputs": ["peak_mib"] * 3,
}


def plot(rows: pd.DataFrame, folder: Path) -> None:
    """Writes attention.png (the sweep), models.png and flex.png of rows that were timed, where there are some for them; nothing
    without matplotlib."""
    if find_spec("matplotlib") is None:
        return
    names = list(rows["contender"].unique())
    for file, shapes, draw in (
        ("attention.png", SWEEP, _sweep),
        ("models.png", MODELS, _models),
        ("flex.png", (*FLEX, *(shape for shape in KINDS if shape.flex)), _models),
    ):
        part = rows[rows["shape"].isin([shape.name for shape in shapes])]
        if len(part):
            draw(part, names).savefig(folder / file, dpi=120)


def _sweep(rows: pd.DataFrame, names: list[str]) -> Any:
    """A line of panels per head dim and mask; a colour per contender, solid if it promises the same bits, dashed if not."""
    from matplotlib.figure import Figure

    rows = rows.assign(
        tflops_p20=rows["tflops"] * rows["median_ms"] / rows["p80_ms"],
        tflops_p80=rows["tflops"] * rows["median_ms"] / rows["p20_ms"],
        peak_mib=rows["peak_bytes"].astype("float64") / MIB,
    )
    cells = rows.groupby(["head_dim", "mask"])
    figure = Figure(figsize=(16, 4 * len(cells)), layout="constrained")
    panels = figure.subplots(len(cells), 3, squeeze=False)
    for line, ((d, mask), cell) in zip(panels, cells, strict=True):
        for panel, (title, columns) in zip(line, PANELS.items(), strict=True):
            for n, name in enumerate(names):
                own = cell[cell["contender"] == name].dropna(subset=columns).sort_values("length", kind="stable")
                if len(own):
                    middle, low, high = (own[column] for column in columns)
                    style = "-" if own["deterministic"].iloc[0] else "--"
                    panel.plot(own["length"], middle, marker=".", label=name, color=f"C{n % 10}", linestyle=style)
                    panel.fill_between(own["length"], low, high, alpha=0.15, color=f"C{n % 10}")
            panel.set_xscale("log", base=2)
            panel.set_xticks(sorted(LENGTHS), [str(n) for n in sorted(LENGTHS)])
            panel.set_title(f"{title}, d = {d}, {mask}")
            panel.grid(alpha=0.3)
    panels[0, 0].legend(fontsize="small")
    figure.suptitle(f"Attention backward on {rows['gpu'].iloc[0]}; solid lines promise the same bits, dashed ones do not")
    figure.supxlabel("sequence length")
    return figure


def _models(rows: pd.DataFrame, names: list[str]) -> Any:
    """TFLOPS of every model, a bar per contender."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 5), layout="constrained")
    panel = figure.subplots()
    drawn = [shape.name for shape in SHAPES if shape.name in set(rows["shape"])]
    for n, (name, own) in enumerate((name, rows[rows["contender"] == name]) for name in names):
        places = own["shape"].map(drawn.index) + (n - len(names) / 2) * 0.8 / len(names)
        hatch = "" if own["deterministic"].all() else "//"
        width, colour = 0.8 / len(names), f"C{n % 10}"
        panel.bar(places, own["tflops"], width, align="edge", label=name, color=colour, hatch=hatch, edgecolor="white")
    panel.set_xticks(range(len(drawn)), drawn)
    panel.set_ylabel("TFLOPS; hatched bars do not promise the same bits")
    panel.legend(fontsize="small")
    panel.grid(alpha=0.3, axis="y")
    return figure
