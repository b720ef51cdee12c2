"""Constants from measurements: the most probable ones, given the priors and 2 % of measurement error."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from .constants import Constants, Prior, priors
from .makespan import Floats
from .measurements import HEAD_DIMS
from .model import Fits, total_ms
from .surface import makespans

MEASUREMENT_ERROR = 0.02  # relative; ascending and descending are the same schedule under a full mask and differ by as much


def fit(measured: pd.DataFrame) -> Fits:
    """Constants of every head dim. All logarithms are normally distributed: positive constants, relative errors."""
    return {d: _fit(measured[measured["head_dim"] == d], priors(d)) for d in HEAD_DIMS}


def _fit(measured: pd.DataFrame, expected: Mapping[str, Prior]) -> Constants:
    """Least squares in the distance of each constant's logarithm from its prior, in spreads."""
    center = np.log([prior.center for prior in expected.values()])
    spread = np.array([prior.spread for prior in expected.values()])

    def constants(distances: Floats) -> Constants:
        return Constants(**dict(zip(expected, np.exp(center + spread * distances).tolist(), strict=True)))

    def residuals(distances: Floats) -> Floats:
        return np.append(log_errors(measured, constants(distances)) / MEASUREMENT_ERROR, distances)

    return constants(least_squares(residuals, np.zeros(len(expected)), method="lm").x)


def log_errors(measured: pd.DataFrame, constants: Constants) -> Floats:
    """Logarithm of modelled over measured time of each row, the model interpolated between simulations."""
    cells = list(measured["cell"])
    step = np.array([constants.step_of(cell) for cell in cells])
    overhead = np.array([constants.overhead_of(cell) for cell in cells])
    kernel = step * makespans(cells, constants.hop / step, overhead / step, constants.jitter)
    modelled = total_ms(kernel, np.array([float(cell.flop) for cell in cells]), constants)
    return np.log(modelled / measured["ms"].to_numpy())
