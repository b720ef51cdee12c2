"""Throughput over length, measured (points) and modelled (lines), one panel per head dim and mask."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import pandas as pd

from .measurements import HEAD_DIMS, LENGTHS, SCHEDULES, Cell


def plot(measured: pd.DataFrame, predicted: Mapping[Cell, float], file: str) -> None:
    """Write the picture; `predicted` holds ms of every schedule at every length. The ending of `file` decides its format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    panels = figure.subplots(len(HEAD_DIMS), 2, sharex=True)
    for panel, (d, causal) in zip(panels.flat, product(HEAD_DIMS, (False, True)), strict=True):
        for number, schedule in enumerate(SCHEDULES):
            line = [Cell(schedule, d, causal, seqlen) for seqlen in LENGTHS]
            points = measured[measured["cell"].isin(line)]
            panel.plot(LENGTHS, [cell.flop / predicted[cell] / 1e9 for cell in line], color=f"C{number}", label=schedule)
            panel.plot(points["seqlen"], points["tflops"], "o", color=f"C{number}")
        panel.set_xscale("log", base=2)
        panel.set_xticks(LENGTHS, [str(seqlen) for seqlen in LENGTHS])
        panel.set_title(f"head dim {d}, {'causal' if causal else 'full'}")
        panel.grid(alpha=0.3)
    panels[0, 0].legend()
    figure.supxlabel("sequence length (16,384 tokens in all)")
    figure.supylabel("TFLOPS, measured (points) and modelled (lines)")
    figure.savefig(file, dpi=120)
