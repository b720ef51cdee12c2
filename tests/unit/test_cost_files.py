from __future__ import annotations

import csv
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from dash_inductor.config import GLUON, TRITON, Config
from dash_inductor.devices.cost_files import (
    BY_HEAD_DIM,
    FOLDER,
    GLUON_BY_HEAD_DIM,
    arch_of,
    known_devices,
    load_costs,
    numbers_of,
    tomllib,
    two_pass_percent,
)
from dash_inductor.devices.target import Target
from dash_inductor.problem import Problem
from dash_inductor.resolve import resolve
from dash_inductor.schedule import MASKS

ROOT = Path(__file__).parents[2]


def test_the_known_devices() -> None:
    assert known_devices() == ("a100", "b200", "emulated", "h100", "h200", "l40s", "rtx4090", "rtx5090")


@pytest.mark.parametrize("device", known_devices())
def test_every_number_has_a_source(device: str) -> None:
    numbers = tomllib.loads((FOLDER / f"{device}.toml").read_text())
    assert isinstance(numbers.pop("arch"), str)
    for per_head_dim in (*BY_HEAD_DIM, *GLUON_BY_HEAD_DIM):
        numbers.update({f"{per_head_dim}.{d}": entry for d, entry in numbers.pop(per_head_dim, {}).items()})
    for name, entry in numbers.items():
        assert set(entry) == {"value", "source", "estimate"}, name
        assert isinstance(entry["value"], int) and isinstance(entry["estimate"], bool) and entry["source"], name
    costs = load_costs(device, block_m=64, block_n=128, head_dim=64)
    assert set(costs.sources) == {"step_ns", "hop_ns", "shift_percent", "sms", "l2_bytes", "launch_ns", "chain_ns"}
    assert costs.estimate  # until someone measures: then this test and the file change together


@pytest.mark.parametrize(("head_dim", "step_ns"), [(16, 362), (32, 724), (64, 1448), (128, 2616)])
def test_h100_steps(head_dim: int, step_ns: int) -> None:
    """1.4 us at d = 64 and 2.6 us at d = 128; smaller head dims in proportion."""
    costs = load_costs("h100", block_m=64, block_n=128, head_dim=head_dim)
    assert (costs.step_ns, costs.hop_ns, costs.workers, costs.l2_bytes) == (step_ns, 1845, 132, 50 * 2**20)
    assert costs.shifted_step_ns == step_ns * 107 // 100


@pytest.mark.parametrize("device", ["h100", "h200"])
@pytest.mark.parametrize(
    ("head_dim", "block_m", "block_n", "step_ns", "hop_ns"),
    [(64, 128, 128, 2657, 1990), (128, 64, 128, 2194, 2300), (256, 64, 64, 2908, 1897)],
)
def test_steps_of_the_gluon_kernel(device: str, head_dim: int, block_m: int, block_n: int, step_ns: int, hop_ns: int) -> None:
    """What it has no numbers of its own for is as of the Triton kernel, which takes no head dim above 128."""
    blocks = {"block_m": block_m, "block_n": block_n, "head_dim": head_dim}
    triton, gluon = (load_costs(device, **blocks, kernel=each) for each in (TRITON, GLUON))
    assert (gluon.step_ns, gluon.hop_ns) == (step_ns, hop_ns)
    assert head_dim > 128 or gluon.step_ns < triton.step_ns
    own = {name: getattr(triton, name) for name in ("step_ns", "hop_ns", "shift_percent", "sweep_percent")}
    assert replace(gluon, **own) == triton
    assert all(gluon.sources[name] != triton.sources[name] for name in ("step_ns", "hop_ns", "shift_percent"))


def test_only_sm_90_has_a_price_of_the_gluon_kernel() -> None:
    of_gluon = {
        device
        for device in known_devices()
        if set(GLUON_BY_HEAD_DIM) <= set(tomllib.loads((FOLDER / f"{device}.toml").read_text()))
    }
    assert of_gluon == {device for device in known_devices() if arch_of(device) == 90} == {"h100", "h200"}


def test_h100_chains_at_the_memorys_peak() -> None:
    """K, V, dk and dv of a KV tile, 2 bytes each, at an SM's part of 3.35 TB/s."""
    for head_dim in (64, 128):
        costs = load_costs("h100", block_m=64, block_n=128, head_dim=head_dim)
        assert costs.chain_ns == pytest.approx(4 * 128 * head_dim * 2 / (3.35e12 / 132) * 1e9, rel=1e-3)


