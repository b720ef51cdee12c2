"""What gates say about figures, how often an SM holds a CTA, and what loading a kernel that does not fit as expected does."""

from __future__ import annotations

import types
from dataclasses import replace
from typing import Any

import pytest
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from benchmarks.machine_code.gates import (
    DEVICES,
    FLEX_SHAPES,
    GLUON_DROPOUT,
    GLUON_FLEX_SHAPES,
    GLUON_FUNCTIONS,
    GLUON_PADDED,
    GLUON_SHAPES,
    HEAD_DIMS,
    MOST_INSTRUCTIONS,
    MOST_LOCAL,
    PARTS_SHAPES,
    SHAPES,
    Cell,
    cells,
)
from benchmarks.machine_code.rules import Rules
from dash_inductor.devices import LIMITS, occupancy, stand_in
from dash_inductor.lowering.load_check import Checked, check, expect
from dash_inductor.templates.tiles import GLUON_HEAD_DIMS, gluon_tile, tile, two_pass_tile

# Of the kernel for an H100 at d = 64, full, as Triton 3.7.1 compiles it.
GOOD = (
    {"registers": 227, "shared_bytes": 99328, "tmem_columns": 0, "ctas_per_sm": 1, "main_loops": 1, "instructions_in_loop": 397}
    | {"local_in_loop": 0, "hgmma": 24, "hmma": 0, "utcmma": 0, "ldgsts": 6, "utmaldg": 0, "red": 4, "atomg": 0}
    | {"warpgroup_depbars": 3, "wgmma_serialised": False, "copies_ahead": 0, "idle_fences": 0, "idle_additions": 0}
    | {"shuffle_barriers": None, "drains": 1, "barriers": 3, "warp_syncs": 1}
)
TILE = tile(90, "bf16", 64, small=True)


def broken(**changed: int | bool | None) -> list[str]:
    return Rules(90, TILE, most_instructions=397, most_barriers=3).violated(GOOD | changed)


def test_figures_that_pass():
    assert broken() == []
    assert broken(ldgsts=0, utmaldg=2, copies_ahead=None) == []  # by TMA
    assert broken(instructions_in_loop=396) == []
    assert broken(barriers=0, drains=3) == []  # a step of Triton's may wait for all matmuls as often as it likes


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"main_loops": 0}, "0 loops with matmuls, where the tile has 1 kinds of CTAs"),
        ({"hgmma": 0}, "no matmul in the main loop is HGMMA"),
        ({"hmma": 1}, "matmuls in the main loop are HMMA, not HGMMA"),
        ({"warpgroup_depbars": 21, "wgmma_serialised": True}, "every wgmma is waited for: 21 WARPGROUP.DEPBAR in the main loop"),
        ({"copies_ahead": -3}, "nothing is prefetched: the first wait is for 3 groups of copies of the step before"),
        ({"idle_fences": 1}, "the tensor cores idle under 1 fences and 0 additions"),
        ({"idle_additions": 8}, "the tensor cores idle under 0 fences and 8 additions"),
        ({"shuffle_barriers": 14}, "dQ goes through shared memory: 14 barriers before it is added"),
        ({"barriers": 4}, "4 barriers of all warps in the main loop, more than 3"),
        ({"warp_syncs": 2}, "ptxas takes warps for diverged: 2 WARPSYNC in the main loop, whose source has 1"),
        ({"ldgsts": 0}, "the loads are not asynchronous: neither LDGSTS nor UTMALDG in the main loop"),
        ({"local_in_loop": 2}, "the main loop spills: 2 LDL and STL"),
        ({"atomg": 1}, "1 ATOMG in the main loop: an addition returns its value"),
        ({"red": 0}, "0 REDG.F32 in the main loop, where the tile has some"),
        ({"registers": 256}, "256 registers of 255"),
        ({"shared_bytes": 232449}, "232449 bytes of shared memory of 232448"),
        ({"tmem_columns": 32}, "32 columns of tensor memory of 0"),
        ({"ctas_per_sm": 2}, "an SM holds 2 CTAs, where the tile table has 1"),
        ({"instructions_in_loop": 398}, "398 instructions in the main loop, more than 397"),
    ],
)
def test_each_gate(changed, sentence):
    assert broken(**changed) == [sentence]


