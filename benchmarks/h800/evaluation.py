"""How far the model is from the measurements, in sample and for lengths left out of the fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .fit import fit, fit_without
from .measurements import Cell, Measurement
from .model import Fits, predict_all

Times = Mapping[Cell, float]  # ms


@dataclass(frozen=True)
class Pick:
    """The schedule that the model takes to be the fastest of a cell, and what that costs: measured time over the best, minus 1."""

    head_dim: int
    causal: bool
    seqlen: int
    schedule: str
    regret: float


@dataclass(frozen=True)
class Evaluation:
    """Predicted times of all measured cells: from the fit to all rows, and from the fit to the rows of the other lengths."""

    measurements: Sequence[Measurement]
    fits: Fits
    in_sample: Times
    left_out: Times

    @property
    def lengths(self) -> list[int]:
        """The measured ones."""
        return sorted({m.cell.seqlen for m in self.measurements})


def evaluate(measurements: Sequence[Measurement]) -> Evaluation:
    """Fit once to all rows, and once without each length."""
    fits = fit(measurements)
    left_out: dict[Cell, float] = {}
    for seqlen in sorted({m.cell.seqlen for m in measurements}):
        cells = [m.cell for m in measurements if m.cell.seqlen == seqlen]
        left_out |= predict_all(cells, fit_without(measurements, seqlen))
    return Evaluation(measurements, fits, predict_all((m.cell for m in measurements), fits), left_out)


def errors(measurements: Sequence[Measurement], predicted: Times) -> dict[Cell, float]:
    """Predicted over measured time, minus 1.

    >>> errors([Measurement(Cell("shift", 64, False, 512), 2.0)], {Cell("shift", 64, False, 512): 2.1}).values()
    dict_values([0.050000000000000044])
    """
    return {m.cell: predicted[m.cell] / m.ms - 1 for m in measurements}


def picks(measurements: Sequence[Measurement], predicted: Times) -> list[Pick]:
    """The model's choice for every head dim, mask and length."""
    groups: dict[tuple[int, bool, int], list[Measurement]] = {}
    for m in measurements:
        groups.setdefault((m.cell.head_dim, m.cell.causal, m.cell.seqlen), []).append(m)
    found = []
    for key, group in sorted(groups.items()):
        picked = min(group, key=lambda m: predicted[m.cell])
        found.append(Pick(*key, picked.cell.schedule, picked.ms / min(m.ms for m in group) - 1))
    return found


def mean_error(measurements: Sequence[Measurement], predicted: Times, seqlen: int | None = None) -> float:
    """Mean absolute relative error, of one length or of all."""
    found = [abs(e) for cell, e in errors(measurements, predicted).items() if seqlen in (None, cell.seqlen)]
    return sum(found) / len(found)


def mean_regret(measurements: Sequence[Measurement], predicted: Times, seqlen: int | None = None) -> float:
    """Mean regret over head dims, masks and lengths, or of one length."""
    found = [p.regret for p in picks(measurements, predicted) if seqlen in (None, p.seqlen)]
    return sum(found) / len(found)
