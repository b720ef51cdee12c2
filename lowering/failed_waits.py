"""Which wait gave up: kernels write it into host memory before they fault, since a GPU's memory is lost with the fault.

Generated code imports this.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import logging

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

# A report, int32: (query head, Q tile) as an index, Q tiles of a head, the rank that was waited for, the additions that were there.
# Of sums of dK and dV the second is negative; the Gluon kernel counts additions of each warp there.
INTS = 4
REPORTS = 1024

log = logging.getLogger("dash_inductor")

_kernels: dict[str, int] = {}  # which report is whose


@functools.cache
def _reports() -> Tensor | None:
    """int32 [REPORTS, INTS] in page-locked memory, whose addresses a GPU can write to; None without a GPU, or such memory."""
    if not torch.cuda.is_available():
        return None
    try:
        reports = torch.zeros(REPORTS, INTS, dtype=torch.int32, device="cpu").pin_memory()
    except RuntimeError as error:  # some machines allow little of it, and kernels need none
        log.warning("a kernel whose wait gives up cannot say where: %s", error)
        return None
    atexit.register(say)
    return reports


@unset_fake_temporarily()  # modules are loaded while their graph is compiled
def report_of(kernel: str) -> Tensor | None:
    """The kernel's report, int32 [INTS]; None where there are none. Kernels with one name share a report."""
    reports = _reports()
    return None if reports is None else reports[_kernels.setdefault(kernel, len(_kernels) % REPORTS)]


def address_of(kernel: str) -> tuple[int, int]:
    """The address of the kernel's report: its upper and its lower 32 bits, as signed integers; 0 where there is none."""
    report = report_of(kernel)
    address = 0 if report is None else report.data_ptr()
    return address >> 32, ctypes.c_int32(address).value


def failed_waits() -> list[str]:
    """A line for each kernel of this process in which a wait gave up. To be asked after CUDA's error, in a notebook, say."""
    reports = _reports() if _kernels else None
    if reports is None:
        return []
    lines = []
    for kernel, index in _kernels.items():
        at, q_tiles, rank, added = reports[index].tolist()
        if q_tiles > 0:
            head, tile = divmod(at, q_tiles)
            lines.append(
                f"{kernel}: a CTA gave up waiting to add to tile {tile} of dQ in query head {head} (counted through the batch): "
                f"its rank is {rank}, and the tile had {added} additions"
            )
        elif q_tiles:
            lines.append(
                f"{kernel}: a CTA gave up waiting to add its part of a chain to dK and dV: {rank} additions come before it, and "
                f"there had been {added}"
            )
    return lines


def say() -> None:
    """Logs `failed_waits`: at the end of the process, behind the traceback of CUDA's error."""
    for line in failed_waits():
        log.error("dash_inductor: %s. Please report it (docs: troubleshooting, illegal memory access)", line)
