"""Cost constants of a device, as the choice of a schedule takes them."""

from __future__ import annotations

from dataclasses import dataclass

FLOP_PER_ELEMENT = 10  # five matmuls of two FLOP per element of a tile step and head-dim entry
SWEEP_CTAS = 4  # of which one reads each Q tile from memory, and the others hit L2
MOST_SMS = 1024  # that a setting or a cost file may say; no GPU has 200
KV_MATMULS, Q_MATMULS = 4, 3  # matmuls per step of two passes: dK/dV 4 (5 if split), dQ 3
# Of an element: delta is summed of out and its gradient; dQ's sum is read in fp32, and written in 16 bits.
DELTA_BYTES, ROUNDING_BYTES = 4, 6


@dataclass(frozen=True)
class Launches:
    """What the kernels of a backward take beside the chains of the main one.

    Before it a kernel sums delta. One pass also clears its semaphores, and rounds dQ behind it.
    """

    main_ns: int = 0  # of the main kernel's launch
    small_ns: int = 0  # of each of the others, beside what it moves
    gbps: int = 0  # what those move in a ns, in bytes; 0 where that takes no time

    def beside_ns(self, elements: int, *, two_pass: bool) -> int:
        """The time for so many elements of dQ, of all heads."""
        launches, size = (1, DELTA_BYTES) if two_pass else (3, DELTA_BYTES + ROUNDING_BYTES)
        moved_ns = elements * size // self.gbps if self.gbps else 0
        return self.main_ns + launches * self.small_ns + moved_ns


@dataclass(frozen=True)
class TwoPass:
    """dK/dV and dQ by CTAs of their own, in a plain launch: nobody waits.

    For dK/dV a CTA keeps `kv_rows` keys of a kv head and takes `block_m` query rows a step; for dQ it keeps `q_rows` query rows and
    takes `block_n` keys a step.
    """

    block_m: int
    block_n: int
    kv_rows: int
    q_rows: int
    kv_step_ns: int  # a step of one query head
    q_step_ns: int
    workers: int  # CTAs that run at once
    split: bool  # dK and dV have CTAs of their own; a step is then one of either, on average
    estimate: bool  # whether any number is not a measurement
    end_ns: int = 0  # the beginning and end of a CTA, beside its steps
    launches: Launches = Launches()

    @property
    def margin_percent(self) -> int:
        """How much faster than one pass they must be."""
        return two_pass_margin(self.estimate)


@dataclass(frozen=True)
class Costs:
    """What the choice of a schedule depends on, integers throughout."""

    device: str
    arch: str
    step_ns: int  # tau: one tile step of one query head
    hop_ns: int  # lam: reduction plus hand-off to another CTA
    shift_percent: int  # how much more a step costs off the common sweep (shift, symmetric)
    workers: int  # P: CTAs resident at once
    l2_bytes: int
    estimate: bool  # whether any number is not a measurement
    chain_ns: int = 0  # the beginning and end of a chain, beside its steps
    launches: Launches = Launches()
    sweep_percent: int = 0  # how much more a step costs of SWEEP_CTAS that sweep a head, where L2 does not hold the heads in flight
    margin_percent: int = 2  # how much faster than the default another candidate must be: what the model may be off
    two_pass: TwoPass | None = None  # None where two passes are no candidate

    @property
    def shifted_step_ns(self) -> int:
        """tau of shift and symmetric, whose CTAs do not sweep the same tiles at the same time."""
        return self.step_ns * (100 + self.shift_percent) // 100

    def swept_step_ns(self, roles: int) -> int:
        """tau where `roles` CTAs sweep a head in step, and L2 does not hold the heads in flight: one of them reads from memory."""
        return self.step_ns * (100 * roles + self.sweep_percent * SWEEP_CTAS) // (100 * roles)


def two_pass_margin(estimate: bool) -> int:
    """5 % while the costs of two passes are estimates (a guess at their error), else the usual margin."""
    return 5 if estimate else Costs.margin_percent
