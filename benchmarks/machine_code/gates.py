"""Compile every kernel that the tile tables allow; look in its SASS for spills, serialised wgmma, wrong occupancy.

A kernel that spills, waits behind every matmul or fits an SM less often than the cost model assumes still gives right results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, TypeVar

from dash_inductor.devices import LIMITS, device, occupancy
from dash_inductor.problem import BLOCK_MASK
from dash_inductor.schedule.parts import BANDS
from dash_inductor.templates.tiles import (
    GLUON_CONSUMERS,
    GLUON_HEAD_DIMS,
    HALF_DTYPES,
    ONE_PASS_HEAD_DIM,
    Template,
    gluon_columns,
    gluon_tile,
    tile,
    two_pass_tile,
)

from .cubin import inspect
from .replay import Replay, replay
from .rules import SHARE_OF_STOCK, Rules

if TYPE_CHECKING:
    from .generate import CompiledKernel, Generated

Number = TypeVar("Number", int, float)
DEVICES = {"sm_80": "a100", "sm_89": "rtx4090", "sm_90": "h100", "sm_100": "b200", "sm_120": "rtx5090"}
HEAD_DIMS = (16, 32, 64, 96, 128, 192, 256)
VALUE_DIMS = {96: 64, 192: 128}  # of MLA, beside values of the head dim itself
HEADS, LENGTH = 16, 8192
SHAPES: dict[str, dict[str, Any]] = {
    "full": {"mask": "full"},
    "causal": {"mask": "causal"},
    "causal-ragged-gqa": {"mask": "causal", "kv_heads": HEADS // 4, "q_len": LENGTH - 33, "kv_len": LENGTH - 33},
    "causal-dynamic-gqa": {"mask": "causal", "kv_heads": HEADS // 4, "dynamic": True},
}
# FlexAttentions, by names of codegen/mods.py's functions.
FLEX_SHAPES: dict[str, dict[str, Any]] = {
    "flex": {"score_mod": "none", "mask_mod": "none"},
    "flex-causal": {"score_mod": "none", "mask_mod": "causal"},
    "flex-window-soft-cap": {"score_mod": "soft-cap", "mask_mod": "window"},
    "flex-documents-alibi": {"score_mod": "alibi", "mask_mod": "documents"},
}
# Of query and value, of FlexAttentions in each template: those that models have. The tiles of others are judged by SHAPES.
FLEX_HEAD_DIMS = {Template.ONE_PASS: ((64, 64), (128, 128)), Template.TWO_PASS: ((192, 128), (256, 256))}
# The kernel of one pass that is written in Gluon, for Hopper alone; what it takes of SHAPES and FLEX_SHAPES, and FlexAttentions for
# it alone. It asks no mask function, so that its code is the same under all masks in blocks.
GLUON = "gluon"
GLUON_SHAPES = ("full", "causal", "causal-ragged-gqa")
GLUON_FLEX_SHAPES: dict[str, dict[str, Any]] = {"flex-documents": {"score_mod": "none", "mask_mod": "documents"}}
GLUON_DROPOUT: dict[str, dict[str, Any]] = {f"{mask}-dropout": {"mask": mask, "dropout": 0.1} for mask in ("full", "causal")}
GLUON_FUNCTIONS = ("flex-window-soft-cap", "flex-documents-alibi")
GLUON_PADDED = (80, 96, 192)  # head dims that it pads: with and without functions, under masks in blocks
# Chains in parts, which one pass has, in Gluon or not.
IN_PARTS = "flex-in-parts"
PARTS_SHAPES: dict[str, dict[str, Any]] = {IN_PARTS: {"score_mod": "none", "mask_mod": "causal", "kv_heads": HEADS // 4}}
ALL_FLEX_SHAPES = FLEX_SHAPES | GLUON_FLEX_SHAPES | PARTS_SHAPES
Key = tuple[str, str, int]  # of the tables below: architecture, Triton, head dim
# What the loop of a FlexAttention may have of the instructions of stock's, where that is more than SHARE_OF_STOCK.
SHARES_OF_STOCK: dict[Key, dict[str, float]] = {("sm_90", "3.9", 128): {"flex": 0.72}}
# The most LDL and STL of the main loop, by shape; 0 elsewhere. On sm_90, at 128 dK and dV alone take 128 of the 255 registers of a
# thread, P and dP 64, and at 64 it is the other way round; the score before a soft-cap lives on until its derivative, a bias until
# it is added. What few there are at 64 cost less than half the rows, by the replay of each Triton's code; of chains in parts
# that was not tried.
MOST_LOCAL: dict[Key, dict[str, int]] = {
    ("sm_90", "3.6", 64): {"full": 4, "flex": 4, "flex-causal": 6, IN_PARTS: 24},
    ("sm_90", "3.7", 64): {IN_PARTS: 1},
    ("sm_90", "3.8", 64): {"full": 19, "causal": 2, "causal-ragged-gqa": 2, "flex": 19, "flex-causal": 6, IN_PARTS: 9},
    ("sm_90", "3.9", 64): {"full": 22, "flex": 22},
    ("sm_90", "3.6", 128): {"flex-window-soft-cap": 23, "flex-documents-alibi": 2},
    ("sm_90", "3.7", 128): {"flex-window-soft-cap": 9, "flex-documents-alibi": 6},
    ("sm_90", "3.8", 128): {"flex-window-soft-cap": 10, "flex-documents-alibi": 6},
    ("sm_90", "3.9", 128): {"flex-window-soft-cap": 19},
    # MLA in two passes: dK of 256 columns and dV of 128 take 192. In CTAs of their own nothing would spill, and a tile take 28 %
    # more cycles by the replay.
    ("sm_90", "3.6", 192): {"flex-window-soft-cap": 14, "flex-documents-alibi": 4},
    ("sm_90", "3.7", 192): {"flex-window-soft-cap": 2},
    ("sm_90", "3.8", 192): {"flex-window-soft-cap": 2},
    ("sm_90", "3.9", 192): {"causal-ragged-gqa": 8, "causal-dynamic-gqa": 2, "flex-window-soft-cap": 28},
    ("sm_120", "3.8", 64): {"flex-window-soft-cap": 1},
    ("sm_120", "3.9", 64): {"flex-window-soft-cap": 1},
}
# By columns of the tile. Dropout has most of them, since delta is loaded before dV's matmul is issued. By the replay the loop is
# shorter all the same, but under a full mask in 64 columns by Triton 3.9.
MOST_LOCAL_OF_GLUON: dict[Key, dict[str, int]] = {
    ("sm_90", "3.6", 64): {"flex-window-soft-cap": 6, "causal-dropout": 27},
    ("sm_90", "3.7", 64): {"flex-window-soft-cap": 4, "causal-dropout": 25},
    ("sm_90", "3.8", 64): {"flex-window-soft-cap": 4, "causal-dropout": 14},
    ("sm_90", "3.9", 64): {"full": 8, "flex-window-soft-cap": 3, "full-dropout": 8, "causal-dropout": 2},
    ("sm_90", "3.6", 128): {"causal": 1, "causal-ragged-gqa": 3, "flex-window-soft-cap": 2, "full-dropout": 1, "causal-dropout": 3},
    ("sm_90", "3.7", 128): {"causal-ragged-gqa": 1, "flex-window-soft-cap": 2, "full-dropout": 1, "causal-dropout": 1},
    ("sm_90", "3.8", 128): {"flex-window-soft-cap": 2, "full-dropout": 2},
    ("sm_90", "3.9", 128): {"full-dropout": 4, "causal-dropout": 4},
    ("sm_90", "3.9", 256): dict.fromkeys(("full", "causal", "causal-ragged-gqa", IN_PARTS, *GLUON_DROPOUT), 1),
}
# The most barriers of all warps in the main loop, on sm_90: of one pass, where Triton 3.9 puts 8 and those before it at most 7, and
# of Gluon by columns of its tile. Its source has two for the warps that multiply, and three in 256 columns. Triton 3.6 adds one in
# 64, between the two stores of dS.
MOST_BARRIERS = 8
MOST_BARRIERS_OF_GLUON = {64: 3, 128: 2, 256: 3}
# The most instructions of the main loop of one pass, by shape: as many as it compiles to. More are not wrong, but slower: a reason
# to look at what changed.
MOST_INSTRUCTIONS: dict[Key, dict[str, int]] = {
    ("sm_90", "3.6", 64): {"full": 695, "causal": 794, "causal-ragged-gqa": 846, "flex": 695, "flex-causal": 945, IN_PARTS: 1025},
    ("sm_90", "3.6", 128): {"full": 489, "causal": 572, "causal-ragged-gqa": 604, "flex": 489, "flex-causal": 746, IN_PARTS: 689},
    ("sm_90", "3.7", 64): {"full": 652, "causal": 760, "causal-ragged-gqa": 831, "flex": 652, "flex-causal": 823, IN_PARTS: 878},
    ("sm_90", "3.7", 128): {"full": 481, "causal": 560, "causal-ragged-gqa": 592, "flex": 481, "flex-causal": 698, IN_PARTS: 613},
    ("sm_90", "3.8", 64): {"full": 697, "causal": 780, "causal-ragged-gqa": 837, "flex": 697, "flex-causal": 840, IN_PARTS: 902},
    ("sm_90", "3.8", 128): {"full": 504, "causal": 569, "causal-ragged-gqa": 626, "flex": 504, "flex-causal": 698, IN_PARTS: 638},
    ("sm_90", "3.9", 64): {"full": 771, "causal": 854, "causal-ragged-gqa": 911, "flex": 771, "flex-causal": 910, IN_PARTS: 951},
    ("sm_90", "3.9", 128): {"full": 580, "causal": 642, "causal-ragged-gqa": 698, "flex": 580, "flex-causal": 675, IN_PARTS: 711},
    ("sm_100", "3.6", 64): {"full": 588, "causal": 657, "causal-ragged-gqa": 696, "flex": 588, "flex-causal": 714},
    ("sm_100", "3.6", 128): {"full": 586, "causal": 628, "causal-ragged-gqa": 683, "flex": 586, "flex-causal": 581},
    ("sm_100", "3.7", 64): {"full": 509, "causal": 577, "causal-ragged-gqa": 616, "flex": 509, "flex-causal": 574},
    ("sm_100", "3.7", 128): {"full": 509, "causal": 550, "causal-ragged-gqa": 604, "flex": 509, "flex-causal": 540},
    ("sm_100", "3.9", 64): {"full": 494, "causal": 557, "causal-ragged-gqa": 597, "flex": 494, "flex-causal": 542},
    ("sm_100", "3.9", 128): {"full": 475, "causal": 512, "causal-ragged-gqa": 566, "flex": 475, "flex-causal": 501},
}
# What there is of each field of a cell.
CHOICES: dict[str, Sequence[Any]] = {
    "arch": tuple(DEVICES),
    "template": (Template.ONE_PASS.value, Template.TWO_PASS.value, GLUON),
    "head_dim": tuple(sorted({*HEAD_DIMS, *GLUON_PADDED})),
    "dtype": HALF_DTYPES,
    "shape": (*SHAPES, *ALL_FLEX_SHAPES, *GLUON_DROPOUT),
}


@dataclass(frozen=True)
class Cell:
    """One kind of attention on one GPU, in one template."""

    arch: str  # sm_90
    template: str  # or GLUON
    dtype: str
    head_dim: int
    shape: str  # of SHAPES, ALL_FLEX_SHAPES or GLUON_DROPOUT
    value_dim: int | None = None  # where it is not head_dim

    @property
    def rules(self) -> Rules:
        """Those of its tile, with the figures of the installed Triton where there are some."""
        changes_scores = ALL_FLEX_SHAPES.get(self.shape, {}).get("score_mod", "none") != "none"
        of_one_pass = partial(tile, small=changes_scores)
        find = {Template.ONE_PASS: of_one_pass, Template.TWO_PASS: two_pass_tile, GLUON: gluon_tile}[self.template]
        arch = device(DEVICES[self.arch]).arch
        return Rules(
            arch,
            find(arch, self.dtype, self.head_dim, self.value_dim),
            self._listed(MOST_INSTRUCTIONS),
            self._listed(MOST_LOCAL) or self._listed(MOST_LOCAL_OF_GLUON, of_gluon=True) or 0,
            self._most_barriers,
            self._listed(SHARES_OF_STOCK) or SHARE_OF_STOCK,
            is_gluon=self.template == GLUON,
            is_plain=self.shape in GLUON_SHAPES,
        )

    @property
    def exists(self) -> bool:
        """Whether there is such a kernel, and models have such an attention."""
        if self.template == GLUON:
            of_blocks = (*GLUON_FLEX_SHAPES, *GLUON_FUNCTIONS)
            shapes = dict.fromkeys(GLUON_PADDED, of_blocks)
            shapes |= dict.fromkeys(GLUON_HEAD_DIMS, (*GLUON_SHAPES, *GLUON_DROPOUT, *PARTS_SHAPES, *of_blocks))
            return (self.arch, self.value_dim) == ("sm_90", None) and self.shape in shapes.get(self.head_dim, ())
        if self.head_dim not in HEAD_DIMS:
            return False
        is_one_pass = self.template == Template.ONE_PASS
        if self.shape in (*GLUON_FLEX_SHAPES, *GLUON_DROPOUT) or (is_one_pass and self.head_dim > ONE_PASS_HEAD_DIM):
            return False
        if self.shape in PARTS_SHAPES and not is_one_pass:
            return False
        return self.shape in SHAPES or (self.head_dim, self.value_dim or self.head_dim) in FLEX_HEAD_DIMS[Template(self.template)]

    @property
    def _most_barriers(self) -> int | None:
        if self.template == GLUON:
            return MOST_BARRIERS_OF_GLUON[gluon_columns(self.head_dim, self.head_dim)]
        return MOST_BARRIERS if (self.arch, self.template) == ("sm_90", Template.ONE_PASS) else None

    def _listed(self, figures: Mapping[Key, Mapping[str, Number]], *, of_gluon: bool = False) -> Number | None:
        import triton

        is_mla = self.value_dim is not None
        if (self.template == GLUON) != of_gluon or is_mla != (self.template == Template.TWO_PASS):
            return None
        columns = gluon_columns(self.head_dim, self.head_dim) if of_gluon else self.head_dim
        return figures.get((self.arch, triton.__version__.rpartition(".")[0], columns), {}).get(self.shape)


def cells(**asked: Sequence[Any]) -> list[Cell]:
    """Every cell of the tile tables, or those asked for, by names of CHOICES."""
    every = (
        Cell(arch, template, dtype, head_dim, shape, value_dim)
        for arch, template, head_dim, dtype, shape in product(*(CHOICES | asked).values())
        for value_dim in dict.fromkeys((None, VALUE_DIMS.get(head_dim)))
    )
    return [cell for cell in every if cell.exists]


def figures(compiled: CompiledKernel, rules: Rules) -> dict[str, int | bool | None]:
    """All that is gated of one compiled kernel, by name: the cubin's figures, Triton's, and how many CTAs an SM holds."""
    report = inspect(compiled.cubin, compiled.metadata.shared, rules.tile.kinds)
    num_warps = compiled.metadata.num_warps
    tmem_columns = getattr(compiled.metadata, "tmem_size", None) or 0
    return {
        "num_warps": num_warps,
        "num_stages": compiled.metadata.num_stages,
        **report.as_dict(),
        "tmem_columns": tmem_columns,
        "ctas_per_sm": occupancy(
            rules.arch,
            registers=report.registers,
            shared_bytes=report.shared_bytes,
            threads=num_warps * LIMITS[rules.arch].warp_size,
            tmem_columns=tmem_columns,
        ),
    }


def replays(compiled: CompiledKernel, rules: Rules) -> tuple[Replay, ...]:
    """A replay of each main loop; errors are those of `replay`."""
    warps, tma_bytes = compiled.metadata.num_warps, 0
    if rules.is_gluon:  # TMA writes Q, grad_out, lse and delta of a Q tile, and reads dQ
        warps, tma_bytes = GLUON_CONSUMERS, rules.tile.block_m * ((2 * 2 + 4) * rules.tile.block_d + 2 * 4)
    return replay(compiled.cubin, rules.tile.kinds, warps=warps, tma_bytes=tma_bytes)


def predicted(compiled: CompiledKernel, rules: Rules) -> dict[str, Any]:
    """What each main loop takes a step by the replay (`Replay.as_dict`), an estimate that is not gated; or None, and why not."""
    try:
        loops = replays(compiled, rules)
    except ValueError as error:
        return {"predicted_cycles": None, "not_predicted": str(error)}
    return {"predicted_cycles": [each.as_dict() for each in loops], "not_predicted": None}


def predicted_cycles(values: Mapping[str, Any]) -> str | None:
    """The clocks a step of `predicted`, loop by loop; None if there are none."""
    loops = values.get("predicted_cycles")
    return " + ".join(f"{loop['cycles']:.0f}" for loop in loops) if loops else None


def generated(cell: Cell, *, rewrite: bool = True) -> Generated:
    """The code of a cell's backward; stock's own if not `rewrite`, of a FlexAttention alone."""
    from dash_inductor.codegen.flex import FlexAttention
    from dash_inductor.hooks.install import enabled

    from .flex import flex_backward
    from .generate import attention_backward

    key = DEVICES[cell.arch]
    sizes: dict[str, Any] = {
        "batch": 2,
        "heads": HEADS,
        "head_dim": cell.head_dim,
        "value_dim": cell.value_dim,
        "dtype": cell.dtype,
    }
    of_flex = cell.shape in ALL_FLEX_SHAPES
    template: Any = "auto" if of_flex else cell.template
    with enabled(kernel="triton", template=template):
        if of_flex:
            attention = FlexAttention(length=LENGTH, **({"kv_heads": HEADS} | sizes | ALL_FLEX_SHAPES[cell.shape]))
            return flex_backward(key, attention, rewrite=rewrite)
        return attention_backward(key, **({"q_len": LENGTH, "kv_len": LENGTH, "kv_heads": HEADS} | sizes | SHAPES[cell.shape]))


def stock_kernel(cell: Cell) -> CompiledKernel:
    """Stock's kernel of a FlexAttention, whose loops are of keys and of queries."""
    from .generate import compile_kernel

    (source,) = (text for text in generated(cell, rewrite=False).kernels.values() if "tl.dot(" in text)
    return compile_kernel(source, DEVICES[cell.arch])


