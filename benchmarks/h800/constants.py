"""The physical constants of the model, one set per head dim, and what is known of them before any measurement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .measurements import Cell

BOOST_TFLOPS = 132 * 4096 * 1.98e9 / 1e12  # dense bf16 at the boost clock: SMs * FLOP per SM and clock * 1.98 GHz
SM_BYTES_PER_US = 3.35e6 / 132  # an SM's share of 3.35 TB/s


@dataclass(frozen=True)
class Constants:
    """Times in us, the rest plain factors.

    fixed: everything but the main kernel: delta, zeroing and casting dQ, launches. All 16,384 tokens, whatever their length.
    chain: loading K and V, storing dK and dV of one chain. launch: starting one CTA, where each unit has its own.
    step: one tile step, full mask, unthrottled clock. hop: from one addition to a Q tile to the next, by another CTA.
    shift_full, shift_causal: factors on a step of the shifted schedules, which have more index arithmetic and spill.
    causal: factor on a step under the causal mask; at head dim 128 its tile has 64 rows in place of 80.
    jitter: standard deviation of a step, relative to its mean.
    throttle: relative slowdown of the main kernel at 1,000 TFLOPS: the clock falls with the power drawn.
    """

    fixed: float
    chain: float
    launch: float
    step: float
    hop: float
    shift_full: float
    shift_causal: float
    causal: float
    jitter: float
    throttle: float

    def step_of(self, cell: Cell) -> float:
        """One step of the cell's schedule, us."""
        factor = self.causal if cell.causal else 1.0
        if cell.schedule.startswith("shift"):
            factor *= self.shift_causal if cell.causal else self.shift_full
        return self.step * factor

    def overhead_of(self, cell: Cell) -> float:
        """What a chain takes beside its steps, us; a causal shift's CTA runs two chains, which share its launch."""
        if cell.schedule.endswith("persistent"):
            return self.chain
        return self.chain + self.launch / (2 if cell.causal and cell.schedule == "shift" else 1)


class Prior(NamedTuple):
    """An estimate, right to within exp(+-spread) with the probability of one standard deviation."""

    center: float
    spread: float


def priors(head_dim: int) -> dict[str, Prior]:
    """An estimate of each constant, by name, with its source. They steady the fit where rows are few."""
    rows = 128 if head_dim == 64 else 80  # of a Q tile
    peak = 10 * rows * 128 * head_dim / (BOOST_TFLOPS / 132 * 1e6)
    chain_bytes = 4 * 128 * head_dim * 2
    return dict(
        fixed=Prior(250.0, 0.3),  # 470 MB at 80 % of 3.35 TB/s take 175; launches and ramps, estimated
        chain=Prior(chain_bytes / SM_BYTES_PER_US, 0.5),  # at an equal share of the memory; may hide under other steps
        launch=Prior(1.0, 0.5),  # a CTA's start and its barriers, estimated
        step=Prior(peak / 0.75, 0.3),  # three quarters of the boost clock's peak
        hop=Prior(1.5, 0.3),  # a 32 KiB reduction in L2, a release and an acquire, estimated
        shift_full=Prior(1.07, 0.05),  # index arithmetic, estimated
        shift_causal=Prior(1.07, 0.05),
        causal=Prior(1.0 if head_dim == 64 else 64 / 80, 0.1),  # rows of the tile
        jitter=Prior(0.15, 0.4),  # estimated
        throttle=Prior(0.5, 0.5),  # 1.98 GHz idle, 1.6 GHz at 500 TFLOPS, estimated
    )
