"""Fail at load if the compiled kernel is not what its schedule was made for: in its CTAs per SM, or in how it is launched.

The schedule counts on that many resident CTAs. Another number is an error and never another schedule: what registers a compiler
allots must not decide bits. CTAs that wait for each other are all resident in a cooperative launch; another launch may hang.
Generated code imports this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from dash_inductor.devices import LIMITS, occupancy


class Checked(CachingAutotuner):
    """One of Inductor's kernels, checked when it is loaded onto a GPU; in a worker process, it is only compiled."""

    expected_ctas_per_sm: int

    def precompile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles and loads the kernel; RuntimeError where one of the checks raises it."""
        super().precompile(*args, **kwargs)
        if self.launchers and self.triton_meta["launch_cooperative_grid"]:
            require_cooperative(self.fn.__name__, [result.kernel for result in self.compile_results])
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


def require_cooperative(kernel: str, compiled: Sequence[Any]) -> None:
    """RuntimeError unless each of these, as Triton compiled them, is launched cooperatively.

    Triton's launcher reads it in the metadata. Inductor's own, which launches without Triton, knows no such launch, and has
    none in what it is given.
    """
    for each in compiled:
        if not getattr(getattr(each, "metadata", None), "launch_cooperative_grid", False):
            raise RuntimeError(
                f"{kernel} waits for CTAs that are resident together, and this torch or Triton does not launch it so. Take a "
                "version that dash_inductor is tested with, or launch='chained', or switch it off (DASH_INDUCTOR=0)"
            )


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
