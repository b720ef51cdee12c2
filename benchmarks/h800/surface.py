"""Makespans on a grid of constants, and between its points by interpolation: what a fit can afford to evaluate."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from scipy.interpolate import RegularGridInterpolator

from .makespan import Floats, makespan
from .measurements import Cell
from .placement import Placement, place

GRID = ([0.3, 0.5, 0.7, 0.9, 1.1], [0.5, 3.0], [0.0, 0.1, 0.2, 0.3])  # of hop, overhead and jitter


@cache
def surface(placement: Placement) -> Floats:
    """Makespan in steps at every point of GRID, [hop, overhead, jitter]."""
    points = np.meshgrid(*GRID, indexing="ij")
    return makespan(placement, *(axis.ravel() for axis in points)).reshape(points[0].shape)


def makespans(cells: Sequence[Cell], hop: Floats, overhead: Floats, jitter: float) -> Floats:
    """Makespan in steps of each cell at its own hop and overhead, linear between and beyond the points of the grid."""
    number = np.arange(len(cells))  # of the cell: an axis of its own, with every point on the grid
    surfaces = np.stack([surface(place(cell)) for cell in cells])
    interpolator = RegularGridInterpolator((number, *GRID), surfaces, bounds_error=False, fill_value=None)
    return interpolator(np.column_stack(np.broadcast_arrays(number, hop, overhead, jitter)))
