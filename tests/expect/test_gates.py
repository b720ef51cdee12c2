"""Compiled kernels of the tile tables, held against every gate; the command that does so for all of them."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from typing import Any

import pytest
import triton

from benchmarks import loops
from benchmarks.machine_code import gates, serial
from benchmarks.machine_code.__main__ import main
from benchmarks.machine_code.cubin import inspect
from benchmarks.machine_code.gates import FLEX_SHAPES, SHAPES, Cell, cells, judged
from benchmarks.machine_code.generate import compile_kernel
from dash_inductor import enabled
from dash_inductor.devices.cost_files import numbers_of
from dash_inductor.templates import tiles
from dash_inductor.templates.tiles import HALF_DTYPES

ONE_PASS, TWO_PASS = "one_pass", "two_pass"


def name(cell: Cell) -> str:
    return f"{cell.arch}-{cell.template}-{cell.head_dim}-{cell.shape}"


@functools.cache
def as_it_is(cell: Cell) -> dict[str, Any]:
    """A cell with nothing patched."""
    return judged(cell, replayed=False)


def assert_is_on_the_page(cell: Cell, row: dict[str, Any]) -> None:
    """In the tables of docs/kernel-figures.md, which `make figures` measures anew, of the Tritons that they have."""
    for kept in loops.results():
        if (kept["triton"], *loops.kernel(kept)) == (triton.__version__, cell.template, str(cell.head_dim), cell.shape):
            of_code = ("tile", "instructions_in_loop", "local_in_loop", "registers", "shared_bytes")
            assert {name: kept[name] for name in of_code} == {name: str(row[name]) for name in of_code}


def nothing_prefetched(row: dict[str, Any]) -> str:
    assert row["copies_ahead"] < 0
    return f"nothing is prefetched: the first wait is for {-row['copies_ahead']} groups of copies of the step before"


ASKED = {"template": [ONE_PASS], "dtype": ["bf16"], "head_dim": [64, 128]}
CELLS = cells(arch=["sm_90"], **ASKED) + cells(arch=["sm_80", "sm_100"], shape=["causal"], **ASKED)


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, id=name(cell), marks=[] if cell.head_dim == 128 or cell.shape == "causal" else pytest.mark.nightly)
        for cell in CELLS
    ],
)
def test_one_pass(cell):
    """By the installed Triton; `make gates` has others."""
    row = as_it_is(cell)
    assert row["gates"] == []
    without = ("causal-dynamic-gqa", "flex-window-soft-cap", "flex-documents-alibi")
    assert (row["most_instructions"] is None) == (cell.arch == "sm_80" or cell.shape in without)
    assert (row["stock_instructions"] is None) == (cell.arch != "sm_90" or cell.shape not in FLEX_SHAPES)
    assert row["tmem_columns"] == (512 if cell.arch == "sm_100" else 0)
    assert row["shuffle_barriers"] == (0 if cell.arch == "sm_100" else None)
    if cell.arch == "sm_90" and cell.shape in SHAPES:  # FlexAttention's code is torch's too
        assert_is_on_the_page(cell, row)


# By the shape of a cell, that without its function or dropout.
WITHOUT = dict.fromkeys(gates.GLUON_FUNCTIONS, "flex-documents") | {
    shape: shape.removesuffix("-dropout") for shape in gates.GLUON_DROPOUT
}


def test_the_gluon_kernel():
    """Hopper's head dims have it, in shapes whose lengths are known; the warps that multiply load, add and fence nothing."""
    every = cells(template=[gates.GLUON])
    assert {(cell.arch, cell.head_dim) for cell in every} == {("sm_90", head_dim) for head_dim in (64, 80, 96, 128, 192, 256)}
    of_blocks = len((*gates.GLUON_FLEX_SHAPES, *gates.GLUON_FUNCTIONS))
    of_columns = 3 * (len((*gates.GLUON_SHAPES, *gates.GLUON_DROPOUT, *gates.PARTS_SHAPES)) + of_blocks)
    assert len(every) == len(HALF_DTYPES) * (of_columns + len(gates.GLUON_PADDED) * of_blocks)
    (cell,) = (cell for cell in every if (cell.head_dim, cell.dtype, cell.shape) == (128, "bf16", "causal"))
    row = as_it_is(cell)
    assert row["gates"] == []
    assert (row["ldgsts"], row["utmaldg"], row["red"], row["idle_fences"], row["num_warps"]) == (0, 0, 0, None, 12)
    assert_is_on_the_page(cell, row)
    rules = dataclasses.replace(cell.rules, is_gluon=False)
    loads, additions = rules.violated(row)
    assert loads == "the loads are not asynchronous: neither LDGSTS nor UTMALDG in the main loop"
    assert additions == "0 REDG.F32 in the main loop, where the tile has some"


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, id=name(cell), marks={64: (), 96: pytest.mark.quick}.get(cell.head_dim, pytest.mark.nightly))
        for cell in cells(template=[gates.GLUON], dtype=["bf16"], shape=WITHOUT)
    ],
)
def test_functions_and_dropout_in_the_gluon_kernel(cell):
    """Around them the loop is that without them: as many matmuls, waits and barriers. A head dim that is padded has the loop of its
    columns. In 64 columns a step has two parts with dropout, and under a mask in blocks, but not without either."""
    row, without = as_it_is(cell), as_it_is(dataclasses.replace(cell, shape=WITHOUT[cell.shape]))
    in_parts = cell.shape in gates.GLUON_DROPOUT and tiles.gluon_columns(cell.head_dim, cell.head_dim) == 64
    alike = as_it_is(dataclasses.replace(cell, shape="flex-documents")) if in_parts else without
    assert row["gates"] == without["gates"] == []
    same = ("hgmma", "drains", "barriers", "warpgroup_depbars", "wgmma_serialised", "warp_syncs", "ctas_per_sm")
    assert {name: row[name] for name in same} == {name: alike[name] for name in same}
    assert row["shared_bytes"] == without["shared_bytes"]
    of_columns = dataclasses.replace(cell, head_dim=tiles.gluon_columns(cell.head_dim, cell.head_dim))
    both = [as_it_is(of_columns)[name] for name in ("instructions_in_loop", "local_in_loop")]
    assert both == [row["instructions_in_loop"], row["local_in_loop"]] and both[0] > without["instructions_in_loop"]
    assert_is_on_the_page(of_columns, as_it_is(of_columns))


