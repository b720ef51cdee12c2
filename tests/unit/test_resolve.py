"""One pass or two: what settings, the GPU and the head dim decide, and what they leave to sizes."""

from dataclasses import replace
from itertools import product

import pytest

from dash_inductor.config import Config
from dash_inductor.devices.cost_files import arch_of, known_devices, load_costs, two_pass_percent
from dash_inductor.devices.target import Target
from dash_inductor.dropout import FLASH, Dropout
from dash_inductor.problem import Problem
from dash_inductor.resolve import kernel_for, resolve
from dash_inductor.resolve import template_for as template_of_problem
from dash_inductor.schedule.families import MONOTONE
from dash_inductor.schedule.formulas import time_of
from dash_inductor.schedule.packing import is_too_large, shares_row
from dash_inductor.templates.tiles import GLUON_HEAD_DIMS, gluon_tile, tile, two_pass_tile

BY_SIZE = "by_size"


def template_for(settings: Config, device: str, head_dim: int, mask: str, reserved_sms: int = 0) -> str:
    """The template of an attention of that head dim and mask on a device."""
    problem = Problem(mask, 1, 1, 1, 64, 64, head_dim, "bf16")
    return template_of(problem, settings, Target(device, arch_of(device), 132, reserved_sms))


def template_of(problem: Problem, settings: Config, target: Target) -> str:
    """The template of any attention."""
    return template_of_problem(problem, settings, target, kernel_for(problem, settings, target))


@pytest.mark.parametrize(
    ("settings", "device", "head_dim", "mask", "template"),
    [
        ({}, "h100", 64, "full", BY_SIZE),
        ({}, "a100", 128, "causal", BY_SIZE),
        ({}, "h100", 129, "full", "two_pass"),
        ({}, "emulated", 256, "full", "two_pass"),
        # sizes must not decide, nor the number of SMs
        ({"guarantee": "device"}, "h100", 64, "full", "one_pass"),
        ({"guarantee": "batch"}, "h100", 128, "causal", "one_pass"),
        ({"guarantee": "device"}, "a100", 128, "full", "two_pass"),
        ({"template": "one_pass"}, "a100", 64, "full", "one_pass"),
        ({"template": "two_pass"}, "h100", 64, "full", "two_pass"),
        # asked for by other settings
        ({"schedule": "ascending"}, "a100", 64, "full", "one_pass"),
        ({"launch": "chained"}, "a100", 64, "full", BY_SIZE),
        ({"launch": "chained", "guarantee": "batch"}, "h100", 64, "full", "one_pass"),
        ({"launch": "chained"}, "a100", 256, "full", "two_pass"),  # it waits for nobody either
        # by the Gluon kernel
        ({}, "h100", 256, "full", BY_SIZE),
        ({"guarantee": "batch"}, "h100", 136, "causal", "one_pass"),
        ({"schedule": "shift"}, "h100", 256, "full", "one_pass"),
        ({"guarantee": "batch"}, "a100", 64, "full", "two_pass"),
        ({"guarantee": "device"}, "b200", 64, "causal", "one_pass"),
        ({"guarantee": "device"}, "b200", 128, "causal", "two_pass"),
        ({"kernel": "gluon"}, "h100", 64, "full", "one_pass"),
        ({"kernel": "gluon"}, "h100", 256, "full", "one_pass"),
        ({"kernel": "gluon", "schedule": "shift"}, "h100", 256, "full", "one_pass"),
    ],
)
def test_the_choice(settings, device, head_dim, mask, template):
    assert template_for(Config(**settings), device, head_dim, mask) == template


@pytest.mark.parametrize("device", ["a100", "h100", "b200"])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_memory_is_linear_in_long_sequences(device, mask):
    """Of its own accord the cost model takes no schedule whose table is quadratic and too large for a constant."""
    arch, sms = {"a100": (80, 108), "h100": (90, 132), "b200": (100, 148)}[device]
    for head_dim, length, heads in product((64, 128), (131072, 200_000, 262144, 1048576), (1, 2, 4, 8, 16, 32)):
        problem = Problem(mask, 1, heads, heads, length, length, head_dim, "bf16")
        resolution = resolve(problem, Config(), Target(device, arch, sms))
        plan, _ = resolution.schedule
        assert resolution.one_pass is None or not is_too_large(plan) or shares_row(plan), (head_dim, length, heads)


MORE = "is more than the 128 of one pass, which"


@pytest.mark.parametrize(
    ("settings", "head_dim", "mask", "message"),
    [
        ({"template": "one_pass"}, 129, "full", f"head dim 129 {MORE} template='one_pass' asks for"),
        ({"schedule": "shift", "kernel": "triton"}, 256, "full", f"head dim 256 {MORE} schedule='shift' asks for"),
        (
            {"schedule": "ascending", "launch": "chained", "template": "one_pass"},
            190,
            "full",
            f"head dim 190 {MORE} template='one_pass' and schedule='ascending' asks for",
        ),
    ],
)
def test_settings_that_leave_an_attention_out(settings, head_dim, mask, message):
    with pytest.raises(ValueError, match=message):
        template_for(Config(**settings), "h100", head_dim, mask)


