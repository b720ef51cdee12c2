"""The GPUs the project knows by name: what code generation and the cost model need to know of each.

A key ("h100") names a GPU everywhere in the project: in `fake_gpu`, in the cost files, on the command line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

from ..templates.tiles import EMULATED, tiles_of
from .cost_files import MEMORY, STANDS_IN, arch_of, known_devices, numbers_of

KIB, GIB = 1 << 10, 1 << 30


@dataclass(frozen=True)
class Limits:
    """What an SM and a CTA on it can have at most; shared memory in bytes."""

    max_threads_per_sm: int
    max_ctas_per_sm: int
    shared_bytes_per_sm: int
    shared_bytes_per_block_optin: int
    tmem_columns: int = 0  # of tensor memory, per SM
    # The same for all of them.
    registers_per_sm: int = 65536
    registers_per_thread: int = 255
    max_threads_per_block: int = 1024
    warp_size: int = 32


# CUDA Programming Guide, "Compute Capabilities": technical specifications; tensor memory: PTX ISA, "Tensor Memory".
LIMITS: dict[int, Limits] = {
    80: Limits(2048, 32, 164 * KIB, 163 * KIB),
    86: Limits(1536, 16, 100 * KIB, 99 * KIB),
    87: Limits(1536, 16, 164 * KIB, 163 * KIB),
    89: Limits(1536, 24, 100 * KIB, 99 * KIB),
    90: Limits(2048, 32, 228 * KIB, 227 * KIB),
    100: Limits(2048, 32, 228 * KIB, 227 * KIB, tmem_columns=512),
    103: Limits(2048, 32, 228 * KIB, 227 * KIB, tmem_columns=512),
    120: Limits(1536, 24, 100 * KIB, 99 * KIB),
}
SCHEDULERS = 4  # of an SM; each has its share of the registers


def occupancy(arch: int, *, registers: int, shared_bytes: int, threads: int, tmem_columns: int = 0) -> int:
    """How many CTAs of a kernel an SM holds at a time; 0 if not even one fits. `registers` is per thread.

    Registers are given to warps by 256, from one scheduler's share; every CTA takes 1 KiB of shared memory beside its
    own (CUDA Occupancy Calculator, compute capability 8.0 and later).

    >>> occupancy(90, registers=128, shared_bytes=82432, threads=256), occupancy(90, registers=129, shared_bytes=82432, threads=256)
    (2, 1)
    """
    limits = LIMITS[arch]
    if registers > limits.registers_per_thread or shared_bytes > limits.shared_bytes_per_block_optin:
        return 0
    warps = -(-threads // limits.warp_size)
    registers_per_warp = max(1, -(-registers * limits.warp_size // 256)) * 256
    warps_by_registers = limits.registers_per_sm // SCHEDULERS // registers_per_warp * SCHEDULERS
    fitting = [
        limits.max_ctas_per_sm,
        limits.max_threads_per_sm // (warps * limits.warp_size),
        limits.shared_bytes_per_sm // (-(-shared_bytes // 128) * 128 + KIB),
        warps_by_registers // warps,
    ]
    if tmem_columns:
        fitting.append(limits.tmem_columns // tmem_columns)
    return min(fitting)


@dataclass(frozen=True)
class NamedDevice:
    """Public figures of one GPU, which its cost file has; sizes in bytes."""

    key: str

    @property
    def name(self) -> str:
        """The name that CUDA reports, such as "NVIDIA H100"."""
        return str(numbers_of(self.key)["gpu"])

    @property
    def total_memory(self) -> int:
        """The size of its memory, in bytes."""
        return int(numbers_of(self.key)[MEMORY]["value"]) * GIB

    @property
    def arch(self) -> int:
        """The architecture as Triton counts it: 90 for compute capability 9.0."""
        return int(arch_of(self.key))

    @property
    def sms(self) -> int:
        """The number of SMs."""
        return int(numbers_of(self.key)["sms"]["value"])

    @property
    def l2_bytes(self) -> int:
        """The size of its L2 cache, in bytes."""
        return int(numbers_of(self.key)["l2_bytes"]["value"])

    @property
    def capability(self) -> tuple[int, int]:
        """(major, minor), as `torch.cuda.get_device_capability` gives it."""
        return divmod(self.arch, 10)

    @property
    def limits(self) -> Limits:
        """What one of its SMs can have at most."""
        return LIMITS[self.arch]


# By key: each cost file beside this module that is of a GPU. None is read before it is asked.
DEVICES: dict[str, NamedDevice] = {key: NamedDevice(key) for key in known_devices() if key != EMULATED}


def device(key: str) -> NamedDevice:
    """The device called `key`; ValueError, with the known keys, if there is none.

    >>> device("h100").sms
    132
    """
    try:
        return DEVICES[key]
    except KeyError:
        raise ValueError(f"unknown device {key!r}: the known ones are {', '.join(DEVICES)}") from None


def key_for(gpu_name: str, arch: int) -> str | None:
    """The key of a real GPU, from its name as CUDA reports it and its architecture (90 for 9.0); None if unknown (`stand_in`).

    Boards of one chip (SXM, PCIe, NVL) share a key. A MIG slice has neither the SMs nor the L2 of the whole GPU, and
    the GPU of a Grace superchip ("GH200"), or of a laptop, is not that of the board whose number it carries: all are unknown.

    >>> key_for("NVIDIA H100 80GB HBM3", 90), key_for("NVIDIA GeForce RTX 4090", 89), key_for("NVIDIA H20", 90)
    ('h100', 'rtx4090', None)
    """
    words = re.split(r"[^A-Z0-9]+", gpu_name.upper())
    if "MIG" in words or "LAPTOP" in words:
        return None
    words = [*words, *map("".join, pairwise(words))]  # RTX 4090
    return next((known.key for known in DEVICES.values() if known.key.upper() in words and known.arch == arch), None)


def stand_in(arch: int) -> str:
    """The key whose cost file serves an unknown GPU: one of its architecture, else of the one whose tiles it takes.

    Raises:
        ValueError: there is no tile for it.

    >>> stand_in(90), stand_in(89), stand_in(86)
    ('h100', 'rtx4090', 'a100')
    """
    alike = tiles_of(arch)
    serving = [known for known in DEVICES.values() if numbers_of(known.key).get(STANDS_IN)]
    return next(known.key for like in (arch, alike) for known in serving if known.arch == like)
