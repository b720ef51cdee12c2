"""The commands of the package."""

from __future__ import annotations

from . import check, choose, cost, demo, env, explain, manifest, qualify
from .console import PACKAGE
from .program import Program

DESCRIPTION = """\
Deterministic attention training under torch.compile: with torch.use_deterministic_algorithms(True), the backward of attention
becomes a kernel that sums dQ, the gradient of the queries, in one fixed order. These commands show what it does and why.
"""
PROGRAM = Program(
    PACKAGE,
    DESCRIPTION,
    examples=("demo", "env", "choose --help"),
    commands={
        "explain": (explain, "say what becomes of each attention of a model, and why"),
        "check": (check, "run a training step again and again, and name the first op that differs"),
        "cost": (cost, "say what deterministic mode costs of a training step, by operators"),
        "manifest": (manifest, "write down what decides the bits of a training, or hold one to that"),
        "demo": (demo, "train a small GPT twice and compare every bit; needs no GPU"),
        "env": (env, "report versions, GPUs, settings and caches, ready to paste"),
        "choose": (choose, "say which schedule an attention gets on a GPU, and why"),
        "qualify": (qualify, "see whether kernels are right and fast on the GPU that is there"),
    },
    compiling=("explain", "cost"),
    of_our_making=("demo",),
    elsewhere={
        **dict.fromkeys(("codegen", "gates", "replay"), "benchmarks.machine_code"),
        **dict.fromkeys(("simulate", "compare"), "benchmarks.schedules"),
    },
)
main = PROGRAM.main
