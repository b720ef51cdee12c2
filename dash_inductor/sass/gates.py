"""Compile every kernel that the tile tables allow; look in its SASS for spills, serialised wgmma, wrong occupancy.

A kernel that spills, waits behind every matmul or fits an SM less often than the cost model assumes still gives right results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ..devices import LIMITS, device, occupancy
from ..templates.tiles import HALF_DTYPES, ONE_PASS_HEAD_DIM, Template, Tile, TwoPassTile, tile, tiles_of, two_pass_tile
from .cubin import inspect
from .replay import replay

if TYPE_CHECKING:
    from ..codegen.generate import CompiledKernel, Generated

Number = TypeVar("Number", int, float)
DEVICES = {"sm_80": "a100", "sm_90": "h100", "sm_100": "b200"}
HEAD_DIMS = (16, 32, 64, 96, 128, 192, 256)
VALUE_DIMS = {96: 64, 192: 128}  # of MLA, beside values of the head dim itself
HEADS, LENGTH = 16, 8192
SHAPES: dict[str, dict[str, Any]] = {
    "full": {"mask": "full"},
    "causal": {"mask": "causal"},
    "causal-ragged-gqa": {"mask": "causal", "kv_heads": HEADS // 4, "q_len": LENGTH - 33, "kv_len": LENGTH - 33},
    "causal-dynamic-gqa": {"mask": "causal", "kv_heads": HEADS // 4, "dynamic": True},
}
# FlexAttentions, in one pass: names of codegen/flex.py's functions.
FLEX_SHAPES: dict[str, dict[str, str]] = {
    "flex": {"score_mod": "none", "mask_mod": "none"},
    "flex-causal": {"score_mod": "none", "mask_mod": "causal"},
    "flex-window-soft-cap": {"score_mod": "soft-cap", "mask_mod": "window"},
    "flex-documents-alibi": {"score_mod": "alibi", "mask_mod": "documents"},
}
FLEX_HEAD_DIMS = (64, 128)  # those that models have; the tiles of others are judged by SHAPES
# What the loop of a FlexAttention may have of the instructions of the two loops of stock's kernel, which multiply seven times to
# our five and call score_mod and mask_mod twice; (Triton, head dim) -> by shape, on sm_90, where it has more.
SHARE_OF_STOCK = 0.70
SHARES_OF_STOCK: dict[tuple[str, int], dict[str, float]] = {("3.9", 128): {"flex": 0.705}}
# (Triton, head dim) -> the most LDL and STL of the main loop, by shape, on sm_90; 0 elsewhere. At 128 dK and dV alone take 128 of
# the 255 registers of a thread, P and dP 64; the score before a soft-cap lives on until its derivative, a bias until it is added.
MOST_LOCAL: dict[tuple[str, int], dict[str, int]] = {
    ("3.6", 128): {"flex-window-soft-cap": 38},
    ("3.7", 128): {"flex-window-soft-cap": 28, "flex-documents-alibi": 6},
    ("3.8", 128): {"flex-window-soft-cap": 28, "flex-documents-alibi": 6},
    ("3.9", 128): {"flex-window-soft-cap": 22},
    # MLA in two passes: dK of 256 columns and dV of 128 take 192. In CTAs of their own nothing would spill, and a tile take 28 %
    # more cycles by the replay.
    ("3.9", 192): {"causal-ragged-gqa": 8, "causal-dynamic-gqa": 2},
}
MATMULS = {80: "hmma", 90: "hgmma", 100: "utcmma"}
# (Triton, head dim) -> the most instructions of the main loop of one pass, by shape, on sm_90: as many as it compiles to. More are
# not wrong, but slower: a reason to look at what changed.
MOST_INSTRUCTIONS: dict[tuple[str, int], dict[str, int]] = {
    ("3.6", 64): {"full": 416, "causal": 474, "causal-ragged-gqa": 509, "flex": 416, "flex-causal": 592},
    ("3.6", 128): {"full": 481, "causal": 563, "causal-ragged-gqa": 595, "flex": 481, "flex-causal": 736},
    ("3.7", 64): {"full": 397, "causal": 458, "causal-ragged-gqa": 493, "flex": 397, "flex-causal": 552},
    ("3.7", 128): {"full": 473, "causal": 550, "causal-ragged-gqa": 582, "flex": 473, "flex-causal": 688},
    ("3.8", 64): {"full": 397, "causal": 457, "causal-ragged-gqa": 493, "flex": 397, "flex-causal": 551},
    ("3.8", 128): {"full": 498, "causal": 559, "causal-ragged-gqa": 616, "flex": 498, "flex-causal": 688},
    ("3.9", 64): {"full": 460, "causal": 518, "causal-ragged-gqa": 553, "flex": 460, "flex-causal": 548},
    ("3.9", 128): {"full": 569, "causal": 631, "causal-ragged-gqa": 686, "flex": 569, "flex-causal": 666},
}


@dataclass(frozen=True)
class Cell:
    """One kind of attention on one GPU, in one template."""

    arch: str  # sm_90
    template: str
    dtype: str
    head_dim: int
    shape: str  # of SHAPES or FLEX_SHAPES
    value_dim: int | None = None  # where it is not head_dim

    @property
    def tile(self) -> Tile | TwoPassTile:
        """The tile of its template."""
        find = tile if self.template == Template.ONE_PASS else two_pass_tile
        return find(device(DEVICES[self.arch]).arch, self.dtype, self.head_dim, self.value_dim)

    @property
    def most_instructions(self) -> int | None:
        """Of the installed Triton, where there is such a figure."""
        return self._listed(MOST_INSTRUCTIONS)

    @property
    def most_local(self) -> int:
        """Of the installed Triton: LDL and STL."""
        return self._listed(MOST_LOCAL) or 0

    @property
    def share_of_stock(self) -> float:
        """The most instructions by the installed Triton, in parts of stock's."""
        return self._listed(SHARES_OF_STOCK) or SHARE_OF_STOCK

    def _listed(self, figures: Mapping[tuple[str, int], Mapping[str, Number]]) -> Number | None:
        import triton

        is_mla = self.value_dim is not None
        if self.arch != "sm_90" or is_mla != (self.template == Template.TWO_PASS):
            return None
        return figures.get((triton.__version__.rpartition(".")[0], self.head_dim), {}).get(self.shape)


