"""Kernels compiled for a Hopper GPU that is not there, replayed; and the cost files, which follow from that."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import triton
from kernels import compiled, generated

from benchmarks.machine_code import gates
from benchmarks.machine_code.__main__ import main
from benchmarks.machine_code.gates import Cell, judged
from benchmarks.machine_code.measured import compared, persistent
from benchmarks.machine_code.replay import Replay, replay
from benchmarks.machine_code.replay.constants import Constants
from benchmarks.prices import ALIBI, SOFT_CAP
from dash_inductor.devices.cost_files import numbers_of
from dash_inductor.resolve.prices import GLUON_CYCLES, GLUON_CYCLES_WITHOUT, GLUON_DROPOUT_CYCLES
from dash_inductor.templates.tiles import Template

pytestmark = pytest.mark.nightly
# The cost files are of one Triton's code; the replay itself is of any.
PRICED = pytest.mark.skipif(not triton.__version__.startswith("3.7."), reason="the cost files are of Triton 3.7's code")
SHAPES = ("full", "causal")
ROWS = {64: 128, 128: 64}  # of a step of one pass
RATIOS = {64: 1 / 2, 128: 1, 256: 2}  # by columns of the Gluon kernel's tile: 64 x 128 elements, in its steps
# Of a step in 64 columns, by Triton 3.7.1, while it had two parts without dropout too: the loop that an H200 timed was such a one.
IN_TWO_PARTS = {"full": 3842, "causal": 3910}
OFF = 0.03  # what the files may be off the replay: rounding, and what a patch release of Triton changes


def cubin(template: str, head_dim: int, shape: str, cached: bool = True) -> bytes:
    """The kernel as `gates` compiles it."""
    code = generated(settings={"template": template}, cached=cached, head_dim=head_dim, **gates.SHAPES[shape])
    (name,) = code.templates
    return compiled(code.kernels[name], "h100").cubin


def cycles_of_gluon(columns: int, shape: str) -> float:
    cell = Cell("sm_90", gates.GLUON, "bf16", columns, shape)
    return gates.replays(gates.compiled(cell), cell.rules)[0].cycles


@functools.cache
def replays(template: str, head_dim: int) -> list[Replay]:
    count = 1 if template == Template.ONE_PASS else 2
    return [step for shape in SHAPES for step in replay(cubin(template, head_dim, shape), count)]


@pytest.mark.parametrize("head_dim", [64, 128])
def test_one_pass(head_dim):
    """The figures are of its matmuls alone, what they cost beside, and a release that comes in time for a shift schedule."""
    for step in replays(Template.ONE_PASS, head_dim):
        assert step.flop == 10 * ROWS[head_dim] * 128 * head_dim
        assert step.tensor_cycles == pytest.approx(step.flop / 4096)
        assert step.tensor_cycles + sum(step.exposed.values()) == pytest.approx(step.cycles)
        assert step.handover_cycles < step.cycles == pytest.approx(step.chained_cycles)
        assert not step.notes


@pytest.mark.parametrize("head_dim", [64, 128])
def test_two_passes(head_dim):
    """dK/dV, then dQ; neither polls."""
    kv, q = replay(cubin(Template.TWO_PASS, head_dim, "causal"), 2)
    assert (kv.flop, q.flop) == (8 * 64 * 128 * head_dim, 6 * 64 * 128 * head_dim)
    assert kv.handover_cycles is q.handover_cycles is None


def test_gates_and_codegen_print_it(capsys):
    row = judged(Cell("sm_90", Template.TWO_PASS, "bf16", 64, "full"))
    assert [loop["estimate"] for loop in row["predicted_cycles"]] == [True, True]
    assert row["not_predicted"] is None
    assert gates.predicted_cycles(row) == " + ".join(
        f"{step.cycles:.0f}" for step in replay(cubin(Template.TWO_PASS, 64, "full"), 2)
    )
    sizes = ["--q-len", "512", "--kv-len", "512", "--batch", "1", "--heads", "2", "--head-dim", "64"]
    assert main(["codegen", "--device", "h100", *sizes]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("Cycles of a step of loop ") for line in lines) == 2  # so short, it takes two passes
    tensor = [int(line.split()[-1].replace(",", "")) for line in lines if line.startswith("  tensor cores ")]
    assert tensor == pytest.approx([1024, 768], abs=2)


def test_the_command(tmp_path, capsys):
    path = tmp_path / "kernel.cubin"
    path.write_bytes(cubin(Template.TWO_PASS, 64, "full"))
    assert main(["replay", str(path), "--loops", "2", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["cubins"]
    assert [loop["cycles"] for loop in found["loops"]] == [
        pytest.approx(step.cycles, abs=0.1) for step in replay(cubin(Template.TWO_PASS, 64, "full"), 2)
    ]


def cycles_of(device: str, name: str, key: str | None = None) -> list[int]:
    """The cycles that the source of an estimate names, from which a kernel that changes needs other constants."""
    return list(
        map(
            int,
            re.findall(
                r"\b\d{4,5}(?= and \d{4} cycles| cycles| in one| in those| at d = 128)", entry_of(device, name, key)["source"]
            ),
        )
    )


def entry_of(device: str, name: str, key: str | None = None) -> Any:
    entry = numbers_of(device)[name]
    return entry[key] if key else entry


def tflops_of(elements: int, head_dim: int, cycles: float) -> float:
    """Of a GPU whose SMs take so many cycles for elements of the scores, at the clock that fits what was measured."""
    clock, _ = compared()
    return 132 * 10 * elements * head_dim / cycles * clock / 1e3


def mean(steps: Iterable[Replay], cycles: Callable[[Replay], float] = lambda step: step.cycles) -> float:
    """In the mean of the two masks."""
    return sum(map(cycles, steps)) / len(SHAPES)


@PRICED
@pytest.mark.parametrize("device", ["h100", "h200"])
def test_two_passes_have_the_cycles_of_the_cost_files(device):
    """In three kinds of CTAs at 256, whose steps have 32 rows. One pass was measured: two are predicted beside that."""
    for head_dim, rows in ROWS.items():
        both, one = mean(replays(Template.TWO_PASS, head_dim)), mean(replays(Template.ONE_PASS, head_dim)) * 64 / rows
        assert cycles_of(device, "two_pass_percent", str(head_dim)) == pytest.approx([both, one], rel=OFF)
        measured = entry_of(device, "tflops", str(head_dim))["value"]
        percent = 100 * measured / tflops_of(64 * 128, head_dim, both)
        assert entry_of(device, "two_pass_percent", str(head_dim))["value"] == pytest.approx(percent, rel=OFF)
    cells = [Cell("sm_90", Template.TWO_PASS, "bf16", 256, shape) for shape in SHAPES]
    both = 2 * mean(step for cell in cells for step in gates.replays(gates.compiled(cell), cell.rules))
    assert cycles_of(device, "two_pass_percent", "256") == pytest.approx([both], rel=OFF)
    percent = 7 / 8 * 100 * entry_of(device, "tflops", "128")["value"] / tflops_of(64 * 128, 256, both)
    assert entry_of(device, "two_pass_percent", "256")["value"] == pytest.approx(percent, rel=OFF)


@PRICED
@pytest.mark.parametrize("device", ["h100", "h200"])
def test_a_hop_has_the_cycles_of_the_cost_files(device):
    hops = [mean(replays(Template.ONE_PASS, head_dim), lambda step: step.handover_cycles) for head_dim in (64, 128)]
    assert cycles_of(device, "hop_ns") == pytest.approx(hops, rel=OFF)
    clock, _ = compared()
    assert entry_of(device, "hop_ns")["value"] == pytest.approx(sum(hops) / 2 / clock, rel=OFF)


@PRICED
@pytest.mark.parametrize("device", ["h100", "h200"])
def test_smaller_tiles_have_the_cycles_of_the_cost_files(device):
    """Head dim 32 has the smaller one alone."""
    of_32 = [step.cycles for shape in SHAPES for step in replay(cubin(Template.ONE_PASS, 32, shape))]
    assert cycles_of(device, "tflops", "32") == pytest.approx(of_32, rel=OFF)
    assert entry_of(device, "tflops", "32")["value"] == pytest.approx(tflops_of(64 * 128, 32, sum(of_32) / 2), rel=OFF)
    small, large = cycles_of(device, "small_tile_percent", "64")
    assert large == pytest.approx(mean(replays(Template.ONE_PASS, 64)) / 2, rel=OFF)
    assert entry_of(device, "small_tile_percent", "64")["value"] == pytest.approx(100 * small / large, abs=1)


@PRICED
def test_dropout_has_the_cycles_of_its_price():
    """The mean of both masks. In 64 columns it is beside a loop whose steps have two parts, as dropout's has."""
    for columns, ratio in RATIOS.items():
        without = [IN_TWO_PARTS[mask] if columns == 64 else cycles_of_gluon(columns, mask) for mask in SHAPES]
        more = sum(cycles_of_gluon(columns, f"{mask}-dropout") for mask in SHAPES) - sum(without)
        assert GLUON_DROPOUT_CYCLES[columns] == pytest.approx(ratio * more / len(SHAPES), rel=0.02)


