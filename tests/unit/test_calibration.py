"""The fit of cost constants, on timings that the simulator makes up."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.schedules.simulator import simulate
from dash_inductor.config import GLUON
from dash_inductor.devices.calibration import NAMES, Timing, TwoPassTiming, fit, percent_of
from dash_inductor.devices.cost_files import FOLDER, has_estimates, load_costs, load_tflops, load_two_pass, require_of, tomllib
from dash_inductor.devices.target import Target
from dash_inductor.qualify import child
from dash_inductor.qualify import costs as calibrate
from dash_inductor.schedule import Geometry, GroupedPlan, make_order
from dash_inductor.schedule.costs import FLOP_PER_ELEMENT
from dash_inductor.templates import tiles

WORKERS = 24
TRUTH = {"step_ns": 2000, "shifted_step_ns": 2140, "hop_ns": 1500, "launch_ns": 9000, "chain_ns": 700}


def timing(family: str, n_q: int, n: int, rounds: int, noise: float) -> Timing:
    """A launch on a device of 24 workers."""
    plan = GroupedPlan(make_order(family, Geometry(n_q, n, 1, 1, "full"), n), rounds * (WORKERS // n), WORKERS // n)
    step = TRUTH["step_ns"] if family == "ascending" else TRUTH["shifted_step_ns"]
    ns = simulate(plan, compute_ns=step, reduce_ns=0, sync_ns=TRUTH["hop_ns"]).makespan_ns
    ns += TRUTH["launch_ns"] + rounds * TRUTH["chain_ns"]
    return Timing(family, n_q, n, plan.heads, n, plan.heads_in_flight, ns * noise)


def runs(percent: float) -> list[Timing]:
    rng = random.Random(3)
    return [
        timing(family, n_q, n, rounds, 1 + rng.gauss(0, percent / 100))
        for family in ("ascending", "shift")
        for n in (6, 12, 24)
        for n_q in (24, 48, 160)
        for rounds in (1, 2, 5)
    ]


def test_exact_timings_give_the_constants() -> None:
    found = fit(runs(0))
    for name, value in TRUTH.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-6), name
    assert found.shift_percent == 7 and found.error < 1e-9


def test_noise_of_half_a_percent_costs_a_few() -> None:
    found = fit(runs(0.5))
    for name, off in (("step_ns", 0.01), ("shifted_step_ns", 0.01), ("hop_ns", 0.04)):
        assert getattr(found, name) == pytest.approx(TRUTH[name], rel=off), name
    assert 0.001 < found.error < 0.01


def test_timings_that_say_too_little_are_refused() -> None:
    with pytest.raises(ValueError, match="no timing depends on shifted_step_ns"):
        fit([t for t in runs(0) if t.family == "ascending"])
    with pytest.raises(ValueError, match="do not tell the constants apart"):
        fit([timing(family, 48, 12, 2, 1) for family in ("ascending", "shift")])


@pytest.mark.parametrize("percent", [90, 100, 131])
def test_the_price_of_two_passes(percent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches are as the cost model has them, with something that every launch costs beside."""
    monkeypatch.setattr("dash_inductor.devices.cost_files.two_pass_percent", lambda device, head_dim: (percent, False))
    two = load_two_pass("h100", block_m=64, block_n=64, kv_rows=128, q_rows=128, head_dim=128)
    tile = tiles.tile(90, "bf16", 128)

    def timed(launch: calibrate.Launch) -> TwoPassTiming:
        n_q, n = launch.q_len // 64, launch.kv_len // 128
        assert launch.heads * n % 132 == 0  # whole waves
        dkdv = launch.heads * n // 132 * n_q * two.kv_step_ns + 9000
        dq = launch.heads * (launch.q_len // 128) // 132 * (launch.kv_len // 64) * two.q_step_ns + 4000
        return calibrate.two_pass_timing(launch, tile, 132, dkdv + dq)

    few, many = (timed(launch) for launch in calibrate.launches_of(H100, 128) if launch.family == "two_pass")
    of_file_ns = 64 * 128 * 128 * FLOP_PER_ELEMENT * 132 / load_tflops("h100", 128) / 1000
    assert percent_of(few, many, step_ns=of_file_ns) == percent


def test_times_that_do_not_grow_are_refused() -> None:
    with pytest.raises(ValueError, match="4000 tiles took 900 ns, and 1000 took 1000"):
        percent_of(TwoPassTiming(1000, 1000), TwoPassTiming(4000, 900), step_ns=2000)


def test_constants_that_cannot_be_are_refused() -> None:
    """Timings that get shorter with every hop."""
    odd = [replace(t, ns=t.ns - 3 * TRUTH["hop_ns"] * (t.roles - 1)) if t.family == "ascending" else t for t in runs(0)]
    with pytest.raises(ValueError, match=r"the fit gives hop_ns = -3000\.0: the timings are too noisy, or too few"):
        fit(odd)


H100 = Target("h100", 90, 132)
PERCENT = {64: 98, 128: 117}


def session(gpu: str, sms: int) -> calibrate.Session:
    return calibrate.Session("h100", gpu, 90, sms, 50 << 20, "sources")


def test_a_step_is_as_long_on_a_board_with_fewer_sms(tmp_path: Path) -> None:
    """An H100 PCIe has 114; what is read back is what was fitted, and it is no other board's file."""
    text = calibrate.cost_file(session("NVIDIA H100 PCIe", 114), {64: (fit(runs(0)), 98), 128: (fit(runs(0)), 117)})
    path = tmp_path / "mine.toml"
    path.write_text(text)
    assert require_of(str(path), "NVIDIA H100 PCIe", 90) and not has_estimates(str(path))
    assert has_estimates(str(path), GLUON)
    costs = load_costs(str(path), block_m=128, block_n=128, head_dim=64)
    assert costs.step_ns == pytest.approx(2000, rel=0.002) and costs.workers == 114  # TFLOPS are rounded
    of_gluon, of_package = (load_costs(x, block_m=128, block_n=128, head_dim=64, kernel=GLUON) for x in (str(path), "h100"))
    assert of_gluon.step_ns == pytest.approx(of_package.step_ns, rel=0.002)  # it was not timed


def values(text: str) -> dict[str, Any]:
    numbers = tomllib.loads(text)
    assert numbers["arch"] == "sm_90"
    return {name: entry for name, entry in calibrate.flat(numbers).items() if name != "memory_gib"}


TIMED = {
    "sms": 132,
    "l2_bytes": 60 << 20,
    "tflops.64": 688,  # 10 * 128 * 128 * 64 FLOP in 2 us, and a 64th of 0.7, on each of 132 SMs
    "tflops.128": 690,
    "hop_ns": 1500,
    "shift_percent": 7,
    "sweep_percent": 0,
    "launch_ns": 9000,
    "chain_ns.64": 700,
    "chain_ns.128": 700,
    "two_pass_percent.64": 97,
    "two_pass_percent.128": 117,
    "two_pass_percent.256": 149,  # not timed: by its ratio to those of head dims 128 and 64
    "tflops.32": 313,
}


PACKAGE = values((FOLDER / "h100.toml").read_text())
FITTED = {name: entry["value"] for name, entry in PACKAGE.items()} | TIMED  # the rest is as the package's file has it


def pretended(launch: calibrate.Launch) -> float:
    """The time of a launch by the constants that are to be found."""
    tile = tiles.tile(90, "bf16", launch.head_dim)
    if launch.family == "two_pass":
        tiles_ = calibrate.two_pass_timing(launch, tile, 132, 0).tiles
        return 6000 + tiles_ * TRUTH["step_ns"] * PERCENT[launch.head_dim] / 100
    terms = calibrate.timing(launch, tile, 0).terms
    return sum(term * TRUTH[name] for term, name in zip(terms, NAMES, strict=True))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[calibrate.Launch]:
    """A pretended one; what is measured on it."""
    measured: list[calibrate.Launch] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H100")
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(L2_cache_size=60 << 20))
    monkeypatch.setattr(calibrate, "target_of", lambda device, settings: H100)

    def measure(launch: calibrate.Launch) -> float:
        measured.append(launch)
        return pretended(launch)

    monkeypatch.setattr(calibrate, "measure", measure)
    return measured


