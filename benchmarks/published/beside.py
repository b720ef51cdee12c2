"""Predicted speed of this project's backward on an H100 beside the alternatives, all of them replayed and priced alike.

16,384 tokens and a hidden size of 2,048, in bf16. beside.csv has the replayed main loops of our one pass and of PyTorch's
FlexAttention; --replay compiles and replays them anew. Nothing here was measured, but for what is called published.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path

from dash_inductor.cli.console import table
from dash_inductor.config import Config
from dash_inductor.devices.cost_files import load_costs
from dash_inductor.devices.target import Target
from dash_inductor.problem import Problem
from dash_inductor.resolve import resolve
from dash_inductor.sass.replay.pricing import LAW, tensor_share

from .kernels import KERNELS, MASKS
from .loops import Loop, read
from .model import HBM_BYTES_PER_SECOND, LAUNCH_SECONDS, PROLOGUE, SMS, Figure, makespan, predicted

FILE = Path(__file__).with_name("beside.csv")
HEAD_DIMS, LENGTHS = (64, 128), (4096, 8192, 16384)
TOKENS, HIDDEN = 16384, 2048
OURS, FLEX = "one pass", "flex"
BANDWIDTH, RANGE = 32, (18, 64)  # bytes a clock that an SM adds to memory: taken, and possible
BLOCK = 128  # rows of Q and keys of a CTA of FlexAttention
KV_FLOP, Q_FLOP = 8, 6  # of an element of a step of its dK/dV and dQ, times the head dim
# Deterministic FlashAttention-3: flash-attention PR 2207 (Hopper) and PR 1893 (H100), as in docs/alternatives.md.
PUBLISHED = {(64, "full", 4096): 394, (64, "full", 8192): 450, (64, "full", 16384): 507, (128, "causal", 8192): 474}


@dataclass(frozen=True)
class Step:
    """A main loop of ours or of FlexAttention's, `bandwidth` as it was replayed."""

    kernel: str
    head_dim: int
    mask: str
    bandwidth: int
    flop: int
    cycles: float


def replayed() -> Iterator[Step]:
    """Compile and replay all of them: two minutes."""
    from dash_inductor.codegen.generate import compile_kernel
    from dash_inductor.sass.gates import Cell, generated
    from dash_inductor.sass.replay import loops_of, replay_loop
    from dash_inductor.sass.replay.constants import Constants

    for head_dim in HEAD_DIMS:
        for mask in MASKS:
            code = generated(Cell("sm_90", "one_pass", "bf16", head_dim, mask))
            (name,) = code.templates
            (loop,) = loops_of(compile_kernel(code.kernels[name], "h100").cubin, 1)
            for bandwidth in (BANDWIDTH, *RANGE):
                step = replay_loop(loop, constants=Constants().set_from({"addition_bandwidth": bandwidth}))
                yield Step(OURS, head_dim, mask, bandwidth, step.flop, round(step.cycles, 1))
            shape = "flex-causal" if mask == "causal" else "flex"
            stock = generated(Cell("sm_90", "one_pass", "bf16", head_dim, shape), rewrite=False)
            (source,) = (text for text in stock.kernels.values() if "tl.dot(" in text)
            for loop in loops_of(compile_kernel(source, "h100").cubin, 4):
                step = replay_loop(loop)
                yield Step(FLEX, head_dim, mask, BANDWIDTH, step.flop, round(step.cycles, 1))


def steps() -> list[Step]:
    """beside.csv."""
    with open(FILE, newline="") as file:
        return [
            Step(
                row["kernel"],
                int(row["head_dim"]),
                row["mask"],
                int(row["bandwidth"]),
                int(row["flop"]),
                float(row["cycles"]),
            )
            for row in csv.DictReader(file)
        ]


def ours(figure: Figure, known: Sequence[Step]) -> dict[int, float]:
    """TFLOPS by bandwidth of additions: the cost model's time of what is chosen, which is of BANDWIDTH, and in proportion."""
    kernel = figure.kernel
    sizes = figure.batch, figure.heads, figure.heads, figure.length, figure.length, kernel.head_dim, "bf16"
    resolution = resolve(Problem(kernel.mask, *sizes), Config(), Target("h100", 90, SMS))
    _, time_ns = resolution.schedule
    tile = resolution.one_pass
    assert time_ns is not None and tile is not None
    costs = load_costs("h100", block_m=tile.block_m, block_n=tile.block_n, head_dim=kernel.head_dim)
    overhead_ns = costs.launch_ns + costs.chain_ns * figure.length / tile.block_n * figure.batch * figure.heads / SMS
    own = {
        each.bandwidth: each for each in known if (each.kernel, each.head_dim, each.mask) == (OURS, kernel.head_dim, kernel.mask)
    }
    times = {bandwidth: each.cycles / LAW.ghz(tensor_share(each.flop, each.cycles)) for bandwidth, each in own.items()}
    return {bandwidth: figure.flop / (time_ns * time / times[BANDWIDTH] + overhead_ns) / 1000 for bandwidth, time in times.items()}


