"""From clocks of the replay to the time that the cost files give: at a clock, with what measurements leave of it.

The clock is a guess at what an H100 SXM holds under matmuls. The share is fitted at that clock, so that their product alone
counts. It is a fit to two published backward kernels, FlashAttention-3 at d = 128 on an H100 SXM
(B 4, H 48, length 8192; pytorch-labs/tritonbench #1256 and #1267), replayed from flash-attn3-jax 0.2.3:

| | cycles a step | TFLOPS at 1.6 GHz | measured | share |
|---|---|---|---|---|
| full, tiles of 80 x 128 | 3994 | 693 | 561 | 0.81 |
| causal, tiles of 64 x 128 | 3237 | 684 | 539 | 0.79 |

It holds what one SM does not show: the clock under power, tails, HBM, contention for L2. Two rows of one kernel prove little.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import Replay

CLOCK_GHZ = 1.6
SHARE = 0.80


def time_ns(cycles: float) -> float:
    """What clocks of the replay take on a whole GPU.

    >>> round(time_ns(1280))
    1000
    """
    return cycles / (CLOCK_GHZ * SHARE)


def tflops(steps: Sequence[Replay], sms: int) -> float:
    """Of one pass on a whole GPU, in the mean of some kernels of one tile."""
    return sum(step.flop for step in steps) * sms / sum(time_ns(step.cycles) for step in steps) / 1000


def two_pass_percent(two: Sequence[Replay], one: Sequence[Replay]) -> float:
    """The time of a tile in all loops of two passes, in percent of its step in one; all of tiles with as many elements.

    Of several kernels each, as many of two passes as of one.
    """
    return 100 * sum(step.cycles for step in two) / sum(step.cycles for step in one)


def hop_ns(steps: Sequence[Replay]) -> float:
    """From a CTA's poll to the next CTA's, at the least, in the mean of some kernels that poll."""
    handovers = [step.handover_cycles for step in steps if step.handover_cycles is not None]
    return time_ns(sum(handovers) / len(handovers))
