from __future__ import annotations

from dataclasses import replace

import pytest

from dash_inductor.config import GLUON, TRITON
from dash_inductor.devices.cost_files import FOLDER, arch_of, known_devices, load_costs, tomllib, two_pass_percent


def test_the_known_devices() -> None:
    assert known_devices() == ("a100", "b200", "emulated", "h100", "h200", "l40s", "rtx4090", "rtx5090")


@pytest.mark.parametrize("device", known_devices())
def test_every_number_has_a_source(device: str) -> None:
    numbers = tomllib.loads((FOLDER / f"{device}.toml").read_text())
    assert isinstance(numbers.pop("arch"), str)
    for per_head_dim in ("tflops", "gluon_tflops", "gluon_hop_ns", "chain_ns", "two_pass_percent"):
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
    [(64, 128, 128, 2498, 1378), (128, 64, 128, 2311, 1378), (256, 64, 64, 2908, 1897)],
)
def test_steps_of_the_gluon_kernel(device: str, head_dim: int, block_m: int, block_n: int, step_ns: int, hop_ns: int) -> None:
    """All but step and hop are those of the Triton kernel, which takes no head dim above 128."""
    blocks = {"block_m": block_m, "block_n": block_n, "head_dim": head_dim}
    triton, gluon = (load_costs(device, **blocks, kernel=each) for each in (TRITON, GLUON))
    assert (gluon.step_ns, gluon.hop_ns) == (step_ns, hop_ns)
    assert head_dim > 128 or (gluon.step_ns < triton.step_ns and gluon.hop_ns < triton.hop_ns)
    assert replace(gluon, step_ns=triton.step_ns, hop_ns=triton.hop_ns) == triton
    assert "Gluon" in gluon.sources["step_ns"] and "TMA" in gluon.sources["hop_ns"]


def test_only_sm_90_has_a_price_of_the_gluon_kernel() -> None:
    of_gluon = {
        device
        for device in known_devices()
        if {"gluon_tflops", "gluon_hop_ns"} <= set(tomllib.loads((FOLDER / f"{device}.toml").read_text()))
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