def flex(figure: Figure, known: Sequence[Step]) -> float:
    """TFLOPS of FlexAttention's backward: a launch whose CTAs have a block of keys, or a block of queries.

    Of two loops of a kind the slower one is for blocks that the mask cuts, of which a causal one has one in each row and column.
    """
    kernel = figure.kernel
    own = [each for each in known if (each.kernel, each.head_dim, each.mask) == (FLEX, kernel.head_dim, kernel.mask)]
    most = max(each.flop for each in own)
    jobs = []
    causal = kernel.mask == "causal"
    blocks = figure.length // BLOCK
    total_flop = total_cycles = 0.0
    for of_kind, flop in (
        ([each for each in own if each.flop == most], KV_FLOP),
        ([each for each in own if each.flop < most], Q_FLOP),
    ):
        whole, cut = min(each.cycles for each in of_kind), max(each.cycles for each in of_kind)
        in_block = flop * BLOCK * BLOCK * kernel.head_dim / of_kind[0].flop  # steps
        seen = range(1, blocks + 1) if causal else [blocks] * blocks
        jobs += [in_block * ((each - causal) * whole + causal * cut) + PROLOGUE[True] for each in seen]
        total_flop += of_kind[0].flop * in_block
        total_cycles += whole * in_block
    clocks = makespan(jobs * figure.batch * figure.heads, SMS)
    elements = figure.batch * figure.heads * figure.length * kernel.head_dim
    others = 4 * elements / HBM_BYTES_PER_SECOND + 2 * LAUNCH_SECONDS
    return figure.flop / (clocks / LAW.ghz(tensor_share(total_flop, total_cycles)) / 1e9 + others) / 1e12


@dataclass(frozen=True)
class Speeds:
    """TFLOPS at one shape: ours by bandwidth of additions, others by name; published is deterministic FlashAttention-3's."""

    head_dim: int
    mask: str
    length: int
    ours: dict[int, float]
    others: dict[str, float]
    published: int | None

    def line(self) -> dict[str, object]:
        """Of the table."""
        mine = self.ours[BANDWIDTH]
        return {
            "d": self.head_dim,
            "mask": self.mask,
            "S": self.length,
            "ours (range)": f"{mine:.0f} ({min(self.ours.values()):.0f} to {max(self.ours.values()):.0f})",
            **{name: f"{speed:.0f}" for name, speed in self.others.items()},
            "FA3 det.*": self.published or "",
            **{f"ours/{name}": f"{mine / speed:.2f}" for name, speed in self.others.items()},
        }


def speeds() -> list[Speeds]:
    """At every shape of the table."""
    known, loops = steps(), read()
    return [_speeds(head_dim, mask, length, known, loops) for head_dim in HEAD_DIMS for mask in MASKS for length in LENGTHS]


def _speeds(head_dim: int, mask: str, length: int, known: Sequence[Step], loops: dict[str, Loop]) -> Speeds:
    def figure(name: str, *, deterministic: bool = False) -> Figure:
        kernel = KERNELS[f"{name} backward d{head_dim} {mask}"]
        return Figure(kernel, TOKENS // length, HIDDEN // head_dim, length, 1.0, "", deterministic)

    strict, three = (
        figure("FlashAttention-2", deterministic=True),
        figure("FlashAttention-4" if head_dim == 64 else "FlashAttention-3"),
    )
    others = {
        "strict": predicted(strict, loops[strict.kernel.label], LAW),
        "flex": flex(strict, known),
        "FA3": predicted(three, loops[three.kernel.label], LAW),
    }
    return Speeds(head_dim, mask, length, ours(strict, known), others, PUBLISHED.get((head_dim, mask, length)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 2 for arguments that make no sense."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published.beside", description=__doc__)
    parser.add_argument("--replay", action="store_true", help="compile and replay the loops of beside.csv anew, first")
    parser.add_argument("--plot", metavar="FILE", help="draw the table; needs matplotlib")
    args = parser.parse_args(argv)
    if args.plot and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    if args.replay:
        with open(FILE, "w", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Step)], lineterminator="\n")
            writer.writeheader()
            writer.writerows(map(asdict, replayed()))
    made = speeds()
    table("TFLOPS on an H100, predicted", [each.line() for each in made])
    print("\nstrict: SDPA in strict mode. FA3 is not deterministic; at d = 64 by FlashAttention-4's loop. *: published")
    if args.plot:
        from .plot import beside

        beside(made, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