@PRICED
def test_functions_have_the_cycles_of_their_price():
    """Where they take the most. Without them the steps are those that prices are parts of."""
    more = {shape: dict[int, float]() for shape in gates.GLUON_FUNCTIONS}
    for columns, ratio in RATIOS.items():
        without, *others = (cycles_of_gluon(columns, shape) * ratio for shape in ("flex-documents", *gates.GLUON_FUNCTIONS))
        assert GLUON_CYCLES_WITHOUT[columns] == pytest.approx(without, rel=OFF)
        for shape, cycles in zip(gates.GLUON_FUNCTIONS, others, strict=True):
            more[shape][columns] = cycles - without
    for shape, operations in (("flex-documents-alibi", ALIBI), ("flex-window-soft-cap", SOFT_CAP)):
        assert max(more[shape].values()) == pytest.approx(GLUON_CYCLES[0] + GLUON_CYCLES[1] * operations, rel=0.05)


def added_by_tma(tile_bytes: int, constants: Constants = Constants()) -> float:  # noqa: B008 (frozen)
    """What the warp that adds takes for a tile of dQ: it polls, adds, waits until that is acknowledged, and fences."""
    return constants.l2_latency + tile_bytes / constants.addition_bandwidth + constants.l2_latency + constants.gpu_fence


