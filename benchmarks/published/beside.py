"""Predicted speed of this project's backward on an H100 beside the alternatives, all of them replayed and priced alike.

16,384 tokens and a hidden size of 2,048, in bf16. beside.csv has the replayed main loops of our one pass, in Triton and Gluon, and
of FlexAttention; --replay compiles and replays them anew. Nothing was measured here, but for what is called published.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product

from dash_inductor.cli.console import table
from dash_inductor.config import Config
from dash_inductor.devices.cost_files import load_costs
from dash_inductor.devices.stock_kernels import published
from dash_inductor.devices.target import Target
from dash_inductor.problem import Problem
from dash_inductor.resolve import resolve
from dash_inductor.sass.replay.pricing import LAW, tensor_share
from dash_inductor.schedule import Geometry
from dash_inductor.schedule.parts import part_makespan, parts_for

from .attention import BLOCK, CUT, NONE, TITLES, WHOLE, Attention
from .kernels import MASKS
from .loops import Loop, read
from .model import HBM_BYTES_PER_SECOND, LAUNCH_SECONDS, PROLOGUE, SMS, makespan, predicted
from .steps import BANDWIDTH, FLEX, GLUON, HEAD_DIMS, OURS, Step, replayed, steps, write

LENGTHS = (4096, 8192, 16384)
TOKENS, HIDDEN = 16384, 2048
GROUP = 4  # query heads of a kv head, where heads are grouped
ROWS = {64: 128, 128: 64}  # of a Q tile of ours, by head dim; a KV tile has BLOCK keys
KV_FLOP, Q_FLOP = 8, 6  # of an element of a step of FlexAttention's dK/dV and dQ, times the head dim


def ours(attention: Attention, known: Sequence[Step]) -> dict[int, float]:
    """TFLOPS of the Triton kernel, by bandwidth of additions. Chains take what they do at BANDWIDTH in the cost model, and in
    proportion."""
    own = [each for each in known if (each.kernel, each.head_dim, each.mask) == (OURS, attention.head_dim, attention.mask)]
    # Out and dO are read for delta; dQ is read in fp32 and written. Its first part is stored, so that nothing clears it.
    others = _elements(attention) * (4 + 6) / HBM_BYTES_PER_SECOND + 2 * LAUNCH_SECONDS
    if attention.mask in TITLES:
        cut = _share_cut(attention)
        taken = {each: _mean_step(own, each, cut) for each in dict.fromkeys(step.bandwidth for step in own)}
        main, overhead = _masked_steps(attention) * taken[BANDWIDTH], 3 * LAUNCH_SECONDS  # the kernel, the lists, the ranks
    else:
        taken = {step.bandwidth: _seconds(step.flop, step.cycles) for step in own if not step.cut}
        main, overhead = _dense_seconds(attention)
    return {each: attention.flop / (main * time / taken[BANDWIDTH] + overhead + others) / 1e12 for each, time in taken.items()}


def gluon(attention: Attention, known: Sequence[Step]) -> float:
    """TFLOPS of the kernel in Gluon: of the Triton kernel's schedule and tiles, with another main loop. The mask is full or
    causal."""
    a = attention
    loops = {
        each.kernel: each
        for each in known
        if (each.head_dim, each.mask, each.bandwidth, each.cut) == (a.head_dim, a.mask, BANDWIDTH, False)
    }
    mine, by_triton = (_seconds(each.flop, each.cycles) / each.flop for each in (loops[GLUON], loops[OURS]))
    main, _ = _dense_seconds(attention)
    return a.flop / (a.flop / ours(attention, known)[BANDWIDTH] - main * (1 - mine / by_triton) * 1e12)


def _dense_seconds(attention: Attention) -> tuple[float, float]:
    """The cost model's time of what is chosen, and what comes to it for each chain and for the launch."""
    a = attention
    problem = Problem(a.mask, a.batch, a.heads, a.kv_heads, a.length, a.length, a.head_dim, "bf16")
    resolution = resolve(problem, Config(kernel="triton"), Target("h100", 90, SMS))
    _, time_ns = resolution.schedule
    tile = resolution.one_pass
    assert time_ns is not None and tile is not None
    costs = load_costs("h100", block_m=tile.block_m, block_n=tile.block_n, head_dim=a.head_dim)
    chains = a.batch * a.kv_heads * a.length / tile.block_n
    return time_ns / 1e9, (costs.launch_ns + costs.chain_ns * chains / SMS) / 1e9