def test_gates_of_other_architectures_and_of_two_passes():
    ampere = GOOD | {"hgmma": 0, "hmma": 80, "red": 0}
    rules = {arch: Rules(arch, tile(arch, "bf16", 64)) for arch in (80, 86, 89, 100, 120)}
    assert rules[80].violated(ampere) == rules[89].violated(ampere) == rules[120].violated(ampere) == []
    assert rules[120].violated(GOOD | {"red": 0}) == [
        "no matmul in the main loop is HMMA",
        "matmuls in the main loop are HGMMA, not HMMA",
    ]
    assert rules[80].violated(ampere | {"red": 4}) == ["4 REDG.F32 in the main loop, where the tile has none"]
    assert rules[86].violated(ampere | {"shared_bytes": 101377}) == ["101377 bytes of shared memory of 101376"]
    assert rules[120].violated(ampere | {"tmem_columns": 512}) == ["512 columns of tensor memory of 0"]
    blackwell = GOOD | {"hgmma": 0, "utcmma": 10, "tmem_columns": 512, "shuffle_barriers": 0}
    assert rules[100].violated(blackwell) == []
    assert rules[100].violated(blackwell | {"tmem_columns": 1024}) == ["1024 columns of tensor memory of 512"]
    of_two, two = Rules(90, two_pass_tile(90, "bf16", 64)), GOOD | {"red": 0, "main_loops": 2, "warp_syncs": 0}
    assert of_two.violated(two | {"ctas_per_sm": 2}) == []  # nobody waits for a CTA
    assert of_two.violated(two | {"red": 4}) == ["4 REDG.F32 in the main loop, where the tile has none"]
    assert of_two.violated(two | {"ctas_per_sm": 0}) == ["an SM holds 0 CTAs, where the tile table has at least 1"]
    assert of_two.violated(two | {"main_loops": 1}) == ["1 loops with matmuls, where the tile has 2 kinds of CTAs"]
    of_three = Rules(90, two_pass_tile(90, "bf16", 256))
    assert of_three.violated(two) == ["2 loops with matmuls, where the tile has 3 kinds of CTAs"]


def test_gates_of_gluon():
    """The main loop neither loads nor adds, has no fence for the whole GPU, idle or not, waits for all matmuls as often as said,
    and its warps do not diverge."""
    rules = Rules(90, gluon_tile(90, "bf16", 64), is_gluon=True)
    good = GOOD | {"ldgsts": 0, "red": 0, "copies_ahead": None, "idle_fences": None, "idle_additions": None, "warp_syncs": 0}
    assert rules.violated(good) == []
    assert rules.violated(good | {"red": 4}) == ["4 REDG.F32 in the main loop, where the tile has none"]
    fences = ["the warps that multiply fence for the whole GPU, which is for another one"]
    assert rules.violated(good | {"idle_fences": 0}) == fences
    for is_plain, found, allowed in ((False, 2, 1), (True, 1, 2), (True, 3, 2)):
        idle = [f"{found} waits of a step leave no matmul in flight, and not {allowed}"]
        assert replace(rules, is_plain=is_plain).violated(good | {"drains": found}) == idle
    of_128 = replace(rules, tile=gluon_tile(90, "bf16", 128), is_plain=True)
    assert of_128.violated(good | {"drains": 2}) == ["2 waits of a step leave no matmul in flight, and not 1"]
    diverged = ["ptxas takes warps for diverged: 1 WARPSYNC in the main loop, whose source has 0"]
    assert rules.violated(good | {"warp_syncs": 1}) == diverged


def test_prefetching_where_three_stages_fit():
    """An SM of 100 KiB holds them to 64 columns, and to more where value has fewer than query."""
    late = GOOD | {"hgmma": 0, "hmma": 80, "red": 0, "copies_ahead": -3}
    sentence = ["nothing is prefetched: the first wait is for 3 groups of copies of the step before"]
    for arch in (86, 89, 120):
        for dims, broken in (((64, None), True), ((64, 32), True), ((128, 64), True), ((128, None), False), ((96, None), False)):
            assert Rules(arch, tile(arch, "bf16", *dims)).violated(late) == sentence * broken
    for arch in (80, 87):
        assert Rules(arch, tile(arch, "bf16", 128)).violated(late) == sentence


def test_a_flex_attention_beside_stock():
    """397 instructions are 0.70 of 567.1; what a table allows of LDL and STL is no spill."""
    assert Rules(90, TILE, stock_instructions=568).violated(GOOD) == []
    sentence = "397 instructions of the main loop for 64 x 128 elements, more than 0.7 of stock's 567"
    assert Rules(90, TILE, stock_instructions=567).violated(GOOD) == [sentence]
    assert Rules(90, TILE, stock_instructions=567, share_of_stock=0.705).violated(GOOD) == []
    assert Rules(90, tile(90, "bf16", 64), stock_instructions=284).violated(GOOD) == []  # twice the rows
    spilling = Rules(90, TILE, most_local=6)
    assert spilling.violated(GOOD | {"local_in_loop": 6}) == []
    assert spilling.violated(GOOD | {"local_in_loop": 7}) == ["the main loop spills: 7 LDL and STL, more than 6"]


