"""The replayed main loops of our one pass, in Triton and Gluon, and of PyTorch's FlexAttention: beside.csv, and how it is made."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dash_inductor.sass.replay import Replay, loops_of, replay_loop
from dash_inductor.sass.replay.constants import Constants

from .attention import TITLES
from .kernels import MASKS

if TYPE_CHECKING:
    from dash_inductor.codegen.generate import Generated

FILE = Path(__file__).with_name("beside.csv")
HEAD_DIMS = (64, 128)
OURS, GLUON, FLEX = "one pass", "one pass in Gluon", "flex"
BANDWIDTH, RANGE = 32, (18, 64)  # bytes a clock that an SM adds to memory: taken, and possible


@dataclass(frozen=True)
class Step:
    """A main loop of ours or of FlexAttention's. bandwidth: as it was replayed. cut: of a tile that the mask cuts."""

    kernel: str
    head_dim: int
    mask: str
    bandwidth: int
    cut: bool
    flop: int
    cycles: float


def replayed() -> Iterator[Step]:
    """Compile and replay all of them: about two minutes."""
    from dash_inductor.sass.gates import Cell, generated

    for head_dim in HEAD_DIMS:
        for mask in MASKS:
            yield _gluon(head_dim, mask)
            yield from _ours(head_dim, mask, generated(Cell("sm_90", "one_pass", "bf16", head_dim, mask)))
            shape = "flex-causal" if mask == "causal" else "flex"
            yield from _flex(head_dim, mask, generated(Cell("sm_90", "one_pass", "bf16", head_dim, shape), rewrite=False))
        for mask in TITLES:
            yield from _ours(head_dim, mask, _flex_attention(head_dim, mask, rewrite=True))
            yield from _flex(head_dim, mask, _flex_attention(head_dim, mask, rewrite=False))


def _flex_attention(head_dim: int, mask: str, *, rewrite: bool) -> Generated:
    from dash_inductor.codegen.flex import FlexAttention, flex_backward
    from dash_inductor.sass.gates import HEADS, LENGTH

    return flex_backward("h100", FlexAttention(LENGTH, HEADS, HEADS, head_dim, mask_mod=mask, batch=2), rewrite=rewrite)


def _loops(source: str, count: int) -> list[Any]:
    from dash_inductor.codegen.generate import compile_kernel

    return loops_of(compile_kernel(source, "h100").cubin, count)


def _step(kernel: str, head_dim: int, mask: str, bandwidth: int, cut: bool, replay: Replay) -> Step:
    return Step(kernel, head_dim, mask, bandwidth, cut, replay.flop, round(replay.cycles, 1))


def _ours(head_dim: int, mask: str, code: Generated) -> Iterator[Step]:
    """One loop, in which a branch leads to the mask."""
    (name,) = code.templates
    (loop,) = _loops(code.kernels[name], 1)
    for bandwidth in (BANDWIDTH, *RANGE):
        constants = Constants().set_from({"addition_bandwidth": bandwidth})
        for cut in (False, True)[: 1 if mask == "full" else 2]:
            yield _step(OURS, head_dim, mask, bandwidth, cut, replay_loop(loop, edge=cut, constants=constants))


def _gluon(head_dim: int, mask: str) -> Step:
    """Another warp adds, behind the loop: at any bandwidth that takes a tile of dQ in less than a step."""
    from dash_inductor.sass.gates import GLUON as TEMPLATE
    from dash_inductor.sass.gates import Cell, judged

    (loop,) = judged(Cell("sm_90", TEMPLATE, "bf16", head_dim, mask))["predicted_cycles"]
    return Step(GLUON, head_dim, mask, BANDWIDTH, False, loop["flop"], loop["cycles"])


def _flex(head_dim: int, mask: str, code: Generated) -> Iterator[Step]:
    """A loop for dK and dV, and one for dQ; each twice under a mask, of which the slower one is for tiles that the mask cuts."""
    (source,) = (text for text in code.kernels.values() if "tl.dot(" in text)
    replays = [replay_loop(loop) for loop in _loops(source, 4)]
    for flop in sorted({each.flop for each in replays}, reverse=True):
        of_kind = sorted((each for each in replays if each.flop == flop), key=lambda each: each.cycles)
        for cut, each in zip((False, True), of_kind, strict=False):
            yield _step(FLEX, head_dim, mask, BANDWIDTH, cut, each)


def steps() -> list[Step]:
    """beside.csv."""
    with open(FILE, newline="") as file:
        return [
            Step(
                row["kernel"],
                int(row["head_dim"]),
                row["mask"],
                int(row["bandwidth"]),
                row["cut"] == "True",
                int(row["flop"]),
                float(row["cycles"]),
            )
            for row in csv.DictReader(file)
        ]


def write(made: Sequence[Step]) -> None:
    """beside.csv."""
    with open(FILE, "w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Step)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, made))