@pytest.mark.parametrize("head_dim", [pytest.param(64, marks=pytest.mark.nightly), 128])
def test_slopes_that_are_learnt(head_dim, monkeypatch):
    """No cell of the gates. Chains are in parts, and the kernel stores what elements add to the gradient, between barriers; at head
    dim 128 it spills, by Triton so much."""
    spilled = {"3.6": 99, "3.7": 65, "3.8": 25, "3.9": 23}
    most_local = spilled.get(triton.__version__[:3], max(spilled.values())) if head_dim == 128 else 0
    monkeypatch.setitem(gates.ALL_FLEX_SHAPES, "learnt", {"score_mod": "alibi", "mask_mod": "causal", "trained": True})
    monkeypatch.setattr(gates, "LENGTH", 4096)
    cell = Cell("sm_90", ONE_PASS, "bf16", head_dim, "learnt")
    row = judged(cell, replayed=False)
    assert dataclasses.replace(cell.rules, most_local=most_local, most_barriers=12).violated(row) == []


@pytest.mark.skipif(not triton.__version__.startswith("3.7."), reason="the cost file is of Triton 3.7's code")
@pytest.mark.nightly  # of the replay
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_cost_file_of_a_b200(head_dim):
    """A kernel that changes needs other constants: `serial` gives them."""
    steps = {}
    for template in (ONE_PASS, TWO_PASS):
        compiled = [Cell("sm_100", template, "bf16", head_dim, shape) for shape in ("full", "causal")]
        rows = [(cell.rules.tile, as_it_is(cell)) for cell in compiled]
        steps[template] = [serial.serial_step(tile, row["instructions_in_loop"], row["num_warps"]) for tile, row in rows]
    numbers = numbers_of("b200")
    tflops, percent = numbers["tflops"][str(head_dim)], numbers["two_pass_percent"][str(head_dim)]
    assert tflops["value"] == pytest.approx(serial.tflops(steps[ONE_PASS], numbers["sms"]["value"]), rel=0.03)
    assert percent["value"] == pytest.approx(serial.two_pass_percent(steps[TWO_PASS], steps[ONE_PASS]), rel=0.03)
    assert tflops["estimate"] and percent["estimate"]