def test_every_cell_of_the_tables():
    """All of what there is a tile for, once; past a head dim of 128 in two passes, and Gluon, alone."""
    found = cells()
    of_blocks = len((*GLUON_FLEX_SHAPES, *GLUON_FUNCTIONS))
    of_columns = len((*GLUON_SHAPES, *GLUON_DROPOUT, *PARTS_SHAPES)) + of_blocks
    of_gluon = len(GLUON_HEAD_DIMS) * of_columns + len(GLUON_PADDED) * of_blocks
    in_triton = len(SHAPES) * (6 + 9) + len(FLEX_SHAPES) * (2 + 2) + len(PARTS_SHAPES) * 2
    assert len(set(found)) == len(found) == 2 * (len(DEVICES) * in_triton + of_gluon)
    assert {cell.head_dim for cell in found if cell.template != "gluon"} == set(HEAD_DIMS)
    assert {cell.head_dim for cell in found if cell.template == "gluon"} == {*GLUON_HEAD_DIMS, *GLUON_PADDED}
    assert {(cell.head_dim, cell.value_dim) for cell in found if cell.value_dim} == {(96, 64), (192, 128)}
    assert all(cell.rules.tile for cell in found)
    assert {cell.template for cell in found if cell.head_dim > 128} == {"two_pass", "gluon"}
    assert {cell.shape for cell in found if cell.template == "two_pass"} == {*SHAPES, *FLEX_SHAPES}
    assert {cell.shape for cell in found if cell.template == "one_pass"} == {*SHAPES, *FLEX_SHAPES, *PARTS_SHAPES}
    assert cells(arch=["sm_90"], template=["one_pass"], dtype=["fp16"], head_dim=[96], shape=["full"]) == [
        Cell("sm_90", "one_pass", "fp16", 96, "full"),
        Cell("sm_90", "one_pass", "fp16", 96, "full", 64),
    ]


def test_most_instructions_are_those_of_the_installed_triton(monkeypatch):
    cell = Cell("sm_90", "one_pass", "fp16", 128, "causal")
    for version, most in (("3.6.0", 572), ("3.7.1", 560), ("3.8.0", 569), ("3.9.0", 642), ("3.10.0", None)):
        monkeypatch.setattr("triton.__version__", version)
        assert cell.rules.most_instructions == most
    monkeypatch.setattr("triton.__version__", "3.7.1")
    for change in (
        {"arch": "sm_80"},
        {"template": "two_pass"},
        {"head_dim": 96},
        {"value_dim": 64},
        {"shape": "causal-dynamic-gqa"},
    ):
        assert cell.rules.most_instructions == 560 and replace(cell, **change).rules.most_instructions is None
    soft_cap = replace(cell, shape="flex-window-soft-cap")
    assert [each.rules.most_local for each in (soft_cap, cell, replace(soft_cap, head_dim=64))] == [9, 0, 0]
    assert soft_cap.rules.share_of_stock == 0.70
    monkeypatch.setattr("triton.__version__", "3.8.0")
    assert [replace(soft_cap, arch="sm_120", head_dim=head_dim).rules.most_local for head_dim in (64, 128)] == [1, 0]
    of_gluon = replace(soft_cap, template="gluon")
    assert [replace(of_gluon, head_dim=head_dim).rules.most_local for head_dim in (64, 80, 96, 128, 192)] == [4, 2, 2, 2, 0]
    assert [replace(of_gluon, head_dim=head_dim).rules.most_barriers for head_dim in (64, 80, 96, 128, 192)] == [3, 2, 2, 2, 3]
    listed = {shape for most in (MOST_INSTRUCTIONS, MOST_LOCAL) for by_shape in most.values() for shape in by_shape}
    assert listed <= {*SHAPES, *FLEX_SHAPES, *PARTS_SHAPES}


