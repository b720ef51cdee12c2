"""Throughput over length, measured (points) and modelled (lines), one panel per head dim and mask."""

from __future__ import annotations

from collections.abc import Sequence

from .evaluation import Times
from .measurements import HEAD_DIMS, LENGTHS, SCHEDULES, Cell, Measurement


def plot(measurements: Sequence[Measurement], predicted: Times, file: str) -> None:
    """Write the picture; `predicted` holds every schedule at every length. The ending of `file` decides its format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    panels = figure.subplots(len(HEAD_DIMS), 2, sharex=True)
    for panel, (d, causal) in zip(panels.flat, ((d, causal) for d in HEAD_DIMS for causal in (False, True)), strict=True):
        for number, schedule in enumerate(SCHEDULES):
            line = [Cell(schedule, d, causal, seqlen) for seqlen in LENGTHS]
            points = [m for m in measurements if m.cell in line]
            panel.plot(LENGTHS, [_tflops(cell, predicted[cell]) for cell in line], color=f"C{number}", label=schedule)
            panel.plot([m.cell.seqlen for m in points], [_tflops(m.cell, m.ms) for m in points], "o", color=f"C{number}")
        panel.set_xscale("log", base=2)
        panel.set_xticks(LENGTHS, [str(seqlen) for seqlen in LENGTHS])
        panel.set_title(f"head dim {d}, {'causal' if causal else 'full'}")
        panel.grid(alpha=0.3)
    panels[0, 0].legend()
    figure.supxlabel("sequence length (16,384 tokens in all)")
    figure.supylabel("TFLOPS, measured (points) and modelled (lines)")
    figure.savefig(file, dpi=120)


def _tflops(cell: Cell, ms: float) -> float:
    return cell.flop / ms / 1e9
