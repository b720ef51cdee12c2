"""What the host does for a launch of the Gluon kernel, in microseconds: `python -m benchmarks.times.launch`.

The arguments, our launch of them, and Triton's own, which looks up what it compiled by each argument. All end at the driver, which
is not there. In turns, the least of many rounds of each. Encoding TMA's descriptors, which Triton does in C, is in none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from unittest import mock

import torch
from triton.compiler.compiler import CompiledKernel

from dash_inductor.codegen.fake_gpu import fake_gpu
from dash_inductor.lowering.launch.gluon import launch_of
from dash_inductor.schedule.parts import FEW_CHAINS
from dash_inductor.templates import gluon_kernel
from dash_inductor.templates.operands import Operands

BATCH, HEADS, LENGTH, HEAD_DIM, BLOCK = 2, 16, 512, 64, 128
ROUNDS, CALLS = 50, 100


def operands() -> Operands:
    """Those of a causal attention of short sequences."""

    def rows() -> torch.Tensor:
        return torch.zeros(BATCH, LENGTH, HEADS, HEAD_DIM, dtype=torch.bfloat16).transpose(1, 2)

    def scratch(*columns: int) -> torch.Tensor:
        return torch.zeros(BATCH * HEADS * LENGTH, *columns)

    tensors = *(rows() for _ in range(4)), scratch(), scratch(), torch.zeros(2048, dtype=torch.int32)
    numbers = {"workers": 64, "cooperative": True, "block_m": BLOCK, "block_n": BLOCK, "causal": True, "scale": 0.125}
    return Operands(*tensors, None, None, None, scratch(HEAD_DIM), rows(), rows(), [], [], **numbers)  # type: ignore[arg-type]


def least(*called: Callable[[], object]) -> list[float]:
    """Microseconds of a call of each."""
    found = [[0.0] * ROUNDS for _ in called]
    for each in called:
        each()
    for number in range(ROUNDS):
        for times, each in zip(found, called, strict=True):
            begin = time.perf_counter()
            for _ in range(CALLS):
                each()
            times[number] = 1e6 * (time.perf_counter() - begin) / CALLS
    return [min(times) for times in found]


def main() -> None:
    """Print all three."""
    x, report, kernel = operands(), torch.zeros(4, dtype=torch.int32), gluon_kernel()

    def without_driver(self: CompiledKernel) -> None:
        self._run, self.module, self.function = (lambda *_: None), self, None

    stream = mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, create=True)
    with fake_gpu("h100"), mock.patch.object(CompiledKernel, "_init_handles", without_driver), stream:
        launch = launch_of(kernel, x)
        made, ours, triton = least(
            lambda: kernel.arguments(x, report=report, most_chains=FEW_CHAINS),
            launch.run,
            lambda: kernel.sdpa_backward[(launch.workers,)](*launch.arguments, **launch.options()),
        )
    print(f"arguments: {made:.1f} us; our launch of them: {ours:.1f} us; Triton's: {triton:.1f} us")


if __name__ == "__main__":
    main()
