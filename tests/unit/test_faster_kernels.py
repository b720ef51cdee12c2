"""Flash attention whose implementation in torch's registry is deterministic: left to it where that is known to be faster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dash_inductor.config import Config
from dash_inductor.decision import Kernel, LeftToStock, Stock
from dash_inductor.devices.cost_files import load_tflops
from dash_inductor.devices.stock_kernels import PUBLISHED
from dash_inductor.devices.target import Target
from dash_inductor.problem import BLOCK_MASK, Problem
from dash_inductor.resolve import resolve

ALTERNATIVES = Path(__file__).parents[2] / "docs/alternatives.md"
TARGETS = {"a100": Target("a100", 80, 108), "h100": Target("h100", 90, 132), "b200": Target("b200", 100, 148)}
FA4 = "FA4 is active in torch's registry, and deterministic: "


def left(
    implementation: str | None,
    device: str,
    head_dim: int = 128,
    mask: str = "causal",
    *,
    strict: bool = True,
    value_dim: int | None = None,
    called: bool = False,
    dtype: str = "bf16",
    mods: int | None = None,
    sizes: tuple[int, int, int, int] = (4, 16, 16, 8192),
    **settings: Any,
) -> LeftToStock | None:
    """Why it is left to the implementation; None where ours is taken. sizes: batch, query heads, kv heads, length."""
    others: dict[str, Any] = {"value_dim": value_dim, "mods": mods, "changes_scores": mods is not None}
    others["block_size"] = (128, 128) if mask == BLOCK_MASK else None
    problem = Problem(mask, *sizes, sizes[3], head_dim, dtype, stock=Stock(Kernel.FLASH, strict, implementation, called), **others)
    try:
        resolve(problem, Config(**settings), TARGETS[device])
    except LeftToStock as reason:
        return reason
    return None


@pytest.mark.parametrize(
    ("implementation", "device", "head_dim", "mask", "expected"),
    [
        ("FA4", "b200", 128, "causal", True),
        ("FA4", "b200", 128, "full", True),
        ("FA4", "b200", 64, "causal", False),  # no figure
        ("FA4", "b200", 256, "causal", False),
        ("FA4", "b200", 128, BLOCK_MASK, False),
        ("FA4", "h100", 128, "causal", False),
        ("FA4", "a100", 128, "causal", False),
        ("FA3", "b200", 128, "causal", False),
        ("FA3", "h100", 128, "causal", False),  # a tie
        ("FA3", "h100", 128, "full", False),
        ("FA3", "h100", 64, "full", False),  # a tie by the lowest figure
        ("FA3", "h100", 64, "causal", False),
        (None, "b200", 128, "causal", False),
        ("DASH", "b200", 128, "causal", False),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_where_it_is_known_to_be_faster(implementation, device, head_dim, mask, expected, strict):
    """In both modes alike."""
    said = left(implementation, device, head_dim, mask, strict=strict)
    assert bool(said) == expected and (said is None or said.implementation == implementation)


def test_the_reason():
    said = left("FA4", "b200")
    assert said is not None and str(said) == (
        f"{FA4}1097 TFLOPS measured (B200, head dim 128, causal, S=8192 B=4 H=16; FA4 with this change; "
        "https://github.com/Dao-AILab/flash-attention/pull/2280, read on 2026-11-23); ours 856 TFLOPS predicted"
    )
    assert said.remedy == (
        "none needed: guarantee='device', template='one_pass' or restore_flash_attention_impl() takes ours all the same"
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"guarantee": "device"},
        {"guarantee": "batch"},
        {"template": "one_pass"},
        {"template": "two_pass"},
        {"schedule": "ascending"},
    ],
    ids=str,
)
def test_who_asks_for_ours_gets_it(settings):
    assert left("FA4", "b200") and left("FA4", "b200", **settings) is None


@pytest.mark.parametrize(
    ("implementation", "device", "given", "expected"),
    [
        ("FA3", "h100", {"mask": BLOCK_MASK}, "its kernel takes about 77 % of the time of ours"),
        ("FA3", "h100", {"mask": BLOCK_MASK, "head_dim": 64}, "its kernel takes about 82 % of the time of ours"),
        ("FA3", "h100", {"mods": 3}, "77 %"),  # a soft-cap
        ("FA3", "h100", {"dtype": "fp16"}, "77 %"),
        ("FA3", "h100", {}, None),  # our Gluon kernel is faster
        ("FA3", "h100", {"head_dim": 64, "mask": "full"}, None),
        ("FA3", "h100", {"mask": BLOCK_MASK, "head_dim": 96}, None),  # of which nothing is known
        ("FA3", "h100", {"mask": BLOCK_MASK, "value_dim": 64}, None),
        ("FA3", "h100", {"mask": BLOCK_MASK, "head_dim": 256}, None),
        ("FA3", "a100", {"mask": BLOCK_MASK}, None),
        ("FA3", "h100", {"mask": BLOCK_MASK, "called": False}, None),  # in torch's registry it only claims to be deterministic
        ("FA3", "h100", {"mask": BLOCK_MASK, "guarantee": "device"}, None),
        ("FA2", "h100", {"mask": BLOCK_MASK}, None),
        ("FA2", "h100", {"mask": BLOCK_MASK, "sizes": (1, 32, 4, 2048)}, "as fast as flash_attn's kernel, deterministic too"),
        ("FA2", "h100", {"sizes": (1, 32, 4, 512)}, None),  # two passes take few tiles
        ("FA2", "a100", {"head_dim": 64}, "its kernel takes about 96 % of the time of ours"),
        ("FA2", "a100", {}, None),
        ("FA2", "h100", {"head_dim": 256}, None),
    ],
)
def test_an_op_that_is_called_deterministic_stays_where_it_is_no_slower(implementation, device, given, expected):
    said = left(implementation, device, **{"called": True, **given})
    assert (said is None) == (expected is None) and (said is None or expected in str(said))
    assert said is None or (said.implementation is None and said.remedy.startswith("none needed: template="))


@pytest.mark.parametrize("percent", [99, 101])
def test_a_figure_of_such_an_op_is_compared_as_it_is(monkeypatch, percent):
    figure = replace(PUBLISHED[0], tflops=load_tflops("h100", 128, "gluon") * percent / 100)
    monkeypatch.setattr("dash_inductor.resolve.published", lambda *asked: figure)
    said = left("FA3", "h100", called=True)
    assert (said is not None) == (percent > 100) and (said is None or "its kernel is no slower: " in str(said))


def test_another_value_dim_has_no_figure():
    assert left("FA4", "b200", value_dim=128) and not left("FA4", "b200", value_dim=64)


@pytest.mark.parametrize(("percent", "expected"), [(104, False), (106, True)])
def test_up_to_five_percent_is_a_tie(monkeypatch, percent, expected):
    figure = replace(PUBLISHED[0], tflops=load_tflops("h100", 128) * percent / 100)
    monkeypatch.setattr("dash_inductor.resolve.published", lambda *asked: figure)
    assert bool(left("FA4", "h100", kernel="triton")) == expected
    assert left("FA3", "h100", kernel="triton") is None  # which only claims to be deterministic
    said = left("CUDNN", "h100", kernel="triton")  # of which nobody has published one
    assert (said is not None) == expected and (said is None or said.implementation == "CUDNN")


@pytest.mark.parametrize(("kernel", "percent"), [("triton", 106), ("gluon", 106 * 631 / 529)])
def test_ours_is_the_kernel_that_is_asked_for(monkeypatch, kernel, percent):
    figure = replace(PUBLISHED[0], tflops=load_tflops("h100", 128) * percent / 100)
    monkeypatch.setattr("dash_inductor.resolve.published", lambda *asked: figure)
    said = left("FA4", "h100", kernel=kernel)
    assert said is not None and str(said).endswith(f"; ours {load_tflops('h100', 128, kernel)} TFLOPS predicted")
    assert bool(left("FA4", "h100", kernel="triton")) and bool(left("FA4", "h100", kernel="gluon")) == (kernel == "gluon")


def test_the_emulated_device_takes_ours():
    stock = Stock(Kernel.FLASH, True, "FA4")
    resolve(Problem("full", 1, 1, 1, 64, 64, 128, "bf16", stock=stock), Config(), Target("emulated", "emulated", 6))


@pytest.mark.parametrize("figure", PUBLISHED, ids=lambda x: f"{x.implementation} {x.gpu} {x.head_dim} {x.mask} {x.length}")
def test_figures_are_those_of_the_page(figure):
    """Measured by others, with the source."""
    lines = [line for line in ALTERNATIVES.read_text().splitlines() if figure.source in line and figure.implementation in line]
    of_dim = [line for line in lines if f"d {figure.head_dim}, {figure.mask}" in line]
    assert any(f"{number:g}" in line for line in of_dim for number in (figure.tflops, int(figure.tflops)))
