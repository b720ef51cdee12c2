"""The cost constants of a device from timings of its kernel: a fit without a device, so that it can be tested without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..schedule.formulas import monotone, shift

NAMES = ("launch_ns", "chain_ns", "step_ns", "shifted_step_ns", "hop_ns")


@dataclass(frozen=True)
class Timing:
    """One measured launch, full mask, one query head per kv head, roles dividing n_kv.

    heads is a multiple of heads_in_flight: no round is short.
    """

    family: str  # ascending or shift
    n_q: int
    n_kv: int
    heads: int
    roles: int
    heads_in_flight: int
    ns: float

    @property
    def terms(self) -> tuple[int, ...]:
        """How often each constant is paid, in the order of NAMES, by the family's formula for hops shorter than a step."""
        shifted = self.family == "shift"
        formula = shift.GROUPED if shifted else monotone.FULL
        sizes = self.n_q, self.n_kv, 1, self.heads, self.roles, self.heads_in_flight
        times = formula(*sizes, 0, 0, 1), formula(*sizes, 1, 0, 0), formula(*sizes, self.roles, 1, 0)
        chains, steps, together = (time.ns for time in times if time)
        return 1, chains, 0 if shifted else steps, steps if shifted else 0, together - self.roles * steps


@dataclass(frozen=True)
class Constants:
    """What was fitted, in ns, and the mean relative error of the fit."""

    launch_ns: float
    chain_ns: float
    step_ns: float
    shifted_step_ns: float
    hop_ns: float
    error: float

    @property
    def shift_percent(self) -> int:
        """How much more a step costs off the common sweep."""
        return max(0, round(100 * (self.shifted_step_ns / self.step_ns - 1)))


@dataclass(frozen=True)
class TwoPassTiming:
    """A launch of two passes in whole waves: tiles of one pass's size that an SM has to do, and ns."""

    tiles: float
    ns: float


def percent_of(few: TwoPassTiming, many: TwoPassTiming, *, step_ns: float) -> int:
    """The time of a tile in two passes, in percent of its step in one pass; what launches cost beside cancels out.

    >>> percent_of(TwoPassTiming(1000, 2_110_000), TwoPassTiming(4000, 8_410_000), step_ns=2000)
    105
    """
    if not few.ns < many.ns or not few.tiles < many.tiles:
        raise ValueError(f"{many.tiles:.0f} tiles took {many.ns:.0f} ns, and {few.tiles:.0f} took {few.ns:.0f}")
    return round(100 * (many.ns - few.ns) / (many.tiles - few.tiles) / step_ns)


def fit(timings: Sequence[Timing]) -> Constants:
    """Constants with the least sum of squared relative errors; ValueError if the timings do not tell them apart.

    >>> def timing(family, n_q, n, rounds):
    ...     ns = 5000 + rounds * (300 + n_q * (2000 if family == "ascending" else 2140)) + (n - 1) * 1500 * (family == "ascending")
    ...     return Timing(family, n_q, n, rounds * 2, n, 2, ns)
    >>> runs = [timing(f, n_q, n, r) for f in ("ascending", "shift") for n_q, n in ((64, 8), (64, 32), (128, 16)) for r in (1, 3)]
    >>> values = fit(runs)
    >>> [round(getattr(values, name)) for name in NAMES], values.shift_percent
    ([5000, 300, 2000, 2140, 1500], 7)
    """
    import torch

    if not timings:
        raise ValueError("nothing was measured")
    rows = torch.tensor([[term / t.ns for term in t.terms] for t in timings], dtype=torch.float64)
    scale = rows.norm(dim=0)
    if not scale.all():
        raise ValueError(f"no timing depends on {NAMES[scale.tolist().index(0)]}")
    if torch.linalg.matrix_rank(rows / scale) < len(NAMES):
        raise ValueError("the timings do not tell the constants apart: vary lengths, heads and family")
    ones = torch.ones(len(timings), 1, dtype=torch.float64)
    solution = (torch.linalg.lstsq(rows / scale, ones).solution / scale[:, None]).squeeze(1)
    values = dict(zip(NAMES, solution.tolist(), strict=True))
    error = (rows @ solution - 1).abs().mean().item()
    constants = Constants(**values, error=error)
    for name in ("step_ns", "shifted_step_ns", "hop_ns"):
        if values[name] <= 0:
            raise ValueError(f"the fit gives {name} = {values[name]:.1f}: the timings are too noisy, or too few")
    return constants
