"""What the replay takes a Hopper SM to do: every figure with its unit and source, and whether it is a guess."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

SWITCH = "0 or 1"


@dataclass(frozen=True)
class Constant:
    """One figure as it stands in the list. `guess`: no document gives it, and no measurement."""

    value: float
    unit: str
    source: str
    guess: bool = False


def _constant(value: float, unit: str, source: str, guess: bool = False) -> Any:
    return field(default=value, metadata={"constant": Constant(value, unit, source, guess)})


@dataclass(frozen=True)
class Constants:
    """The figures by name, per SM. `set_from` changes some; CONSTANTS lists all with their sources."""

    tensor_flop: float = _constant(
        4096, "FLOP/clock", "dense bf16: 989.4 TFLOPS = 132 SMs x 1.83 GHz x 4096 (NVIDIA H100 white paper; cudnn-frontend #650)"
    )
    shared_bandwidth: float = _constant(
        128, "bytes/clock", "CUDA Programming Guide, shared memory: 32 banks of 4 bytes; operands of matmuls take part in it"
    )
    shared_latency: float = _constant(29, "clocks", "a shared load (arXiv 2402.13499, quoted from memory)")
    l2_latency: float = _constant(
        270,
        "clocks",
        "a hit: 263 (arXiv 2402.13499, quoted from memory), near and far partition 200 to about 300 (Chips and Cheese)",
    )
    l2_bandwidth: float = _constant(
        32,
        "bytes/clock",
        "a burst of loads: 5.5 to 7 TB/s measured are 24 to 30 an SM at 1.755 GHz, one SM alone gets up to 64",
        True,
    )
    synchronous_share: float = _constant(0.629, "of tensor_flop", "mma.sync gets 62.9 % of an H100's wgmma peak (arXiv 2402.13499)")
    addition_bandwidth: float = _constant(
        32,
        "bytes/clock",
        "the way of REDG to L2: on an H200 64 KB take 1.36 us, by 747 TFLOPS without additions and 471 with them at head dim 256 "
        "(flash-attention PR 2889, whose author says 18); FlashAttention-2's speed needs 32 or more; range 18 to 64",
        True,
    )
    addition_buffer: float = _constant(4096, "bytes", "of REDG between the read of its registers and that way", True)
    gpu_fence: float = _constant(300, "clocks", "MEMBAR.GPU with nothing in flight", True)
    gpu_fence_of_copies: float = _constant(0, SWITCH, "1: MEMBAR.GPU waits for the warp's own cp.async too", True)
    cta_fence: float = _constant(12, "clocks", "MEMBAR.CTA", True)
    async_fence: float = _constant(20, "clocks", "FENCE.VIEW.ASYNC", True)
    barrier: float = _constant(
        20, "clocks", "last arrival to release of BAR.SYNC; an empty __syncthreads of 256 threads takes about 30", True
    )
    matmul_latency: float = _constant(
        28, "clocks", "end of the last matmul to the return of WARPGROUP.DEPBAR; a wgmma n8 takes 18 from issue to end", True
    )
    matmul_queue: float = _constant(3, "HGMMA", "of one warp, issued and not started", True)
    mufu: float = _constant(
        8, "clocks/warp", "exp2 of a scheduler's warp: 16 a clock and SM (CUDA Programming Guide, throughput, 9.0)"
    )
    mufu_latency: float = _constant(22, "clocks", "exp2", True)
    constant_latency: float = _constant(40, "clocks", "loads of constants and of special registers", True)
    mbarrier: float = _constant(25, "clocks", "an operation on an mbarrier (SYNCS)", True)

    def set_from(self, values: Mapping[str, float]) -> Constants:
        """These with some others; ValueError for a name that is not among them, or a value that makes no sense."""
        for name, value in values.items():
            if name not in CONSTANTS:
                raise ValueError(f"unknown constant {name!r}: the known ones are {', '.join(CONSTANTS)}")
            if CONSTANTS[name].unit == SWITCH and value not in (0, 1):
                raise ValueError(f"{name} is 0 or 1, not {value:g}")
            if CONSTANTS[name].unit != SWITCH and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be positive, got {value:g}")
        return replace(self, **values)


CONSTANTS: dict[str, Constant] = {each.name: each.metadata["constant"] for each in fields(Constants)}
