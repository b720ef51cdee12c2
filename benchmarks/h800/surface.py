"""Makespans on a grid of constants, and between its points by interpolation: what a fit can afford to evaluate."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from .makespan import Floats, makespan
from .measurements import Cell
from .placement import Placement, place

HOPS = np.array([0.3, 0.5, 0.7, 0.9, 1.1])
OVERHEADS = np.array([0.5, 3.0])
JITTERS = np.array([0.0, 0.1, 0.2, 0.3])


@cache
def surface(placement: Placement) -> Floats:
    """Makespan in steps, [HOPS, OVERHEADS, JITTERS]."""
    grid = np.meshgrid(HOPS, OVERHEADS, JITTERS, indexing="ij")
    return makespan(placement, *(axis.ravel() for axis in grid)).reshape(grid[0].shape)


def makespans(cells: Sequence[Cell], hop: Floats, overhead: Floats, jitter: float) -> Floats:
    """Makespan in steps of each cell at its own hop and overhead, linear between and beyond the points of the grid."""
    tables = np.stack([surface(place(cell)) for cell in cells])
    weights = _weights(HOPS, hop), _weights(OVERHEADS, overhead), _weights(JITTERS, np.full(len(cells), jitter))
    return np.einsum("choj,ch,co,cj->c", tables, *weights)


def _weights(axis: Floats, at: Floats) -> Floats:
    """Weight of each point of `axis` in a linear interpolation at each of `at`: [at, axis], of which two are not 0."""
    left: NDArray[np.intp] = np.clip(np.searchsorted(axis, at) - 1, 0, len(axis) - 2)
    share = (at - axis[left]) / (axis[left + 1] - axis[left])
    weights = np.zeros((len(at), len(axis)))
    rows = np.arange(len(at))
    weights[rows, left], weights[rows, left + 1] = 1 - share, share
    return weights
