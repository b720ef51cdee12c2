"""From constants to the time of a backward: simulated makespan, throttled clock, fixed cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np

from .constants import Constants
from .makespan import makespan
from .measurements import Cell
from .placement import Placement, place

Fits = Mapping[int, Constants]  # by head dim


def predict(cell: Cell, constants: Constants) -> float:
    """Time of one backward in ms."""
    step = constants.step_of(cell)
    steps = _steps(place(cell), constants.hop / step, constants.overhead_of(cell) / step, constants.jitter)
    return float(total_ms(step * steps, cell.flop, constants))


def predict_all(cells: Iterable[Cell], fits: Fits) -> dict[Cell, float]:
    """Time of each cell in ms."""
    return {cell: predict(cell, fits[cell.head_dim]) for cell in cells}


@cache
def _steps(placement: Placement, hop: float, overhead: float, jitter: float) -> float:
    return float(makespan(placement, hop, overhead, jitter)[0])


def total_ms(kernel_us: Any, flop: Any, constants: Constants) -> Any:
    """Fixed cost and main kernel, slowed by the power that the whole draws, of floats or of arrays.

    T = fixed + kernel * (1 + throttle * flop / T), solved for T.

    >>> c = Constants(100, 0, 0, 0, 0, 0, 0, 0, 0, throttle=0.5)
    >>> [round(float(total_ms(400, flop, c)), 3) for flop in (0, 300e9)]  # the latter at 500 TFLOPS
    [0.5, 0.6]
    """
    unthrottled = constants.fixed + kernel_us
    work = flop / 1e9  # us at 1,000 TFLOPS
    return (unthrottled + np.sqrt(unthrottled**2 + 4 * constants.throttle * kernel_us * work)) / 2e3
