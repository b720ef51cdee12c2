"""What a step takes on an SM of a B200 if nothing overlaps: an estimate from instruction counts, which its cost file is made of.

Three terms, one after the other, for both templates alike:

- the instructions of the main loop, which four schedulers issue one a clock each;
- the matmuls. One of 64 rows takes as long as one of 128, since tensor memory has 128 lanes: a guess;
- the fp32 additions of dQ, of one pass alone.

A GPU overlaps some of this, and waits for what is not in it: barriers, tensor memory, L2. Nothing was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dash_inductor.devices import SCHEDULERS
from dash_inductor.schedule.costs import FLOP_PER_ELEMENT, KV_MATMULS, Q_MATMULS
from dash_inductor.templates.tiles import AnyTile, Tile

# Of the tensor cores, dense, in bf16: FlashAttention-4 (arXiv 2603.05451), section 2. NVIDIA's 2,250 TFLOPS of 148 SMs are that
# at 1.856 GHz.
MATMUL_FLOP_PER_CLOCK = 8192
CLOCK_GHZ = 1.856
LANES = 128  # of tensor memory (PTX ISA, "Tensor Memory")
# Of fp32 additions of an SM to memory: on an H200 64 KB in 1.36 us, 747 TFLOPS without them and 471 with (flash-attention
# PR 2889).
ADDITION_BYTES_PER_CLOCK = 32


@dataclass(frozen=True)
class SerialStep:
    """Clocks of a step, of all kinds of CTAs together; `elements` of the scores, and FLOP of five matmuls for them."""

    issue: float
    matmuls: float
    additions: float
    elements: int
    flop: int

    @property
    def clocks(self) -> float:
        """One after the other."""
        return self.issue + self.matmuls + self.additions


def serial_step(tile: AnyTile, instructions: int, num_warps: int) -> SerialStep:
    """The step of a kernel with so many instructions in its main loops.

    >>> from dash_inductor.templates.tiles import tile, two_pass_tile
    >>> serial_step(tile(100, "bf16", 128), 550, 8)
    SerialStep(issue=1100.0, matmuls=1280.0, additions=1024.0, elements=4096, flop=5242880)
    >>> serial_step(two_pass_tile(100, "bf16", 128), 888, 8)
    SerialStep(issue=1776.0, matmuls=1792.0, additions=0.0, elements=8192, flop=10485760)
    """
    if isinstance(tile, Tile):
        elements = tile.block_m * tile.block_n
        rows = [tile.block_n] * 4 + [tile.block_d if tile.dq_transposed else tile.block_m]  # of S, dP, dV, dK; of dQ
        additions = 4 * tile.block_m * tile.block_d / ADDITION_BYTES_PER_CLOCK
    else:
        elements = tile.kv_rows * tile.block_m
        if elements != tile.q_rows * tile.block_n or tile.split:
            raise ValueError(f"steps of {tile} differ in size")
        rows = [tile.kv_rows] * KV_MATMULS + [tile.q_rows] * Q_MATMULS
        additions = 0.0
    flop = 2 * elements * tile.mean_dim  # of a matmul
    matmuls = sum(flop * max(1, LANES / each) for each in rows) / MATMUL_FLOP_PER_CLOCK
    return SerialStep(
        instructions * num_warps / SCHEDULERS, matmuls, additions, elements, elements * tile.mean_dim * FLOP_PER_ELEMENT
    )


def tflops(steps: Sequence[SerialStep], sms: int) -> float:
    """TFLOPS of one pass on a whole GPU, in the mean of some kernels of one tile."""
    return sum(step.flop for step in steps) * sms * CLOCK_GHZ / sum(step.clocks for step in steps) / 1000


def two_pass_percent(two: Sequence[SerialStep], one: Sequence[SerialStep]) -> float:
    """The time of an element in two passes, in percent of that in one; in the mean of some kernels each."""

    def of_element(steps: Sequence[SerialStep]) -> float:
        return sum(step.clocks for step in steps) / sum(step.elements for step in steps)

    return 100 * of_element(two) / of_element(one)
