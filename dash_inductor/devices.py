"""The GPUs the project knows by name: what code generation and the cost model need to know of each.

A key ("h100") names a GPU everywhere in the project: in `named_gpu`, in the cost files, on the command line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True)
class NamedDevice:
    """Public figures of one GPU; sizes in bytes, `arch` as Triton counts it (90 for compute capability 9.0)."""

    key: str
    name: str
    arch: int
    sms: int
    l2_bytes: int
    shared_bytes_per_block_optin: int
    shared_bytes_per_sm: int
    total_memory: int
    # The same for every data-centre GPU since Ampere: CUDA C++ Programming Guide, "Technical Specifications per
    # Compute Capability", 8.0 / 9.0 / 10.0.
    registers_per_sm: int = 65536
    max_threads_per_sm: int = 2048
    max_threads_per_block: int = 1024
    warp_size: int = 32

    @property
    def capability(self) -> tuple[int, int]:
        """(major, minor), as `torch.cuda.get_device_capability` gives it."""
        return divmod(self.arch, 10)


# SMs, L2 and memory: NVIDIA H100 Tensor Core GPU Architecture (SXM5), NVIDIA H200 data sheet (the H100's die), NVIDIA
# A100 Tensor Core GPU Architecture (SXM4 80 GB), NVIDIA Blackwell Tuning Guide, and for the B200's SMs (74 on each die)
# Chips and Cheese, "Nvidia's B200".
# Shared memory: the Ampere, Hopper and Blackwell Tuning Guides (164 KB a SM and 163 a block; 228 and 227).
_KNOWN = (
    NamedDevice("h100", "NVIDIA H100 80GB HBM3", 90, 132, 50 * MIB, 227 * KIB, 228 * KIB, 80 * GIB),
    NamedDevice("h200", "NVIDIA H200", 90, 132, 50 * MIB, 227 * KIB, 228 * KIB, 141 * GIB),
    NamedDevice("a100", "NVIDIA A100-SXM4-80GB", 80, 108, 40 * MIB, 163 * KIB, 164 * KIB, 80 * GIB),
    NamedDevice("b200", "NVIDIA B200", 100, 148, 126 * MIB, 227 * KIB, 228 * KIB, 180 * GIB),
)
DEVICES: dict[str, NamedDevice] = {known.key: known for known in _KNOWN}


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
    """The key of a real GPU, from its name as CUDA reports it and its architecture (90 for 9.0); None if unknown.

    Boards of one chip (SXM, PCIe, NVL) share a key. A MIG slice has neither the SMs nor the L2 of the whole GPU, and
    the GPU of a Grace superchip ("GH200") is not that of the board whose number it carries: both are unknown.

    >>> key_for("NVIDIA H100 80GB HBM3", 90), key_for("NVIDIA A100-PCIE-40GB", 80), key_for("NVIDIA H20", 90)
    ('h100', 'a100', None)
    """
    words = re.split(r"[^A-Z0-9]+", gpu_name.upper())
    if "MIG" in words:
        return None
    return next((known.key for known in _KNOWN if known.key.upper() in words and known.arch == arch), None)