def cells(
    archs: Sequence[str] = tuple(DEVICES),
    templates: Sequence[str] = (Template.ONE_PASS, Template.TWO_PASS),
    dtypes: Sequence[str] = HALF_DTYPES,
    head_dims: Sequence[int] = HEAD_DIMS,
    shapes: Sequence[str] = (*SHAPES, *FLEX_SHAPES),
) -> list[Cell]:
    """Every cell of the tile tables, or those asked for."""
    return [
        Cell(arch, template, dtype, head_dim, shape, value_dim)
        for arch in archs
        for template in templates
        for head_dim in head_dims
        if template == Template.TWO_PASS or head_dim <= ONE_PASS_HEAD_DIM
        for dtype in dtypes
        for shape in shapes
        if shape in SHAPES or (template == Template.ONE_PASS and head_dim in FLEX_HEAD_DIMS)
        for value_dim in ((None, VALUE_DIMS[head_dim]) if head_dim in VALUE_DIMS else (None,))
    ]


def figures(compiled: CompiledKernel, arch: int, used: Tile | TwoPassTile) -> dict[str, int | bool | None]:
    """All that is gated of one compiled kernel, by name: the cubin's figures, Triton's, and how many CTAs an SM holds."""
    report = inspect(compiled.cubin, compiled.metadata.shared, used.kinds)
    num_warps = compiled.metadata.num_warps
    tmem_columns = getattr(compiled.metadata, "tmem_size", None) or 0
    return {
        "num_warps": num_warps,
        "num_stages": compiled.metadata.num_stages,
        **report.as_dict(),
        "tmem_columns": tmem_columns,
        "ctas_per_sm": occupancy(
            arch,
            registers=report.registers,
            shared_bytes=report.shared_bytes,
            threads=num_warps * LIMITS[arch].warp_size,
            tmem_columns=tmem_columns,
        ),
    }


def predicted(compiled: CompiledKernel, used: Tile | TwoPassTile) -> dict[str, Any]:
    """What each main loop takes a step by the replay (`Replay.as_dict`), an estimate that is not gated; or None, and why not."""
    try:
        replays = replay(compiled.cubin, used.kinds, warps=compiled.metadata.num_warps)
    except ValueError as error:
        return {"predicted_cycles": None, "not_predicted": str(error)}
    return {"predicted_cycles": [each.as_dict() for each in replays], "not_predicted": None}


def predicted_cycles(values: Mapping[str, Any]) -> str | None:
    """The clocks a step of `predicted`, loop by loop; None if there are none."""
    loops = values.get("predicted_cycles")
    return " + ".join(f"{loop['cycles']:.0f}" for loop in loops) if loops else None


