"""Machine code of the kernels for GPUs that need not be there: shown, held against rules, and replayed."""

from __future__ import annotations

from dash_inductor.cli.program import Program

from .commands import codegen, gates, measured, replay

PROGRAM = Program(
    "benchmarks.machine_code",
    __doc__,
    examples=("codegen --help", "gates --arch sm_90 --dtype bf16 --head-dim 128"),
    commands={
        "codegen": (codegen, "show the kernel for a GPU, and what its machine code says"),
        "gates": (gates, "compile every kernel, and name the rules that it breaks"),
        "replay": (replay, "estimate what the main loop of a Hopper kernel waits for"),
        "measured": (measured, "hold those estimates against times of an H200"),
    },
    compiling=("codegen", "gates"),
    of_our_making=("gates",),
)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.run()
