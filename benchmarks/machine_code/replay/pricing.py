"""From clocks of the replay to the time that the cost files give: at a clock that falls as the tensor cores are busier.

Under matmuls an H100 draws all the power it may, and lowers its clock. LAW is a line through published speeds of other people's
kernels, whose main loops were replayed: `python -m benchmarks.published` fits it, and prints how far each figure is off. It holds
what one SM does not show: the clock under power, contention for L2, the replay's own optimism. So it is no clock that a tool of
NVIDIA's would show. No kernel of ours is in the fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from . import Replay
from .constants import Constants


@dataclass(frozen=True)
class ClockLaw:
    """The clock in GHz: `idle` less `slope` times the share of the clocks in which the tensor cores work."""

    idle: float
    slope: float

    def ghz(self, share: float) -> float:
        """At a `tensor_share`."""
        return self.idle - self.slope * share


LAW = ClockLaw(2.027, 0.770)


def tensor_share(flop: float, cycles: float) -> float:
    """The part of the clocks that the matmuls take at Hopper's full rate, 4096 FLOP a clock and SM.

    >>> tensor_share(4096 * 50, 100)
    0.5
    """
    return flop / cycles / Constants().tensor_flop


def time_ns(step: Replay) -> float:
    """What a step takes on a whole GPU."""
    return step.cycles / LAW.ghz(tensor_share(step.flop, step.cycles))


def tflops(steps: Sequence[Replay], sms: int) -> float:
    """Of one pass on a whole GPU, in the mean of some kernels of one tile."""
    return sum(step.flop for step in steps) * sms / sum(map(time_ns, steps)) / 1000


def two_pass_percent(two: Sequence[Replay], one: Sequence[Replay], tiles: int = 1) -> float:
    """The time of a tile in all loops of two passes, in percent of what it takes in a step of one, which does the elements of so
    many tiles.

    Of several kernels each, as many of two passes as of one.
    """
    return 100 * tiles * sum(map(time_ns, two)) / sum(map(time_ns, one))


def handover_by_tma(tile_bytes: int, constants: Constants = Constants()) -> float:  # noqa: B008 (frozen)
    """As `Replay.handover_cycles`, where a warp of its own adds a tile of dQ by TMA, as in the Gluon kernel.

    It is what the replay counts of such operations, one after the other. What TMA takes to begin has no constant, and is left out.
    """
    acknowledged = constants.async_fence + tile_bytes / constants.addition_bandwidth + constants.l2_latency
    released = acknowledged + constants.gpu_fence + constants.l2_latency / 2
    return released + constants.l2_latency  # of the other CTA's poll


def hop_ns(steps: Sequence[Replay]) -> float:
    """From a CTA's poll to the next CTA's, at the least, in the mean of some kernels that poll."""
    hops = [time_ns(step) * step.handover_cycles / step.cycles for step in steps if step.handover_cycles is not None]
    return sum(hops) / len(hops)