FOREVER = float("inf")


def test_all_in_one_run(gpu: list[calibrate.Launch], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it writes is a cost file of the constants by which the times were made, and one that a user may name."""
    assert calibrate.run(tmp_path, FOREVER, 0) == 0
    assert len(gpu) == len(set(gpu)) == 52 == capsys.readouterr().out.count("\n")
    out = tmp_path / "costs.toml"
    found = values(out.read_text())
    assert {name: entry["value"] for name, entry in found.items()} == FITTED
    not_timed = {name for name in FITTED if name.startswith(("gluon", "causal", "small_tile"))}
    not_timed |= {"sweep_percent", "two_pass_percent.256", "tflops.32", "small_launch_ns", "memory_gbps"}
    assert {name for name, entry in found.items() if entry["estimate"]} == not_timed
    assert "not timed" in found["two_pass_percent.256"]["source"]
    assert "d = 64" in found["hop_ns"]["source"] and "as torch reports it" in found["l2_bytes"]["source"]
    assert require_of(str(out), "NVIDIA H100", 90)


def test_a_head_dim_alone_keeps_the_rest_of_the_file(
    gpu: list[calibrate.Launch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "HEAD_DIMS", (128,))
    assert calibrate.run(tmp_path, FOREVER, 0) == 0
    assert {launch.head_dim for launch in gpu} == {128}
    found, now = values((tmp_path / "costs.toml").read_text()), values((FOLDER / "h100.toml").read_text())
    assert list(found) == list(now)
    for name, entry in found.items():
        is_kept = name.endswith((".64", ".32")) or "gluon" in name or name == "sweep_percent"
        assert entry == now[name] if is_kept else entry["value"] == FITTED[name]


def test_a_run_that_is_cut_goes_on(
    gpu: list[calibrate.Launch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was measured is kept as it comes, nothing is measured twice, and the end is that of one run."""
    out, timings = tmp_path / "costs.toml", tmp_path / "timings.jsonl"
    measure = calibrate.measure

    def cut(launch: calibrate.Launch) -> float:
        if len(gpu) == 30:
            raise KeyboardInterrupt
        return measure(launch)

    monkeypatch.setattr(calibrate, "measure", cut)
    with pytest.raises(KeyboardInterrupt):
        calibrate.run(tmp_path, FOREVER, 0)
    assert values(out.read_text())["tflops.128"]["value"] == 690 and values(out.read_text())["tflops.64"]["estimate"]
    timings.write_text(timings.read_text() + '{"launch": {"head_d')  # a line that was being written
    monkeypatch.setattr(calibrate, "measure", measure)
    compiled: list[calibrate.Launch] = []
    monkeypatch.setattr(calibrate, "compile_first", lambda launches, jobs, seconds: compiled.extend(launches))
    assert calibrate.run(tmp_path, 0, 0) == 1  # 4 timings of d = 64 tell nothing
    assert "not complete: head dim 64: the time limit" in capsys.readouterr().out and len(gpu) == 30
    assert calibrate.run(tmp_path, FOREVER, 3) == 0
    assert compiled == gpu[30:] and len(gpu) == len(set(gpu)) == 52
    assert {name: entry["value"] for name, entry in values(out.read_text()).items()} == FITTED
    assert calibrate.read_timings(timings)[1] == {launch: pretended(launch) for launch in gpu}


def test_timings_of_something_else_are_refused(
    gpu: list[calibrate.Launch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert calibrate.run(tmp_path, FOREVER, 0) == 0
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    for text, message in ((None, "holds timings of another GPU, or of other kernels"), ("nothing\n", "is no file of timings")):
        if text is not None:
            (tmp_path / "timings.jsonl").write_text(text)
        with pytest.raises(ValueError, match=message):
            calibrate.run(tmp_path, FOREVER, 0)


def test_each_launch_is_compiled_in_one_of_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot be compiled keeps none of the others from it."""
    commands: list[list[str]] = []
    monkeypatch.setattr(calibrate, "run_together", lambda each, seconds: commands.extend(each))
    launches, compiled = calibrate.launches_of(H100, 64), list[calibrate.Launch]()
    calibrate.compile_first(launches, 3, 1.0)
    monkeypatch.setattr(calibrate, "_backward_of", compiled.append)  # which gives no context, so that each fails
    assert [child.main(command[3]) for command in commands] == [0] * 3
    assert len(compiled) == len(launches) and set(compiled) == set(launches)


def test_nothing_in_time_writes_nothing(gpu: list[calibrate.Launch], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no head dim could be fitted"):
        calibrate.run(tmp_path, 0, 0)
    assert not list(tmp_path.iterdir()) and not gpu
