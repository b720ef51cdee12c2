"""Kernels compiled for a Hopper GPU that is not there, replayed; and the cost files, which follow from that."""

from __future__ import annotations

import dataclasses
import functools
import json

import pytest
import triton
from kernels import compiled, generated

from benchmarks.machine_code import gates
from benchmarks.machine_code.__main__ import main
from benchmarks.machine_code.gates import Cell, judged
from benchmarks.machine_code.replay import Replay, pricing, replay
from benchmarks.machine_code.replay.constants import Constants
from dash_inductor.config import GLUON
from dash_inductor.devices.cost_files import load_tflops, load_two_pass, numbers_of
from dash_inductor.templates import tiles
from dash_inductor.templates.tiles import Template

pytestmark = pytest.mark.nightly
# The cost files are of one Triton's code; the replay itself is of any.
PRICED = pytest.mark.skipif(not triton.__version__.startswith("3.7."), reason="the cost files are of Triton 3.7's code")
SHAPES = ("full", "causal")
ROWS = {64: 128, 128: 64}  # of a step of one pass
OFF = 0.03  # what the files may be off the replay: rounding, and what a patch release of Triton changes
MEASURED_OFF = 0.1  # from what was measured on an H200


def cubin(template: str, head_dim: int, shape: str, cached: bool = True) -> bytes:
    """As `gates` compiles it."""
    code = generated(settings={"template": template}, cached=cached, head_dim=head_dim, **gates.SHAPES[shape])
    (name,) = code.templates
    return compiled(code.kernels[name], "h100").cubin


@functools.cache
def replays(template: str, head_dim: int) -> list[Replay]:
    count = 1 if template == Template.ONE_PASS else 2
    return [step for shape in SHAPES for step in replay(cubin(template, head_dim, shape), count)]


@pytest.mark.parametrize("head_dim", [64, 128])
def test_one_pass(head_dim):
    """Its matmuls alone, what they cost beside, and a release that comes in time for a shift schedule."""
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


def test_a_tile_that_the_diagonal_crosses():
    """Its mask is applied to S before exp2."""
    (off,), (on,) = (replay(cubin(Template.ONE_PASS, 128, "causal"), edge=edge) for edge in (False, True))
    assert on.cycles > off.cycles * 1.015  # 1.018 with Triton 3.9


@pytest.mark.parametrize("template", [Template.ONE_PASS, Template.TWO_PASS])
def test_two_stages_wait_for_their_loads(monkeypatch, template):
    """The same kernel with a stage less is slower, and by its loads, where additions are too fast to hide that."""
    fast_additions = Constants(addition_bandwidth=64)
    (three,) = replay(cubin(template, 128, "causal"), constants=fast_additions)
    table = tiles._TILES if template == Template.ONE_PASS else tiles._TWO_PASS_TILES
    monkeypatch.setitem(table, (90, 128), dataclasses.replace(table[90, 128], num_stages=2))
    (two,) = replay(cubin(template, 128, "causal", cached=False), constants=fast_additions)
    # In parts of its matmuls' time, which is the same by every Triton.
    assert two.cycles - three.cycles > 0.3 * three.tensor_cycles
    assert next(iter(two.exposed)) == "loads"
    assert three.exposed.get("loads", 0) < 100 < two.exposed["loads"]


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


@pytest.mark.parametrize("arch", ["sm_80", "sm_100", "sm_120"])
def test_other_gpus_are_not_predicted(arch):
    row = judged(Cell(arch, Template.ONE_PASS, "bf16", 64, "full"))
    assert (row["predicted_cycles"], row["not_predicted"]) == (None, "only sm_90 can be replayed")