@pytest.mark.parametrize("settings", [{}, {"template": "one_pass"}, {"template": "two_pass"}, {"schedule": "shift"}])
@pytest.mark.parametrize(("dims", "text"), [((0, None), "0"), ((257, None), "257"), ((64, 257), "64/257"), ((257, 64), "257/64")])
def test_a_head_dim_that_nothing_takes(settings, dims, text):
    problem = Problem("full", 1, 1, 1, 64, 64, dims[0], "bf16", value_dim=dims[1])
    with pytest.raises(ValueError, match=f"head dim {text} is outside 1..256"):
        resolve(problem, Config(**settings), Target("h100", 90, 132))


@pytest.mark.parametrize(("dims", "template"), [((192, 128), "two_pass"), ((64, 129), "two_pass"), ((128, 64), BY_SIZE)])
def test_the_larger_head_dim_decides(dims, template):
    problem = Problem("full", 1, 1, 1, 64, 64, dims[0], "bf16", value_dim=dims[1])
    assert template_of(problem, Config(), Target("h100", 90, 132)) == template
    asked = Config(template="one_pass")
    if template == "two_pass":
        with pytest.raises(ValueError, match=f"head dim {dims[0]}/{dims[1]} {MORE} template='one_pass' asks for"):
            resolve(problem, asked, Target("h100", 90, 132))
    else:
        assert resolve(problem, asked, Target("h100", 90, 132)).tile == gluon_tile(90, "bf16", *dims)


@pytest.mark.parametrize("device", known_devices())
@pytest.mark.parametrize("head_dim", [64, 128])
def test_by_price(device, head_dim):
    """Where sizes must not decide: of a tile, in the device's cost file; the Gluon kernel has no second one."""
    percent, estimate = two_pass_percent(device, head_dim)
    cheaper = percent * (105 if estimate else 102) < 100 * 100
    assert template_for(Config(guarantee="batch", kernel="triton"), device, head_dim, "full") == (
        "two_pass" if cheaper else "one_pass"
    )


@pytest.mark.parametrize(
    ("percent", "estimate", "template"),
    [(95, True, "two_pass"), (96, True, "one_pass"), (98, False, "two_pass"), (99, False, "one_pass")],
)
def test_two_passes_must_be_cheaper_by_the_margin(monkeypatch, percent, estimate, template):
    monkeypatch.setattr("dash_inductor.resolve.two_pass_percent", lambda device, head_dim: (percent, estimate))
    assert template_for(Config(guarantee="device"), "a100", 64, "full") == template


