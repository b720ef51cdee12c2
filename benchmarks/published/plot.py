"""Pictures: predicted over published TFLOPS, where both are the same on the line; and our speed beside others'."""

from __future__ import annotations

from collections.abc import Sequence

from .beside import LENGTHS, Speeds
from .errors import Row
from .model import LONG
from .steps import BANDWIDTH

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


def beside(speeds: Sequence[Speeds], file: str) -> None:
    """Write the picture: a panel for each head dim and mask, TFLOPS over the length."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    shapes = list(dict.fromkeys((each.attention.head_dim, each.attention.mask) for each in speeds))
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    for panel, (head_dim, mask) in zip(panels.flat, shapes, strict=True):
        own = [each for each in speeds if (each.attention.head_dim, each.attention.mask) == (head_dim, mask)]
        (ours,) = panel.plot(LENGTHS, [each.ours[BANDWIDTH] for each in own], "o-", label="ours in Triton")
        least, most = ([edge(each.ours.values()) for each in own] for edge in (min, max))
        panel.fill_between(LENGTHS, least, most, color=ours.get_color(), alpha=0.2)
        for name in own[0].others:
            label = "ours in Gluon" if name == "Gluon" else name
            panel.plot(LENGTHS, [each.others[name] for each in own], "o--", label=label)
        known = [each for each in own if each.published]
        panel.plot(
            [each.attention.length for each in known],
            [each.published for each in known],
            "k*",
            label="FA3 deterministic, published",
        )
        panel.set_xscale("log", base=2)
        panel.set_xticks(LENGTHS, [str(length) for length in LENGTHS])
        panel.set_title(f"head dim {head_dim}, {mask}")
        panel.grid(alpha=0.3)
    panels.flat[0].set_ylim(0)
    figure.legend(*panels.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=5)
    figure.supxlabel("sequence length (16,384 tokens in all)")
    figure.supylabel("TFLOPS of the backward on an H100, predicted")
    figure.savefig(file, dpi=120)
