"""Compile every kernel that the tile tables allow; look in its SASS for spills, serialised wgmma, wrong occupancy.

A kernel that spills, waits behind every matmul or fits an SM less often than the cost model assumes still gives right results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..devices import LIMITS, device, occupancy
from ..templates.tiles import HALF_DTYPES, ONE_PASS_HEAD_DIM, Template, Tile, TwoPassTile, tile, tiles_of, two_pass_tile
from .cubin import inspect
from .replay import replay

if TYPE_CHECKING:
    from .generate import CompiledKernel

DEVICES = {"sm_80": "a100", "sm_90": "h100", "sm_100": "b200"}
HEAD_DIMS = (16, 32, 64, 96, 128, 192, 256)
HEADS, LENGTH = 16, 8192
SHAPES: dict[str, dict[str, Any]] = {
    "full": {"mask": "full"},
    "causal": {"mask": "causal"},
    "causal-ragged-gqa": {"mask": "causal", "kv_heads": HEADS // 4, "q_len": LENGTH - 33, "kv_len": LENGTH - 33},
    "causal-dynamic-gqa": {"mask": "causal", "kv_heads": HEADS // 4, "dynamic": True},
}
MATMULS = {80: "hmma", 90: "hgmma", 100: "utcmma"}
# (Triton, head dim) -> the most instructions of the main loop of one pass, by shape, on sm_90: as many as it compiles to. More are
# not wrong, but slower: a reason to look at what changed.
MOST_INSTRUCTIONS: dict[tuple[str, int], dict[str, int]] = {
    ("3.6", 64): {"full": 416, "causal": 474, "causal-ragged-gqa": 509},
    ("3.6", 128): {"full": 481, "causal": 563, "causal-ragged-gqa": 595},
    ("3.7", 64): {"full": 397, "causal": 458, "causal-ragged-gqa": 493},
    ("3.7", 128): {"full": 473, "causal": 550, "causal-ragged-gqa": 582},
    ("3.9", 64): {"full": 460, "causal": 518, "causal-ragged-gqa": 553},
    ("3.9", 128): {"full": 569, "causal": 631, "causal-ragged-gqa": 686},
}


@dataclass(frozen=True)
class Cell:
    """One kind of attention on one GPU, in one template."""

    arch: str  # sm_90
    template: str
    dtype: str
    head_dim: int
    shape: str  # of SHAPES

    @property
    def tile(self) -> Tile | TwoPassTile:
        """The tile of its template."""
        find = tile if self.template == Template.ONE_PASS else two_pass_tile
        return find(device(DEVICES[self.arch]).arch, self.dtype, self.head_dim)

    @property
    def most_instructions(self) -> int | None:
        """Of the installed Triton, where there is such a figure."""
        import triton

        if (self.arch, self.template) != ("sm_90", Template.ONE_PASS):
            return None
        return MOST_INSTRUCTIONS.get((triton.__version__.rpartition(".")[0], self.head_dim), {}).get(self.shape)


def cells(
    archs: Sequence[str] = tuple(DEVICES),
    templates: Sequence[str] = (Template.ONE_PASS, Template.TWO_PASS),
    dtypes: Sequence[str] = HALF_DTYPES,
    head_dims: Sequence[int] = HEAD_DIMS,
    shapes: Sequence[str] = tuple(SHAPES),
) -> list[Cell]:
    """Every cell of the tile tables, or those asked for."""
    return [
        Cell(arch, template, dtype, head_dim, shape)
        for arch in archs
        for template in templates
        for head_dim in head_dims
        if template == Template.TWO_PASS or head_dim <= ONE_PASS_HEAD_DIM
        for dtype in dtypes
        for shape in shapes
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


def violated(values: Mapping[str, Any], arch: int, used: Tile | TwoPassTile, most_instructions: int | None = None) -> list[str]:
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
        (values["local_in_loop"] == 0, f"the main loop spills: {values['local_in_loop']} LDL and STL"),
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
    ]
    return [sentence for passed, sentence in gates if not passed]


def judged(cell: Cell) -> dict[str, Any]:
    """The main kernel of a cell: figures and violated gates."""
    from ..rewrite.install import enabled
    from .generate import attention_backward, compile_kernel

    key = DEVICES[cell.arch]
    sizes = {"q_len": LENGTH, "kv_len": LENGTH, "kv_heads": HEADS} | SHAPES[cell.shape]
    with enabled(template=cell.template):
        code = attention_backward(key, batch=2, heads=HEADS, head_dim=cell.head_dim, dtype=cell.dtype, **sizes)
    (kernel,) = code.templates
    arch = device(key).arch
    values = asdict(cell) | {"tile": str(cell.tile), "most_instructions": cell.most_instructions}
    try:
        compiled = compile_kernel(code.kernels[kernel], key)
        values |= figures(compiled, arch, cell.tile) | predicted(compiled, cell.tile)
    except Exception as error:  # what Triton and ptxas raise has no common class
        return values | {"gates": [f"it does not compile: {str(error).splitlines()[0]}"]}
    return values | {"gates": violated(values, arch, cell.tile, cell.most_instructions)}