def test_the_command(tmp_path, capsys):
    path = tmp_path / "kernel.cubin"
    path.write_bytes(cubin(Template.TWO_PASS, 64, "full"))
    assert main(["replay", str(path), "--loops", "2", "--json", "--trace"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["cubins"]
    assert [loop["cycles"] for loop in found["loops"]] == [
        pytest.approx(step.cycles, abs=0.1) for step in replay(cubin(Template.TWO_PASS, 64, "full"), 2)
    ]
    hgmma = [event for event in found["loops"][0]["trace"] if event["opcode"].startswith("HGMMA") and event["warp"] == 0]
    assert len(hgmma) == 64 // 16 * 2 + 64 // 16 * 2


def test_the_command_says_what_hangs_on_each_guess(tmp_path, capsys):
    """In CI tests/unit/test_replay.py asks for it of a loop of three instructions."""
    path = tmp_path / "kernel.cubin"
    path.write_bytes(cubin(Template.TWO_PASS, 64, "full"))
    assert main(["replay", str(path), "--sensitivity"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("kernel.cubin: about ")
    assert any("barrier 20: halved " in line for line in lines)


# What an H200 showed of the replay: our Triton kernel was slower than that, and two passes are taken to be as others without waits.
SLOWER, WITHOUT_WAITS = 1.3, 0.95


@PRICED
@pytest.mark.parametrize("device", ["h100", "h200"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_two_passes_are_priced_by_the_replay(device, head_dim):
    """A kernel that changes needs other constants: `pricing` gives them. One pass is measured, and the replay says more of it."""
    numbers, rows = numbers_of(device), ROWS[head_dim] // 64
    one, two = replays(Template.ONE_PASS, head_dim), replays(Template.TWO_PASS, head_dim)
    tflops, percent = numbers["tflops"][str(head_dim)], numbers["two_pass_percent"][str(head_dim)]
    replayed = pricing.tflops(one, numbers["sms"]["value"])
    assert 1.2 < replayed / tflops["value"] < 1.45
    measured = pricing.two_pass_percent(two, one, rows) * tflops["value"] / replayed
    assert percent["value"] == pytest.approx(WITHOUT_WAITS * measured, rel=OFF)
    assert percent["estimate"] and tflops["estimate"] == (device == "h100")


@PRICED
@pytest.mark.parametrize("device", ["h100", "h200"])
def test_two_passes_of_head_dim_256_are_priced_by_the_replay(device):
    """In three kinds of CTAs, whose steps have 32 rows; one pass is that of 128, twice as long."""
    cells = [Cell("sm_90", Template.TWO_PASS, "bf16", 256, shape) for shape in SHAPES]
    loops = [step for cell in cells for step in gates.replays(gates.compiled(cell), cell.rules)]
    tile = tiles.two_pass_tile(90, "bf16", 256)
    costs = load_two_pass(device, **tile.sizes())
    replayed_ns = sum(map(pricing.time_ns, loops)) / len(SHAPES)
    assert 2 * costs.kv_step_ns + costs.q_step_ns == pytest.approx(WITHOUT_WAITS * replayed_ns, rel=OFF)
    assert numbers_of(device)["two_pass_percent"]["256"]["estimate"]


@functools.cache
def replays_of_gluon(head_dim: int) -> list[Replay]:
    """With a hand-over by the warp that adds, which is not in the loop."""
    found = []
    for shape in SHAPES:
        cell = Cell("sm_90", gates.GLUON, "bf16", head_dim, shape)
        (step,) = gates.replays(gates.compiled(cell), cell.rules)
        tile_bytes = cell.rules.tile.block_m * head_dim * 4
        found.append(dataclasses.replace(step, handover_cycles=pricing.handover_by_tma(tile_bytes)))
    return found


@PRICED
@pytest.mark.parametrize("device", ["h100", "h200"])
def test_the_cost_files_are_of_the_gluon_kernel(device):
    """Those of head dim 256; at 64 and 128 they are measured, and the mean of both masks is near. The warps that add are done
    within a step, at the slowest speed of additions that is possible, too."""
    numbers = numbers_of(device)
    steps = {head_dim: replays_of_gluon(head_dim) for head_dim in (64, 128, 256)}
    for head_dim, own in steps.items():
        full, causal = (load_tflops(device, head_dim, GLUON, mask=mask) for mask in SHAPES)
        off = OFF if head_dim == 256 else MEASURED_OFF
        assert (full + causal) / 2 == pytest.approx(pricing.tflops(own, numbers["sms"]["value"]), rel=off)
    hop = numbers["gluon_hop_ns"]["256"]
    assert hop["value"] == pytest.approx(pricing.hop_ns(steps[256]), rel=OFF)
    assert hop["estimate"]
    slowest = pricing.handover_by_tma(32 << 10, Constants(addition_bandwidth=18))
    assert slowest < min(step.cycles for step in steps[64] + steps[128])
    of_256 = pricing.handover_by_tma(64 << 10, Constants(addition_bandwidth=18))
    assert of_256 == pytest.approx(min(step.cycles for step in steps[256]), rel=OFF)  # as long as a step


@PRICED
@pytest.mark.parametrize("device", ["h100", "h200"])
def test_a_hop_is_of_both_head_dims(device):
    """The replay's, corrected as the steps are."""
    entry = numbers_of(device)["hop_ns"]
    replayed = pricing.hop_ns(replays(Template.ONE_PASS, 64) + replays(Template.ONE_PASS, 128))
    assert entry["value"] == pytest.approx(SLOWER * replayed, rel=OFF)
    assert entry["estimate"]
