"""A picture of predicted over published TFLOPS, which are the same on the line."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import Row
from .model import LONG

BAND = 0.10  # of the shaded band around the line


def plot(rows: Sequence[Row], file: str) -> None:
    """Write the picture; the ending of `file` decides its format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), layout="constrained")
    panel = figure.subplots()
    most = 1.1 * max(row.figure.tflops for row in rows)
    panel.plot([0, most], [0, most], color="black", linewidth=1)
    panel.fill_between([0, most], [0, most * (1 - BAND)], [0, most * (1 + BAND)], alpha=0.15, label=f"{BAND:.0%} either way")
    for label in dict.fromkeys(row.figure.kernel.label for row in rows):
        own = [row for row in rows if row.figure.kernel.label == label]
        (points,) = panel.plot([], [], "o", label=label)
        for row in own:
            filled = "full" if row.figure.length >= LONG and not row.figure.is_held_out else "none"
            panel.plot(row.figure.tflops, row.predicted, "o", color=points.get_color(), fillstyle=filled)
    panel.set(xlabel="TFLOPS published", ylabel="TFLOPS predicted", xlim=(100, most), ylim=(100, most))
    panel.set_title(f"H100. Hollow: below {LONG} positions, or in no fit")
    panel.legend(fontsize="small")
    panel.grid(alpha=0.3)
    figure.savefig(file, dpi=120)