def test_another_order_of_dq_than_of_tensor_memory(monkeypatch):
    """That of wgmma takes dQ through shared memory in every step."""
    entry = dataclasses.replace(tiles._TILES[100, 128], accumulator=tiles.Fragments(4, 32))
    monkeypatch.setitem(tiles._TILES, (100, 128), entry)
    row = judged(Cell("sm_100", ONE_PASS, "bf16", 128, "causal"), replayed=False)
    assert row["shuffle_barriers"] > 10
    assert f"dQ goes through shared memory: {row['shuffle_barriers']} barriers before it is added" in row["gates"]


@pytest.mark.parametrize(
    ("arch", "template", "dims", "stages"),
    [
        ("sm_89", ONE_PASS, (128, None), 2),
        ("sm_120", TWO_PASS, (256, None), 2),
        *(
            pytest.param(*cell, marks=pytest.mark.nightly)
            for cell in [
                ("sm_120", ONE_PASS, (64, None), 3),
                ("sm_120", ONE_PASS, (128, None), 2),
                ("sm_120", ONE_PASS, (128, 64), 3),
                ("sm_120", TWO_PASS, (128, None), 2),
                ("sm_120", TWO_PASS, (192, 128), 3),
                ("sm_89", TWO_PASS, (128, None), 2),
                ("sm_89", TWO_PASS, (192, 128), 3),
                ("sm_89", TWO_PASS, (256, None), 2),
            ]
        ),
    ],
)
def test_a_cta_of_99_kib(arch, template, dims, stages):
    """With two stages where three do not fit: there nothing is prefetched, and that is no broken rule."""
    row = as_it_is(Cell(arch, template, "bf16", dims[0], "causal-ragged-gqa", dims[1]))
    assert row["gates"] == [] and row["num_stages"] == stages
    assert (row["copies_ahead"] < 0) == (stages == 2)
    assert 0 < row["shared_bytes"] <= 99 << 10
    assert row["hmma"] > 0 and row["ldgsts"] > 0 == row["utmaldg"]


def test_matmuls_of_a_consumer_blackwell():
    """mma.sync and cp.async, as on an A100: Triton takes neither tcgen05 nor TMA there, and specialises no warps."""
    cell = Cell("sm_120", ONE_PASS, "bf16", 64, "causal")
    code = gates.generated(cell)
    ptx = compile_kernel(code.kernels[next(iter(code.templates))], gates.DEVICES[cell.arch]).ptx
    assert ".target sm_120a" in ptx
    assert "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in ptx and "cp.async.cg.shared.global" in ptx
    assert not re.search(r"\b(wgmma|tcgen05|mbarrier|cp\.async\.bulk|setmaxnreg)\b", ptx)


GATES = ["gates", "--arch", "sm_90", "--template", ONE_PASS, "--dtype", "bf16", "--head-dim", "128", "--shape", "causal"]
SHORT = ["--q-len", "512", "--kv-len", "512", "--batch", "1", "--heads", "2", "--head-dim", "64", "--device"]