@pytest.mark.parametrize(
    ("device", "tflops", "bandwidth", "flop"),
    [("rtx4090", 165.2, 1.008, 512), ("l40s", 362, 0.864, 1024), ("rtx5090", 209.5, 1.792, 512)],
)
def test_proxies_without_a_figure_of_their_own(device: str, tflops: float, bandwidth: float, flop: int) -> None:
    """An H100's rates by the ratio of peaks; of two passes seven matmuls to five, and two round trips to L2 that one pass makes."""
    for head_dim, block_m, block_n, expected in ((64, 32, 128, 350), (128, 64, 64, 440)):
        sizes = 10 * block_m * block_n * head_dim
        costs = load_costs(device, block_m=block_m, block_n=block_n, head_dim=head_dim)
        assert costs.step_ns == pytest.approx(sizes / (expected * tflops / 989 / costs.workers * 1e3), rel=1e-2)
        assert costs.chain_ns == pytest.approx(4 * block_n * head_dim * 2 / (bandwidth * 1e12 / costs.workers) * 1e9, rel=1e-3)
        one = sizes / flop
        assert two_pass_percent(device, head_dim) == (round(100 * 1.4 * one / (one + 1200)), True)


def test_the_emulated_device() -> None:
    costs = load_costs("emulated", block_m=16, block_n=32, head_dim=128)
    assert (costs.step_ns, costs.hop_ns, costs.workers) == (1000, 750, 6)


def test_sms_and_ctas_per_sm() -> None:
    one = load_costs("h100", block_m=64, block_n=64, head_dim=64)
    two = load_costs("h100", block_m=64, block_n=64, head_dim=64, sms=114, ctas_per_sm=2)
    assert two.workers == 228
    assert abs(two.step_ns - 2 * one.step_ns) <= 1  # two CTAs share an SM


def test_bad_input_is_named() -> None:
    with pytest.raises(
        ValueError, match="no cost file for device 'mi300'; known: a100, b200, emulated, h100, h200, l40s, rtx4090, rtx5090"
    ):
        load_costs("mi300", block_m=64, block_n=128, head_dim=64)
    with pytest.raises(ValueError, match="sms must be at least 1, got 0"):
        load_costs("h100", block_m=64, block_n=128, head_dim=64, sms=0)
    with pytest.raises(ValueError, match="hop_ns must not be negative"):
        replace(load_costs("h100", block_m=64, block_n=128, head_dim=64), hop_ns=-1)


def timed_on_an_h200(head_dim: int) -> dict[tuple[str, str, int], float]:
    """ms of the Gluon kernel by mask, family and roles: 16,384 tokens in sequences of 8,192, hidden size 2,048, bf16."""
    with (ROOT / "benchmarks/results/h200/gluon/gluon_tables.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if (row["variant"], row["head_dim"]) == ("as committed", str(head_dim))]
    return {(row["mask"], row["family"], int(row["roles"])): float(row["median_ms"]) for row in rows}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_what_is_chosen_on_an_h200_is_the_fastest_that_was_timed(head_dim: int, mask: str) -> None:
    problem = Problem(mask, 2, 2048 // head_dim, 2048 // head_dim, 8192, 8192, head_dim, "bf16")
    chosen = resolve(problem, Config(), Target("h200", 90, 132)).choice
    assert chosen
    ms = {place: time for place, time in timed_on_an_h200(head_dim).items() if place[0] == mask}
    assert (mask, chosen.family, chosen.candidate.roles) == min(ms, key=lambda place: ms[place])
    assert chosen.time_ns == pytest.approx(min(ms.values()) * 1e6, rel=0.07)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_numbers_of_the_gluon_kernel_are_fitted_to_its_times(head_dim: int) -> None:
    """128 CTAs work: in shift and symmetric each has 2,048 or 1,040 steps of 64 x 128 rows at head dim 128."""
    ms = timed_on_an_h200(head_dim)
    shift, symmetric = ms["full", "shift", 64], ms["causal", "symmetric", 32]
    flop = 10 * 64 * 128 * 128 * 132
    tflops = [flop * steps / (time * 1e-3) / 1e12 for steps, time in ((2048, shift), (1040, symmetric))]
    hop_ns = (ms["full", "ascending", 64] - shift) / 63 * 1e6
    few = shift + 3 * hop_ns * 1e-6  # ascending by four CTAs, if L2 held all heads
    fitted = {"tflops": statistics.fmean(tflops), "hop_ns": hop_ns, "sweep_percent": 100 * (ms["full", "ascending", 4] / few - 1)}
    for device in ("h200", "h100"):
        for name, value in fitted.items():
            entry = numbers_of(device)[f"gluon_{name}"][str(head_dim)]
            assert entry["value"] == pytest.approx(value, rel=0.01, abs=0.5), name
            assert entry["estimate"] == (device == "h100")
