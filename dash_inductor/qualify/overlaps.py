"""What the replay of a main loop assumes of Hopper, measured: how long work on shared memory takes beside matmuls in flight.

Two warpgroups each multiply 64 x 128 by 128 x 128, in bf16, as fast as they can, one CTA an SM. Under each matmul a warp does
nothing, or loads 16 pairs of floats, each for eight of its lanes, or stores its part of a tile, fences it and meets the others, or
does both. The SM's own clock counts.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from .rows import write

FILE = "overlaps.csv"
STEPS = 2048
SIZE = 128  # rows and columns of every tile
barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # from Triton 3.7 on; before
WITH = ("nothing", "loads", "stores, a fence and a barrier", "loads, stores, a fence and a barrier")


@gluon.jit
def clock():
    return gl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l,~{memory}", [], dtype=gl.int64, is_pure=False, pack=1)


@gluon.jit
def multiply(CLOCKS, SUMS, steps, LOADS: gl.constexpr, STORES: gl.constexpr, SIZE: gl.constexpr):
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    ROW: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    ACCUMULATOR: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, SIZE, 16])
    zeros = gl.zeros([SIZE, SIZE], gl.float32, ACCUMULATOR)
    a = gl.allocate_shared_memory(gl.bfloat16, [SIZE, SIZE], TILE, zeros.to(gl.bfloat16))
    b = gl.allocate_shared_memory(gl.bfloat16, [SIZE, SIZE], TILE, zeros.to(gl.bfloat16))
    tile = gl.allocate_shared_memory(gl.bfloat16, [SIZE, SIZE], TILE, zeros.to(gl.bfloat16))
    row = gl.zeros([SIZE], gl.float32, gl.SliceLayout(0, ACCUMULATOR))
    rows = gl.allocate_shared_memory(gl.float32, [4, SIZE], ROW)
    for n in gl.static_range(4):
        rows.index(n).store(row)
    fence_async_shared()
    barrier()
    stored = tile.load(ACCUMULATOR)
    sums = zeros
    begin = clock()
    for step in range(steps):
        sums = warpgroup_mma(a, b, sums, is_async=True)
        if LOADS:
            row += rows.index(step % 4).load(gl.SliceLayout(0, ACCUMULATOR))
        if STORES:
            tile.store(stored)
            fence_async_shared()
            barrier()  # without it ptxas crashes, that of Triton 3.6 and 3.7
        sums = warpgroup_mma_wait(0, deps=[sums])
    end = clock()
    gl.store(CLOCKS + gl.program_id(0), end - begin)
    gl.store(SUMS + gl.program_id(0), gl.sum(gl.sum(sums + gl.expand_dims(row, 0), 1), 0))


@dataclass(frozen=True)
class Overlap:
    """Cycles of a matmul and of what is done beside it: the median of all SMs, and the least and the most."""

    beside: str
    cycles: float
    least: float
    most: float


def run(folder: Path) -> int:
    """Writes FILE."""
    write(folder / FILE, Overlap, map(measured, range(len(WITH))))
    return 0


def measured(n: int) -> Overlap:
    """With WITH[n] beside each matmul, on all SMs."""
    clocks = torch.zeros(torch.cuda.get_device_properties(0).multi_processor_count, dtype=torch.int64, device="cuda")
    sums = torch.zeros(clocks.shape, device="cuda")
    for _ in range(2):  # the first one compiles
        multiply[(len(clocks),)](clocks, sums, STEPS, n in (1, 3), n in (2, 3), SIZE, num_warps=8)
    cycles = [each / STEPS for each in clocks.tolist()]
    found = Overlap(WITH[n], statistics.median(cycles), min(cycles), max(cycles))
    print(f"  a matmul and {found.beside}: {found.cycles:.1f} cycles")
    return found
