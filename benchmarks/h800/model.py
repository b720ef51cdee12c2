"""From constants to the time of a backward: simulated makespan, throttled clock, fixed cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import numpy as np

from .constants import Constants
from .makespan import makespan
from .measurements import Cell
from .placement import place

Number = TypeVar("Number", float, Any)
Fits = Mapping[int, Constants]  # by head dim


def predict(cell: Cell, constants: Constants) -> float:
    """Time of one backward in ms."""
    step = constants.step_of(cell)
    steps = makespan(place(cell), constants.hop / step, constants.overhead_of(cell) / step, constants.jitter)
    return total_ms(step * float(steps[0]), cell.flop, constants)


def predict_all(cells: Iterable[Cell], fits: Fits) -> dict[Cell, float]:
    """Time of each cell in ms."""
    return {cell: predict(cell, fits[cell.head_dim]) for cell in cells}


def total_ms(kernel_us: Number, flop: Number, constants: Constants) -> Number:
    """Fixed cost and main kernel, slowed by the power that the whole draws: T = fixed + kernel * (1 + throttle * flop / T).

    >>> c = Constants(100, 0, 0, 0, 0, 0, 0, 0, 0, throttle=0.5)
    >>> total_ms(400.0, 0, c), round(total_ms(400.0, 300e9, c), 3)  # 545 TFLOPS
    (0.5, 0.607)
    """
    unthrottled = constants.fixed + kernel_us
    work = flop / 1e9  # us at 1,000 TFLOPS
    return (unthrottled + np.sqrt(unthrottled**2 + 4 * constants.throttle * kernel_us * work)) / 2e3