@pytest.mark.parametrize("device", ["h100", "h200"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("guarantee", ["run", "batch"])
def test_the_price_is_that_of_the_kernel(device, head_dim, mask, guarantee):
    """What a graph of any size chooses by, and the time that is predicted for one."""
    problem, target = Problem(mask, 2, 16, 16, 8192, 8192, head_dim, "bf16"), Target(device, 90, 132)
    times = {}
    for kernel, priced in (("auto", "gluon"), ("triton", "triton"), ("gluon", "gluon")):
        template = "auto" if kernel == "auto" else "one_pass"
        found = resolve(problem, Config(kernel=kernel, guarantee=guarantee, template=template), target)
        blocks = {"block_m": found.one_pass.block_m, "block_n": found.one_pass.block_n}
        costs = load_costs(device, **blocks, head_dim=head_dim, kernel=priced, mask=mask)
        assert replace(found.costs, two_pass=None) == costs
        plan, times[kernel] = found.schedule
        of_sweep = costs.step_ns, costs.swept_step_ns(plan.roles)  # L2 holds the heads in flight or does not
        steps = of_sweep if plan.family in MONOTONE else (costs.shifted_step_ns,)
        others = {"hop_ns": costs.hop_ns, "chain_ns": costs.chain_ns}
        beside_ns = costs.launches.beside_ns(2 * 16 * 8192 * head_dim, two_pass=False)
        assert times[kernel] - beside_ns in [time_of(plan, step_ns=step_ns, **others).ns for step_ns in steps]
    assert times["auto"] == times["gluon"] < times["triton"]


def test_reserved_sms_are_kept_by_one_pass_alone():
    assert template_for(Config(), "h100", 64, "full", reserved_sms=4) == "one_pass"
    # Whatever is reserved, the bits stay.
    for reserved in (0, 4):
        assert template_for(Config(guarantee="device"), "a100", 64, "full", reserved) == "two_pass"


@pytest.mark.parametrize("arch", [80, 89, 90, 100, 120, "emulated"])
@pytest.mark.parametrize("head_dim", [1, 16, 32, 64, 96, 128])
@pytest.mark.parametrize("value_dim", [None, 8, 64, 128])
def test_both_pad_alike(arch, head_dim, value_dim):
    """delta is computed once for either, by one kernel, and either fills the scratch of dq."""
    one, two = tile(arch, "bf16", head_dim, value_dim), two_pass_tile(arch, "bf16", head_dim, value_dim)
    for name in ("block_d", "block_dv", "preprocess_warps"):
        assert getattr(one, name) == getattr(two, name)
    assert one.block_m % two.block_m == two.q_rows % one.block_m == 0


@pytest.mark.parametrize("arch", [80, 89, 90, 100, 120, "emulated"])
@pytest.mark.parametrize(("head_dim", "block_d"), [(16, 16), (64, 64), (96, 128), (128, 128), (192, 256), (256, 256)])
def test_there_is_a_tile_for_every_head_dim(arch, head_dim, block_d):
    found = two_pass_tile(arch, "bf16", head_dim)
    assert found.block_d == found.block_dv == (max(32, block_d) if arch in (80, 89, 120) else block_d)
    # The preprocess pads to whole blocks of block_m rows, which dQ's longer tiles may overrun.
    assert found.q_rows % found.block_m == 0 and found.kv_rows % found.block_n == 0


@pytest.mark.parametrize(("arch", "like"), [(86, 80), (87, 80), (89, 80), (103, 100), (120, 80)])
@pytest.mark.parametrize("find", [tile, two_pass_tile])
def test_architectures_that_take_the_tiles_of_another(find, arch, like):
    """With two stages of three where shared memory is small: stages decide no bits."""
    for dims in ((16, None), (64, None), (128, 64), (128, None)):
        fewer = {"num_stages": 2} if arch in (86, 89, 120) and dims == (128, None) else {}
        if (find, arch) == (two_pass_tile, 120):
            fewer["block_n"] = 16 if dims[0] == 128 else 32  # with twice as many some loops spill
        assert find(arch, "bf16", *dims) == replace(find(like, "bf16", *dims), **fewer)
        assert find(like, "bf16", *dims).num_stages == 3


@pytest.mark.parametrize(
    ("arch", "text"), [(80, "32x64x256 and 64x32x256"), *((a, "32x32x256 and 32x32x256") for a in (86, 89, 120))]
)
def test_a_smaller_tile_where_shared_memory_is_small(arch, text):
    """Past a head dim of 128, with three stages where value has fewer columns than query."""
    found, of_mla = two_pass_tile(arch, "bf16", 256), two_pass_tile(arch, "bf16", 192, 128)
    assert str(found) == text and str(of_mla) == text.replace("256", "256/128")
    assert (found.num_stages, of_mla.num_stages) == (3 if arch == 80 else 2, 3)


TILES = "sm_80, sm_86, sm_87, sm_89, sm_90, sm_100, sm_103, sm_120"


def test_sixteen_columns_are_padded_on_an_a100():
    assert [tile(arch, "bf16", 16).block_d for arch in (80, 86, 120, 90, 100)] == [32, 32, 32, 16, 16]


@pytest.mark.parametrize(
    ("find", "arch", "dims", "text"),
    [
        (two_pass_tile, 90, (192, 128), "32x128x256/128 and 128x32x256/128"),
        (tile, 90, (128, 64), "64x128x128/64"),
        (tile, 90, (64, 128), "64x128x64/128"),
        (tile, 90, (96, 8), "64x128x128/16"),
        (tile, 80, (64, 128), "64x64x128"),  # with fewer columns of query than of value it spills
        (tile, 80, (128, 64), "64x64x128/64"),
    ],
)
def test_value_has_columns_of_its_own(find, arch, dims, text):
    assert str(find(arch, "bf16", *dims)) == text


@pytest.mark.parametrize(("dims", "matmuls"), [((192, None), 8), ((200, 256), 8), ((192, 128), 7), ((128, 256), 7)])
def test_dk_and_dv_share_ctas_where_registers_hold_both(dims, matmuls):
    assert two_pass_tile(90, "bf16", *dims).split == (matmuls == 8)


def places_of_dq(tile):
    """By (row, column) the place at which the element is kept."""
    places = {}
    for row, column in product(range(tile.block_m), range(tile.block_d)):
        position = (column, row) if tile.dq_transposed else (row, column)
        places[row, column] = 0
        for axis, one, count in tile.dq_digits:
            places[row, column] = places[row, column] * count + position[axis] // one % count
    return places


GLUON_TILES = [gluon_tile(90, "bf16", columns) for columns in GLUON_HEAD_DIMS]


def test_each_element_of_dq_has_a_place_of_its_own():
    """In a tile, transposed or not, whatever the columns of value."""
    tiles = [tile(arch, "bf16", *dims) for arch in (80, 89, 90, 100, 120) for dims in ((64, 128), (16, 128), (128, 16), (128, 128))]
    for found in tiles + GLUON_TILES:
        assert sorted(places_of_dq(found).values()) == list(range(found.block_m * found.block_d))


def test_the_epilogue_of_dq_reads_whole_sectors_of_the_gluon_kernel():
    """Of 32 bytes, fp32: a block of it has 1,024 elements in a row."""
    for found in GLUON_TILES:
        blocks = {}
        for (row, column), place in places_of_dq(found).items():
            blocks.setdefault((row * found.block_d + column) // 1024, set()).add(place // 8)
        assert all(len(sectors) == 1024 // 8 for sectors in blocks.values())


@pytest.mark.parametrize(("head_dim", "rows", "semaphores"), [(64, 128, 1), (128, 64, 1), (256, 64, 2)])
def test_memory_of_a_q_tile_in_the_gluon_kernel(head_dim, rows, semaphores):
    """Of dq, of delta and logsumexp, and its semaphores: at head dim 256 one for each half of dq."""
    problem = Problem("full", 1, 1, 1, 1024, 1024, head_dim, "bf16")
    found = resolve(problem, Config(kernel="gluon"), Target("h100", 90, 132, 0))
    assert found.workspace_bytes(3, 0) - found.workspace_bytes(0, 0) == 3 * 4 * (rows * (head_dim + 2) + semaphores)


def test_a_step_costs_what_its_matmuls_do():
    """Of five three have query's columns; of seven four."""
    assert [tile(90, "bf16", *dims).mean_dim for dims in ((64, None), (128, 64), (64, 128))] == [64, 102, 89]
    assert [two_pass_tile(90, "bf16", *dims).mean_dim for dims in ((256, None), (192, 128))] == [256, 201]


@pytest.mark.parametrize(
    ("find", "arguments", "message"),
    [
        (tile, (90, "bf16", 129), "head dim 129 is outside 1..128"),
        (two_pass_tile, (90, "bf16", 257), "head dim 257 is outside 1..256"),
        (tile, (90, "bf16", 64, 129), "head dim 64/129 is outside 1..128"),
        (two_pass_tile, (90, "fp32", 64), "dtype fp32 is not one of bf16, fp16"),
        (two_pass_tile, ("emulated", "fp64", 64), "dtype fp64 is not one of bf16, fp16, fp32"),
        (two_pass_tile, (75, "bf16", 64), rf"no tile for sm_75 \(there are tiles for {TILES}\)"),
        (tile, (121, "bf16", 64), "no tile for sm_121 "),
        (gluon_tile, ("emulated", "bf16", 64), "made for sm_90, not emulated"),
        (gluon_tile, (80, "bf16", 64), "the Gluon kernel is made for sm_90, not sm_80"),
        (gluon_tile, (90, "fp32", 64), "dtype fp32 is not one of bf16, fp16"),
        (gluon_tile, (90, "bf16", 128, 60), "the Gluon kernel takes head dims of a multiple of 8, from 16 to 256, not 128/60"),
    ],
)
def test_no_tile(find, arguments, message):
    with pytest.raises(ValueError, match=message):
        find(*arguments)


@pytest.mark.parametrize(
    ("others", "rows"),
    [
        ({"mask": "full"}, 128),
        ({"mask": "block_mask", "block_size": (128, 128), "function_ops": 9}, 128),
        ({"mask": "block_mask", "block_size": (64, 128), "function_ops": 9}, 64),
        ({"mask": "block_mask", "block_size": (128, 128), "function_ops": 9, "changes_scores": True}, 128),
        (
            {
                "mask": "block_mask",
                "block_size": (128, 128),
                "function_ops": 9,
                "changes_scores": True,
                "gluon_fails": "is not there",
            },
            64,
        ),
        ({"mask": "full", "function_ops": 9, "dropout": Dropout(0.1, FLASH)}, 128),
        ({"mask": "full", "function_ops": 9, "dropout": Dropout(0.1, FLASH), "gluon_fails": "is not there"}, 64),
        ({"mask": "full", "value_dim": 32}, 128),
        ({"mask": "full", "value_dim": 30}, 64),
        ({"mask": "full", "head_dim": 128}, 64),
    ],
)
def test_which_attentions_take_128_rows(others, rows):
    sizes = {"batch": 2, "heads": 16, "kv_heads": 16, "q_len": 8192, "kv_len": 8192, "head_dim": 64, "dtype": "bf16"}
    problem = Problem(**sizes | others)
    assert resolve(problem, Config(guarantee="device"), Target("h100", 90, 132)).tile.block_m == rows
