"""What the replay takes a Hopper SM to do: every figure with its unit and source, and whether it is a guess."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

SWITCH = "0 or 1"
# Where figures come from that no document gives: profiles of two loops on an H200, and the times of all kernels of `measured.py`.
_SAMPLES = "benchmarks/results/h200/gluon/loop_samples.csv"
_FIT = "chosen so that the kernels of machine_code/measured.py come out"


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
        12.5,
        "bytes/clock",
        "the way of REDG to L2, all SMs at once: 2.2 to 3.1 TB/s on an H200 (benchmarks/results/h200/additions.csv) are 9 to 13",
    )
    addition_buffer: float = _constant(4096, "bytes", "of REDG between the read of its registers and that way", True)
    gpu_fence: float = _constant(300, "clocks", "MEMBAR.GPU with nothing in flight", True)
    gpu_fence_of_copies: float = _constant(0, SWITCH, "1: MEMBAR.GPU waits for the warp's own cp.async too", True)
    cta_fence: float = _constant(
        100, "clocks", f"MEMBAR.CTA, once the warp's own stores are through: 116 behind four STSM ({_SAMPLES})"
    )
    async_fence: float = _constant(60, "clocks", f"FENCE.VIEW.ASYNC, once all that waits for shared memory is through ({_SAMPLES})")
    barrier: float = _constant(40, "clocks", f"last arrival to release of BAR.SYNC ({_FIT})", True)
    matmul_latency: float = _constant(
        120,
        "clocks",
        f"end of the last matmul's work to the return of WARPGROUP.DEPBAR ({_FIT}: of FlexAttention's loops above all)",
        True,
    )
    matmul_queue: float = _constant(
        3, "HGMMA", f"of one warp, the last of which has started before the first of another chain is issued ({_SAMPLES})", True
    )
    matmul_dispatch: float = _constant(
        8, "clocks/warp", f"from one HGMMA of a scheduler to the next: two warps issue one in 14 to 20 clocks each ({_SAMPLES})"
    )
    mufu: float = _constant(
        8, "clocks/warp", "exp2 of a scheduler's warp: 16 a clock and SM (CUDA Programming Guide, throughput, 9.0)"
    )
    mufu_latency: float = _constant(35, "clocks", f"exp2 ({_FIT})", True)
    constant_latency: float = _constant(40, "clocks", "loads of constants and of special registers", True)
    mbarrier: float = _constant(45, "clocks", f"an operation on an mbarrier (SYNCS): 43 to 55 ({_SAMPLES})")
    jump: float = _constant(
        30, "clocks", f"from a branch that is taken to the next instruction ({_FIT}; 13 and more in the samples)", True
    )
    least_share: float = _constant(
        0.6, "of shared_bandwidth", f"what matmuls in flight leave to loads and stores at least ({_FIT})", True
    )

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