def instructions_of_stock(cell: Cell) -> int:
    """In both of its loops."""
    compiled = stock_kernel(cell)
    return inspect(compiled.cubin, compiled.metadata.shared, 2).instructions_in_loop


def compiled(cell: Cell) -> CompiledKernel:
    """The main kernel of a cell."""
    from .generate import compile_kernel
    from .gluon import compile_gluon

    if cell.template == GLUON:
        sizes: dict[str, Any] = {"q_len": LENGTH, "kv_len": LENGTH, "kv_heads": HEADS}
        sizes |= (SHAPES | GLUON_DROPOUT).get(cell.shape, {"mask": BLOCK_MASK})
        if cell.shape == IN_PARTS:
            sizes |= {"kv_heads": HEADS // 2, "bands": BANDS, "sets": 2}
        sizes |= {"head_dim": cell.head_dim, "score_mod": ALL_FLEX_SHAPES.get(cell.shape, {}).get("score_mod", "none")}
        return compile_gluon(DEVICES[cell.arch], batch=2, heads=HEADS, dtype=cell.dtype, **sizes)
    code = generated(cell)
    (kernel,) = code.templates
    return compile_kernel(code.kernels[kernel], DEVICES[cell.arch])


def judged(cell: Cell, *, replayed: bool = True) -> dict[str, Any]:
    """The main kernel of a cell: figures, violated gates, and cycles where it is to be `replayed`, which takes half the time."""
    rules = cell.rules
    values = asdict(cell) | {"tile": str(rules.tile)}
    try:
        kernel = compiled(cell)
        values |= figures(kernel, rules)
        if replayed:
            values |= predicted(kernel, rules)
        if cell.shape in FLEX_SHAPES and cell.template == Template.ONE_PASS and cell.arch == "sm_90":
            rules = replace(rules, stock_instructions=instructions_of_stock(cell))
    except Exception as error:  # what Triton and ptxas raise has no common class
        gates = [f"it does not compile: {str(error).splitlines()[0]}"]
    else:
        gates = rules.violated(values)
    own = {name: value for name, value in vars(rules).items() if name not in ("arch", "tile", "is_gluon")}
    return values | own | {"gates": gates}