@PRICED
@pytest.mark.parametrize("device", ["h100", "h200"])
def test_the_gluon_kernel_has_the_cycles_of_the_cost_files(device):
    """Those of head dim 256, where an SM adds twice as much, and takes longer for that than for the loop. Two warps are done in two
    steps, and those of half a tile each in one."""
    steps = {}
    for head_dim in (64, 128, 256):
        cells = [Cell("sm_90", gates.GLUON, "bf16", head_dim, shape) for shape in SHAPES]
        steps[head_dim] = [step.cycles for cell in cells for step in gates.replays(gates.compiled(cell), cell.rules)]
    added, half = (64 << 10) / Constants().addition_bandwidth, added_by_tma(32 << 10)
    assert cycles_of(device, "gluon_tflops", "256") == pytest.approx([added, *steps[256]], rel=OFF)
    assert entry_of(device, "gluon_tflops", "256")["value"] == pytest.approx(tflops_of(64 * 64, 256, added), rel=OFF)
    c = Constants()
    assert cycles_of(device, "gluon_hop_ns", "256") == [round(c.async_fence + half + c.l2_latency / 2)]
    assert half < min(steps[256]) and max(steps[256]) < added
    assert half < 2 * min(steps[64] + steps[128])


@PRICED
def test_the_page_says_what_the_gluon_kernel_would_take():
    """A row of docs/measurements.md, in ms."""
    clock, _ = compared()
    cells = []
    for head_dim in (128, 64):
        for shape in SHAPES:
            clocks = persistent(head_dim, shape)([cycles_of_gluon(head_dim, shape)], 0)
            cells.append(f"({clocks / clock / 1e6:.2f})")
    page = (Path(__file__).parents[2] / "docs" / "measurements.md").read_text()
    assert f"| ours, Gluon, as it is now, by Triton 3.7 | {' | '.join(cells)} |" in page