@pytest.mark.parametrize(
    ("arch", "registers", "shared_bytes", "threads", "tmem_columns", "ctas"),
    [
        (90, 255, 82432, 256, 0, 1),  # 8 warps of 8,192 registers
        (90, 128, 82432, 256, 0, 2),
        (90, 129, 82432, 256, 0, 1),
        (90, 168, 0, 384, 0, 1),
        (90, 176, 0, 96, 0, 2),  # 5,632 a warp: two on a scheduler, eight on the SM, though eleven would fit its registers
        (90, 32, 116000, 128, 0, 1),  # two would take 2 KiB beside their own
        (90, 32, 115712, 128, 0, 2),
        (90, 32, 232448, 128, 0, 1),
        (90, 32, 232449, 128, 0, 0),
        (90, 256, 0, 32, 0, 0),
        (90, 16, 0, 32, 0, 32),
        (86, 16, 0, 32, 0, 16),
        (89, 16, 0, 1024, 0, 1),  # of 1,536 threads
        (120, 16, 0, 32, 0, 24),
        (120, 64, 99 << 10, 256, 0, 1),
        (120, 64, (99 << 10) + 1, 256, 0, 0),
        (80, 16, 0, 1024, 0, 2),
        (100, 64, 0, 128, 256, 2),
        (100, 64, 0, 128, 512, 1),
        (100, 64, 0, 128, 1024, 0),
    ],
)
def test_occupancy(arch, registers, shared_bytes, threads, tmem_columns, ctas):
    assert ctas == occupancy(arch, registers=registers, shared_bytes=shared_bytes, threads=threads, tmem_columns=tmem_columns)


def test_the_costs_that_stand_in():
    costs = dict.fromkeys((80, 86, 87), "a100") | {89: "rtx4090", 90: "h100", 120: "rtx5090"} | dict.fromkeys((100, 103), "b200")
    assert {arch: stand_in(arch) for arch in LIMITS} == costs
    with pytest.raises(ValueError, match=r"no tile for sm_121 \(there are tiles for sm_80, sm_86, "):
        stand_in(121)


def launcher(registers: int, shared_bytes: int = 82432, num_warps: int = 8) -> Any:
    """What Inductor has of a kernel that it has loaded."""
    return types.SimpleNamespace(n_regs=registers, shared=shared_bytes, config=types.SimpleNamespace(num_warps=num_warps))


@pytest.mark.parametrize(("registers", "found"), [(128, 2), (129, 1), (255, 1)])
def test_the_check_at_load(monkeypatch, registers, found):
    """Inductor's own `precompile` makes launchers where there is a GPU; ours looks at them."""
    kernel: Any = CachingAutotuner.__new__(CachingAutotuner)
    kernel.fn = types.SimpleNamespace(__name__="triton_dash")
    kernel.device_props = types.SimpleNamespace(cc=90)
    kernel.launchers, kernel.triton_meta = [], {"launch_cooperative_grid": False}
    compiled = []

    def precompile(self, warm_cache_only=False, **kwargs):
        compiled.append(kwargs)
        self.launchers = [] if warm_cache_only else [launcher(registers)]

    monkeypatch.setattr(CachingAutotuner, "precompile", precompile)
    for expected in (1, 2):
        checked = expect(expected)(kernel)
        assert checked is kernel and isinstance(checked, Checked)
        checked.precompile(warm_cache_only=True)  # a worker, which has no GPU
        if found == expected:
            checked.precompile(reload_kernel=None)
        else:
            with pytest.raises(RuntimeError, match=f"holds {found} of its CTAs, and its schedule was made for {expected}"):
                checked.precompile(reload_kernel=None)
    assert compiled == [{}, {"reload_kernel": None}] * 2


@pytest.mark.parametrize(
    "metadata", [{"metadata": types.SimpleNamespace(launch_cooperative_grid=False)}, {}], ids=["Triton", "Inductor"]
)
def test_a_kernel_that_waits_is_launched_cooperatively(monkeypatch, metadata):
    """Whoever launches it: what Inductor launches without Triton has no such metadata."""
    kernel: Any = expect(2)(CachingAutotuner.__new__(CachingAutotuner))
    kernel.fn = types.SimpleNamespace(__name__="triton_dash")
    kernel.device_props = types.SimpleNamespace(cc=90)
    kernel.launchers, kernel.triton_meta = [launcher(128)], {"launch_cooperative_grid": True}
    monkeypatch.setattr(CachingAutotuner, "precompile", lambda self: None)
    as_asked = types.SimpleNamespace(metadata=types.SimpleNamespace(launch_cooperative_grid=True))
    kernel.compile_results = [types.SimpleNamespace(kernel=as_asked)]
    kernel.precompile()
    kernel.compile_results.append(types.SimpleNamespace(kernel=types.SimpleNamespace(**metadata)))
    with pytest.raises(RuntimeError, match="triton_dash waits for CTAs that are resident together"):
        kernel.precompile()


def test_the_error_names_the_kernel_and_both_numbers():
    with pytest.raises(RuntimeError) as raised:
        check("triton_dash", 86, 1, registers=90, shared_bytes=102400, num_warps=4)
    assert str(raised.value).startswith(
        "triton_dash was compiled to 90 registers and 102400 bytes of shared memory: an SM (sm_86) holds 0 of its CTAs, and its "
        "schedule was made for 1."
    )