def refused(monkeypatch, capsys, *sizes):
    """The command's row of a tile of these sizes."""
    monkeypatch.setitem(tiles._TILES, (90, 128), tiles.Tile(*sizes, True, tiles.Fragments(8, 64), atomic_add=True))
    assert main([*GATES, "--json"]) == 1
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    return row


@pytest.mark.parametrize(
    ("sizes", "sentences"),
    [
        ((128, 128, 128, 8, 2), {"the main loop spills: {local_in_loop} LDL and STL"}),
        pytest.param(
            (64, 256, 128, 8, 4),
            {"{shared_bytes} bytes of shared memory of 232448", "an SM holds 0 CTAs, where the tile table has 1"},
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_tile_that_is_too_large(monkeypatch, capsys, sizes, sentences):
    """For a thread's registers, for an SM; the exit code says so."""
    row = refused(monkeypatch, capsys, *sizes)
    assert row["tile"] == "x".join(map(str, sizes[:3]))
    assert {sentence.format(**row) for sentence in sentences} < set(row["gates"])


@pytest.mark.parametrize("template", [ONE_PASS, TWO_PASS])
def test_a_loop_that_does_not_prefetch(monkeypatch, template):
    """With two stages, and the release behind the next step's first matmul, the gates see what no other figure shows."""
    for table in (tiles._TILES, tiles._TWO_PASS_TILES):
        monkeypatch.setitem(table, (90, 128), dataclasses.replace(table[90, 128], num_stages=2))
    monkeypatch.setattr(tiles, "RELEASE_AFTER", 1)
    row = judged(Cell("sm_90", template, "bf16", 128, "causal"), replayed=False)
    idle = ["the tensor cores idle under 1 fences and 0 additions"] if template == ONE_PASS else []
    assert row["gates"] == [nothing_prefetched(row), *idle]


def test_the_command(capsys):
    assert main(GATES) == 0
    out, progress = capsys.readouterr()
    assert progress == "[1/1] sm_90 one_pass bf16 d=128 causal\n"
    assert "64x128x128" in out
    assert out.splitlines()[-1].endswith(": 0 of 1 kernels break a rule")


@pytest.mark.parametrize("shape", ["full", "flex"])
def test_cells_of_a_template_are_of_triton(shape):
    """Where users get the Gluon kernel, too."""
    assert list(gates.generated(Cell("sm_90", ONE_PASS, "bf16", 64, shape)).templates.values()) == [ONE_PASS]


@pytest.mark.nightly  # of a command of benchmarks
def test_codegen_shows_every_kernel_with_matmuls(capsys, tmp_path):
    """For any length there are one pass and two, each held against its own rules; their cubins are written."""
    with enabled(kernel="triton"):
        assert main(["codegen", *SHORT, "h100", "--dynamic", "--json", "--cubin", str(tmp_path / "main.cubin")]) == 0
    report = json.loads(capsys.readouterr().out)
    kernels = [report, *report["others"]]
    cubins = ["main.cubin", *(f"main.{kernel['kernel']}.cubin" for kernel in report["others"])]
    for kernel, cubin in zip(kernels, cubins, strict=True):
        found = inspect((tmp_path / cubin).read_bytes(), kernel["shared_bytes"], kernel["main_loops"]).as_dict()
        assert found == {name: kernel[name] for name in found}
    assert len(list(tmp_path.iterdir())) == 2
    assert [kernel["source"].count("tl.dot(") for kernel in kernels] == [5, 7]
    assert [kernel["gates"] for kernel in kernels] == [[], []]
    assert [kernel["red"] > 0 for kernel in kernels] == [True, False]
    assert [(kernel["idle_fences"], kernel["idle_additions"]) for kernel in kernels] == [(0, 0), (None, None)]
    assert min(kernel["copies_ahead"] for kernel in kernels) >= 0
    assert len({kernel["kernel"] for kernel in kernels}) == len({line for kernel in kernels for line in kernel["launch"]}) == 2
