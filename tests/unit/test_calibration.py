"""The fit of cost constants, on timings that the simulator makes up."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dash_inductor import calibrate
from dash_inductor.calibration import Timing, TwoPassTiming, fit, percent_of
from dash_inductor.cli import main
from dash_inductor.schedule import Geometry, Plan, load_costs, load_two_pass, make, simulate
from dash_inductor.schedule.costs import tomllib

WORKERS = 24
TRUTH = {"step_ns": 2000, "shifted_step_ns": 2140, "hop_ns": 1500, "launch_ns": 9000, "chain_ns": 700}


def timing(family: str, n_q: int, n: int, rounds: int, noise: float) -> Timing:
    """A launch on a device of 24 workers."""
    plan = Plan(make(family, Geometry(n_q, n, 1, 1, "full"), n), rounds * (WORKERS // n), WORKERS // n)
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
    assert found.step_ns == pytest.approx(TRUTH["step_ns"], rel=0.01)
    assert found.shifted_step_ns == pytest.approx(TRUTH["shifted_step_ns"], rel=0.01)
    assert found.hop_ns == pytest.approx(TRUTH["hop_ns"], rel=0.04)
    assert 0.001 < found.error < 0.01


def test_timings_that_say_too_little_are_refused() -> None:
    with pytest.raises(ValueError, match="no timing depends on shifted_step_ns"):
        fit([t for t in runs(0) if t.family == "ascending"])
    with pytest.raises(ValueError, match="do not tell the constants apart"):
        fit([timing(family, 48, 12, 2, 1) for family in ("ascending", "shift")])


@pytest.mark.parametrize("percent", [90, 100, 131])
def test_the_price_of_two_passes(percent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of launches as the cost model has them, with something that every launch costs beside."""
    target = SimpleNamespace(key="h100", arch=90, sms=132)
    monkeypatch.setattr("dash_inductor.schedule.costs.two_pass_percent", lambda device, head_dim: (percent, False))
    two = load_two_pass("h100", block_m=64, block_n=64, kv_rows=128, q_rows=128, head_dim=128)

    def kernel_times(head_dim: int, *, q_len: int, kv_len: int, heads: int) -> list[float]:
        n_q, n = q_len // 64, kv_len // 128
        assert heads * n % 132 == 0  # whole waves
        dkdv = heads * n // 132 * n_q * two.kv_step_ns + 9000
        dq = heads * (q_len // 128) // 132 * (kv_len // 64) * two.q_step_ns + 4000
        return [dkdv + dq, 1234.0]

    monkeypatch.setattr(calibrate, "kernel_times", kernel_times)
    step_ns = load_costs("h100", block_m=64, block_n=128, head_dim=128).step_ns
    assert calibrate.measured_percent(target, 128, step_ns) == percent


def test_times_that_do_not_grow_are_refused() -> None:
    with pytest.raises(ValueError, match="4000 tiles took 900 ns, and 1000 took 1000"):
        percent_of(TwoPassTiming(1000, 1000), TwoPassTiming(4000, 900), step_ns=2000)


def test_constants_that_cannot_be_are_refused() -> None:
    """Timings that get shorter with every hop."""
    odd = [replace(t, ns=t.ns - 3 * TRUTH["hop_ns"] * (t.roles - 1)) if t.family == "ascending" else t for t in runs(0)]
    with pytest.raises(ValueError, match=r"the fit gives hop_ns = -3000\.0: the timings are too noisy, or too few"):
        fit(odd)


def test_without_a_gpu_there_is_one_clear_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        main(["calibrate"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.endswith("calibrate measures a GPU, and torch.cuda.is_available() is False here\n")


def test_it_overwrites_no_other_gpus_file() -> None:
    h100 = SimpleNamespace(key="h100", arch=90, sms=132)
    assert calibrate.file_of(h100, "NVIDIA H100 80GB HBM3", None) == Path(str(calibrate.FOLDER / "h100.toml"))
    assert calibrate.file_of(h100, "NVIDIA H20", "h20.toml") == Path("h20.toml")
    with pytest.raises(ValueError, match="NVIDIA H20 has no cost file of its own, it takes that of h100: name one by --device-out"):
        calibrate.file_of(h100, "NVIDIA H20", None)


def test_a_step_is_as_long_on_a_board_with_fewer_sms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An H100 PCIe has 114; what is read back is what was fitted."""
    target = SimpleNamespace(key="h100", arch=90, sms=114)
    text = calibrate.cost_file(target, {64: fit(runs(0)), 128: fit(runs(0))}, {64: 98, 128: 117}, "NVIDIA H100 PCIe")
    (tmp_path / "h100.toml").write_text(text)
    monkeypatch.setattr("dash_inductor.schedule.costs.FOLDER", tmp_path)
    costs = load_costs("h100", block_m=64, block_n=128, head_dim=64, sms=114)
    assert costs.step_ns == pytest.approx(2000, rel=0.002)  # TFLOPS are rounded


def test_the_file_it_writes_is_a_cost_file() -> None:
    target = SimpleNamespace(key="h100", arch=90, sms=132)
    numbers = tomllib.loads(calibrate.cost_file(target, {64: fit(runs(0)), 128: fit(runs(0))}, {64: 98, 128: 117}, "NVIDIA H100"))
    assert numbers.pop("arch") == "sm_90"
    for name in ("tflops", "chain_ns", "two_pass_percent"):
        numbers.update({f"{name}.{d}": entry for d, entry in numbers.pop(name).items()})
    assert {name: entry["value"] for name, entry in numbers.items()} == {
        "sms": 132,
        "l2_bytes": 50 * 2**20,
        "tflops.64": 346,  # 10 * 64 * 128 * 64 FLOP in 2 us on each of 132 SMs
        "tflops.128": 692,
        "hop_ns": 1500,
        "shift_percent": 7,
        "launch_ns": 9000,
        "chain_ns.64": 700,
        "chain_ns.128": 700,
        "two_pass_percent.64": 98,
        "two_pass_percent.128": 117,
    }
    assert not any(entry["estimate"] for entry in numbers.values())
    assert "d = 64" in numbers["hop_ns"]["source"]