def violated(
    values: Mapping[str, Any],
    arch: int,
    used: Tile | TwoPassTile,
    *,
    most_instructions: int | None = None,
    most_local: int = 0,
    stock_instructions: int | None = None,
    share_of_stock: float = SHARE_OF_STOCK,
) -> list[str]:
    """The gates that the `figures` of a main kernel do not pass, a sentence each."""
    limits = LIMITS[arch]
    one_pass = isinstance(used, Tile)
    matmul = MATMULS[tiles_of(arch)]
    others = [name for name in MATMULS.values() if name != matmul and values[name]]
    additions = one_pass and used.atomic_add
    gates = [
        (
            values["main_loops"] == used.kinds,
            f"{values['main_loops']} loops with matmuls, where the tile has {used.kinds} kinds of CTAs",
        ),
        (values[matmul] > 0, f"no matmul in the main loop is {matmul.upper()}"),
        (not others, f"matmuls in the main loop are {', '.join(name.upper() for name in others)}, not {matmul.upper()}"),
        (
            not values["wgmma_serialised"],
            f"every wgmma is waited for: {values['warpgroup_depbars']} WARPGROUP.DEPBAR in the main loop",
        ),
        (
            values["copies_ahead"] is None or values["copies_ahead"] >= 0,
            f"nothing is prefetched: the first wait is for {-(values['copies_ahead'] or 0)} groups of copies of the step before",
        ),
        (
            not values["idle_fences"] and not values["idle_additions"],
            f"the tensor cores idle under {values['idle_fences']} fences and {values['idle_additions']} additions",
        ),
        (values["ldgsts"] + values["utmaldg"] > 0, "the loads are not asynchronous: neither LDGSTS nor UTMALDG in the main loop"),
        (
            values["local_in_loop"] <= most_local,
            f"the main loop spills: {values['local_in_loop']} LDL and STL" + (f", more than {most_local}" if most_local else ""),
        ),
        (values["atomg"] == 0, f"{values['atomg']} ATOMG in the main loop: an addition returns its value"),
        (
            (values["red"] > 0) == additions,
            f"{values['red']} REDG.F32 in the main loop, where the tile has {'some' if additions else 'none'}",
        ),
        (values["registers"] <= limits.registers_per_thread, f"{values['registers']} registers of {limits.registers_per_thread}"),
        (
            values["shared_bytes"] <= limits.shared_bytes_per_block_optin,
            f"{values['shared_bytes']} bytes of shared memory of {limits.shared_bytes_per_block_optin}",
        ),
        (
            values["tmem_columns"] <= limits.tmem_columns,
            f"{values['tmem_columns']} columns of tensor memory of {limits.tmem_columns}",
        ),
        (
            # The model of two passes takes one, and more do no harm, since nobody waits.
            values["ctas_per_sm"] == used.ctas_per_sm if one_pass else values["ctas_per_sm"] > 0,
            f"an SM holds {values['ctas_per_sm']} CTAs, where the tile table has {getattr(used, 'ctas_per_sm', 'at least 1')}",
        ),
        (
            most_instructions is None or values["instructions_in_loop"] <= most_instructions,
            f"{values['instructions_in_loop']} instructions in the main loop, more than {most_instructions}",
        ),
        (
            stock_instructions is None or values["instructions_in_loop"] <= share_of_stock * stock_instructions,
            f"{values['instructions_in_loop']} instructions in the main loop, "
            f"more than {share_of_stock} of stock's {stock_instructions}",
        ),
    ]
    return [sentence for passed, sentence in gates if not passed]


def generated(cell: Cell, *, rewrite: bool = True) -> Generated:
    """The code of a cell's backward; stock's own if not `rewrite`, of a FlexAttention alone."""
    from ..codegen.flex import flex_backward
    from ..codegen.generate import attention_backward
    from ..hooks.install import enabled

    key = DEVICES[cell.arch]
    sizes: dict[str, Any] = {"batch": 2, "heads": HEADS, "head_dim": cell.head_dim, "dtype": cell.dtype}
    if cell.shape in FLEX_SHAPES:
        return flex_backward(key, length=LENGTH, kv_heads=HEADS, rewrite=rewrite, **(sizes | FLEX_SHAPES[cell.shape]))
    sizes["value_dim"] = cell.value_dim
    with enabled(template=cell.template):
        return attention_backward(key, **({"q_len": LENGTH, "kv_len": LENGTH, "kv_heads": HEADS} | sizes | SHAPES[cell.shape]))


def instructions_of_stock(cell: Cell) -> int:
    """In the two loops of stock's kernel of a FlexAttention."""
    from ..codegen.generate import compile_kernel

    (source,) = (text for text in generated(cell, rewrite=False).kernels.values() if "tl.dot(" in text)
    compiled = compile_kernel(source, DEVICES[cell.arch])
    return inspect(compiled.cubin, compiled.metadata.shared, 2).instructions_in_loop


def judged(cell: Cell) -> dict[str, Any]:
    """The main kernel of a cell: figures and violated gates."""
    from ..codegen.generate import compile_kernel

    key = DEVICES[cell.arch]
    code = generated(cell)
    (kernel,) = code.templates
    arch = device(key).arch
    most: dict[str, Any] = {name: getattr(cell, name) for name in ("most_instructions", "most_local", "share_of_stock")}
    most["stock_instructions"] = None
    values = asdict(cell) | {"tile": str(cell.tile)}
    try:
        compiled = compile_kernel(code.kernels[kernel], key)
        values |= figures(compiled, arch, cell.tile) | predicted(compiled, cell.tile)
        if cell.shape in FLEX_SHAPES and cell.arch == "sm_90":
            most["stock_instructions"] = instructions_of_stock(cell)
    except Exception as error:  # what Triton and ptxas raise has no common class
        return values | most | {"gates": [f"it does not compile: {str(error).splitlines()[0]}"]}
    return values | most | {"gates": violated(values, arch, cell.tile, **most)}
