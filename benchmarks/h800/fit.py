"""Constants from measurements: the most probable ones, given the priors and 2 % of measurement error."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .constants import Constants, priors
from .makespan import Floats
from .measurements import HEAD_DIMS, Measurement
from .model import Fits, total_ms
from .surface import makespans

MEASUREMENT_ERROR = 0.02  # relative; ascending and descending are the same schedule under a full mask and differ by as much
DIFFERENCE = 1e-4  # of the logarithm of a constant, for derivatives
ITERATIONS = 50
CONVERGED = 1e-9  # relative gain of an iteration


def fit(measurements: Sequence[Measurement]) -> Fits:
    """Constants of every head dim. All logarithms are normally distributed: positive constants, relative errors."""
    return {d: _fit([m for m in measurements if m.cell.head_dim == d], d) for d in HEAD_DIMS}


def fit_without(measurements: Sequence[Measurement], seqlen: int) -> Fits:
    """The fit to all other lengths."""
    return fit([m for m in measurements if m.cell.seqlen != seqlen])


def _fit(measurements: Sequence[Measurement], head_dim: int) -> Constants:
    """Levenberg-Marquardt on the logarithms of the constants."""
    expected = priors(head_dim)
    center = np.log([p.center for p in expected.values()])
    spread = np.array([p.spread for p in expected.values()])

    def constants(logs: Floats) -> Constants:
        return Constants(**dict(zip(expected, np.exp(logs).tolist(), strict=True)))

    def residuals(logs: Floats) -> Floats:
        return np.append(errors(measurements, constants(logs)) / MEASUREMENT_ERROR, (logs - center) / spread)

    logs, damping = center, 1e-2
    current = residuals(logs)
    for _ in range(ITERATIONS):
        jacobian = np.stack([(residuals(logs + step) - current) / DIFFERENCE for step in DIFFERENCE * np.eye(len(logs))], axis=1)
        normal = jacobian.T @ jacobian
        moved = logs - np.linalg.solve(normal + damping * np.diag(normal.diagonal()), jacobian.T @ current)
        proposed = residuals(moved)
        gain = current @ current - proposed @ proposed
        if gain <= 0:
            damping *= 5
            continue
        logs, current, damping = moved, proposed, damping / 5
        if gain < CONVERGED * (current @ current):
            break
    return constants(logs)


def errors(measurements: Sequence[Measurement], constants: Constants) -> Floats:
    """Logarithm of modelled over measured time, the model interpolated between simulations."""
    cells = [m.cell for m in measurements]
    step = np.array([constants.step_of(cell) for cell in cells])
    overhead = np.array([constants.overhead_of(cell) for cell in cells])
    kernel = step * makespans(cells, constants.hop / step, overhead / step, constants.jitter)
    modelled = total_ms(kernel, np.array([float(cell.flop) for cell in cells]), constants)
    return np.log(modelled / np.array([m.ms for m in measurements]))
