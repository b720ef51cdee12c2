"""How far predictions are off the published figures, by the law and by the law fitted without the kernel in question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.machine_code.replay.pricing import LAW, ClockLaw

from .loops import Loop
from .model import LONG, Figure, fit, predicted


@dataclass(frozen=True)
class Row:
    """One figure, in TFLOPS, and what is predicted of it."""

    figure: Figure
    predicted: float
    left_out: float  # by a law that was fitted without its kernel, under any mask

    @property
    def error(self) -> float:
        """Relative to the published."""
        return self.predicted / self.figure.tflops - 1

    @property
    def left_out_error(self) -> float:
        """The same of `left_out`."""
        return self.left_out / self.figure.tflops - 1

    @property
    def counts(self) -> bool:
        """Whether it is in the errors that are asserted."""
        return self.figure.length >= LONG and not self.figure.is_held_out


@dataclass(frozen=True)
class Errors:
    """Of some rows, all relative."""

    count: int
    mean: float
    mean_absolute: float
    worst: float

    def __str__(self) -> str:
        return f"{self.count} figures, mean {self.mean:+.1%}, mean absolute {self.mean_absolute:.1%}, worst {self.worst:+.1%}"


def rows(figures: Sequence[Figure], loops: dict[str, Loop], law: ClockLaw = LAW) -> list[Row]:
    """Of every figure whose loop is there."""
    figures = [figure for figure in figures if figure.kernel.label in loops]
    known = [figure for figure in figures if not figure.is_held_out]
    made = []
    for figure in figures:
        loop = loops[figure.kernel.label]
        others = fit([each for each in known if each.kernel.name_and_pass != figure.kernel.name_and_pass], loops)
        made.append(Row(figure, predicted(figure, loop, law), predicted(figure, loop, others)))
    return made


def errors(values: Sequence[float]) -> Errors:
    """Their summary."""
    return Errors(
        len(values), sum(values) / len(values), sum(map(abs, values)) / len(values), max(values, key=lambda value: abs(value))
    )
