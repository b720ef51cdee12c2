"""Fail at load if the compiled kernel's CTAs per SM differ from the tile table's.

The schedule counts on that many resident CTAs. Another number is an error and never another schedule: what registers a compiler
allots must not decide bits. Generated code imports this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from dash_inductor.devices import LIMITS, occupancy


class Checked(CachingAutotuner):
    """One of Inductor's kernels, checked when it is loaded onto a GPU; in a worker process, it is only compiled."""

    expected_ctas_per_sm: int

    def precompile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles and loads the kernel; RuntimeError where `check` raises it."""
        super().precompile(*args, **kwargs)
        for launcher in self.launchers:
            check(
                self.fn.__name__,
                self.device_props.cc,
                self.expected_ctas_per_sm,
                registers=launcher.n_regs,
                shared_bytes=launcher.shared,
                num_warps=launcher.config.num_warps,
            )


def expect(ctas_per_sm: int) -> Callable[[CachingAutotuner], CachingAutotuner]:
    """A decorator above Inductor's own; what it returns stays what Inductor made, with the check."""

    def checked(kernel: CachingAutotuner) -> CachingAutotuner:
        kernel.__class__ = Checked
        kernel.expected_ctas_per_sm = ctas_per_sm  # type: ignore[attr-defined]
        return kernel

    return checked


def check(kernel: str, arch: int, expected: int, *, registers: int, shared_bytes: int, num_warps: int) -> None:
    """RuntimeError if an SM of the architecture (90 for sm_90) holds another number of the kernel's CTAs than `expected`."""
    threads = num_warps * LIMITS[arch].warp_size
    held = occupancy(arch, registers=registers, shared_bytes=shared_bytes, threads=threads)
    if held != expected:
        raise RuntimeError(
            f"{kernel} was compiled to {registers} registers and {shared_bytes} bytes of shared memory: an SM (sm_{arch}) holds "
            f"{held} of its CTAs, and its schedule was made for {expected}. dash_inductor is not tested with this Triton: take "
            "one that it is, or switch it off (DASH_INDUCTOR=0)"
        )