def _masked_steps(attention: Attention) -> float:
    """Until the last SM is done, of what a FlexAttention with a BlockMask takes: chains that are few are cut into parts."""
    import numpy as np

    a, heads, rows = attention, attention.batch * attention.kv_heads, ROWS[attention.head_dim]
    tiles = np.repeat(a.blocks.T != NONE, BLOCK // rows, axis=1)
    g = Geometry(a.length, a.length, rows, BLOCK, "blocks", blocks=tiles.tolist())
    return part_makespan(g, heads, a.group, parts_for(heads, a.group, g.n_kv), SMS)


def _share_cut(attention: Attention) -> float:
    """Of the blocks that are visible, the part that the mask cuts."""
    return float((attention.blocks == CUT).sum() / (attention.blocks != NONE).sum())


def _mean_step(own: Sequence[Step], bandwidth: int, cut: float) -> float:
    """Seconds of a step of ours, of which the share `cut` are of cut tiles."""
    whole, edge = sorted((step for step in own if step.bandwidth == bandwidth), key=lambda step: step.cut)
    return _seconds(whole.flop, (1 - cut) * whole.cycles + cut * edge.cycles)


def _seconds(flop: float, cycles: float) -> float:
    return cycles / LAW.ghz(tensor_share(flop, cycles)) / 1e9


def _elements(attention: Attention) -> int:
    """Of queries."""
    return attention.batch * attention.heads * attention.length * attention.head_dim


def flex(attention: Attention, known: Sequence[Step]) -> float:
    """TFLOPS of FlexAttention's backward: a launch whose CTAs have a block of keys, or a block of queries of one head."""
    own = [each for each in known if (each.kernel, each.head_dim, each.mask) == (FLEX, attention.head_dim, attention.mask)]
    most = max(each.flop for each in own)
    of_head = []
    flop = cycles = 0.0
    for is_kv in (True, False):
        of_kind = sorted((each for each in own if (each.flop == most) == is_kv), key=lambda each: each.cut)
        in_block = (KV_FLOP if is_kv else Q_FLOP) * BLOCK * BLOCK * attention.head_dim / of_kind[0].flop
        clocks = sum((attention.blocks == kind) * step.cycles * in_block for kind, step in zip((WHOLE, CUT), of_kind, strict=False))
        jobs = clocks.sum(axis=0) * attention.group if is_kv else clocks.sum(axis=1).repeat(attention.group)
        of_head += [float(job) + PROLOGUE[True] for job in jobs]
        flop += of_kind[0].flop * in_block * float((attention.blocks != NONE).sum())
        cycles += float(clocks.sum())
    clocks_in_all = makespan(of_head * attention.batch * attention.kv_heads, SMS)
    others = 4 * _elements(attention) / HBM_BYTES_PER_SECOND + 2 * LAUNCH_SECONDS
    return attention.flop / (clocks_in_all / LAW.ghz(tensor_share(flop, cycles)) / 1e9 + others) / 1e12


def strict(attention: Attention, loops: dict[str, Loop]) -> float:
    """TFLOPS of SDPA in strict mode; where heads are grouped keys are repeated, and dK and dV of all query heads are added up."""
    figure = attention.figure("FlashAttention-2", deterministic=True)
    speed = predicted(figure, loops[figure.kernel.label], LAW)
    added = 4 * _elements(attention) / HBM_BYTES_PER_SECOND + LAUNCH_SECONDS if attention.group > 1 else 0.0
    return figure.flop / (figure.flop / speed + added * 1e12)


@dataclass(frozen=True)
class Speeds:
    """TFLOPS of one attention: ours by bandwidth of additions, others by name, None where they have no such attention."""

    attention: Attention
    ours: dict[int, float]
    others: dict[str, float | None]
    published: float | None = None  # of deterministic FlashAttention-3

    def line(self) -> dict[str, object]:
        """Of a table."""
        mine = self.ours[BANDWIDTH]
        return {
            "d": self.attention.head_dim,
            "mask": self.attention.title,
            "S": self.attention.length,
            "ours (range)": f"{mine:.0f} ({min(self.ours.values()):.0f} to {max(self.ours.values()):.0f})",
            **{name: f"{speed:.0f}" if speed else "" for name, speed in self.others.items()},
            **{f"ours/{name}": f"{mine / speed:.2f}" if speed else "" for name, speed in self.others.items()},
        }


def _attention(head_dim: int, mask: str, length: int, group: int = 1) -> Attention:
    return Attention(TOKENS // length, HIDDEN // head_dim, length, head_dim, mask, group)


def speeds() -> list[Speeds]:
    """At every shape of the first table."""
    known, loops = steps(), read()
    made = []
    for head_dim, mask, length in product(HEAD_DIMS, MASKS, LENGTHS):
        attention = _attention(head_dim, mask, length)
        three = attention.figure("FlashAttention-4" if head_dim == 64 else "FlashAttention-3")
        others: dict[str, float | None] = {
            "Gluon": gluon(attention, known),
            "strict": strict(attention, loops),
            "flex": flex(attention, known),
            "FA3": predicted(three, loops[three.kernel.label], LAW),
        }
        figure = published("FA3", 90, (head_dim, head_dim), mask, length)
        made.append(Speeds(attention, ours(attention, known), others, figure.tflops if figure else None))
    return made


def speeds_of_masks() -> list[Speeds]:
    """Of the second: grouped heads, and masks that nothing but FlexAttention takes."""
    known, loops = steps(), read()
    made = []
    for head_dim, (mask, group), length in product(HEAD_DIMS, [("causal", GROUP), *((mask, 1) for mask in TITLES)], LENGTHS[1:]):
        attention = _attention(head_dim, mask, length, group)
        others = {"strict": strict(attention, loops) if mask in MASKS else None, "flex": flex(attention, known)}
        made.append(Speeds(attention, ours(attention, known), others))
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 2 for arguments that make no sense."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published.beside", description=__doc__)
    parser.add_argument("--replay", action="store_true", help="compile and replay the loops of beside.csv anew, first")
    parser.add_argument("--plot", metavar="FILE", help="draw the first table; needs matplotlib")
    args = parser.parse_args(argv)
    if args.plot and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    if args.replay:
        write(list(replayed()))
    made = speeds()
    lines = [each.line() | {"FA3 det.*": f"{each.published:.0f}" if each.published else ""} for each in made]
    table("TFLOPS on an H100, predicted", lines)
    print("\nours: the Triton kernel. Gluon: ours by default under these masks, at any speed of additions.")
    print("strict: SDPA in strict mode.", end=" ")
    print("FA3 is not deterministic; at d = 64 by FlashAttention-4's loop. *: published\n")
    table("Grouped heads, windows and documents: TFLOPS on an H100, predicted", [each.line() for each in speeds_of_masks()])
    print("\nWindows and documents are causal. SDPA takes them as a mask of S x S elements, which is not priced.")
    if args.plot:
        from .plot import beside

        beside(made, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
