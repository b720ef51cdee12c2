"""What is left to a stock kernel that is deterministic, since it is faster by more than a tie, and where ours is taken."""

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
WITHOUT_GLUON = {"gluon": False}
FA4 = "FA4, active in torch's registry and deterministic, is faster: "


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
    function_ops: int = 0,
    gluon: bool = True,
    sizes: tuple[int, int, int, int] = (4, 16, 16, 8192),
    **settings: Any,
) -> LeftToStock | None:
    """Why it is left to the implementation; None where ours is taken. sizes: batch, query heads, kv heads, length."""
    others: dict[str, Any] = {"value_dim": value_dim, "function_ops": function_ops, "changes_scores": function_ops > 0}
    others["gluon_fails"] = "" if gluon else "is not there"
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
        ("FA4", "h100", 128, "causal", False),  # a tie
        ("FA4", "h100", 128, "full", False),
        ("FA4", "h100", 64, "full", True),
        ("FA4", "h100", 64, "causal", True),
        ("FA4", "h100", 128, BLOCK_MASK, False),
        ("FA4", "a100", 128, "causal", False),
        ("FA3", "b200", 128, "causal", False),
        ("FA3", "h100", 128, "causal", False),  # in the registry it only claims to be deterministic
        ("FA3", "h100", 64, "full", False),
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
        f"{FA4}1097 TFLOPS, measured (B200, head dim 128, causal, S=8192 B=4 H=16; FA4 with this change; "
        "https://github.com/Dao-AILab/flash-attention/pull/2280); ours 856 TFLOPS, predicted by our cost file"
    )
    assert said.remedy == (
        "none needed: template='one_pass', guarantee='device' or restore_flash_attention_impl() takes ours all the same"
    )


@pytest.mark.parametrize(
    ("implementation", "device", "given", "expected"),
    [
        ("FA3", "h100", {"mask": BLOCK_MASK} | WITHOUT_GLUON, None),  # our two passes are
        (
            "FA3",
            "h100",
            {"mask": BLOCK_MASK, "head_dim": 64} | WITHOUT_GLUON,
            "faster: 450 TFLOPS",
        ),  # by the figure of causal masks
        ("FA3", "h100", {"function_ops": 3, "head_dim": 64} | WITHOUT_GLUON, "faster: 450 TFLOPS"),  # a soft-cap
        ("FA3", "h100", {"dtype": "fp16", "head_dim": 64} | WITHOUT_GLUON, "faster: 450 TFLOPS"),
        ("FA3", "h100", {}, None),  # our Gluon kernel is faster
        ("FA3", "h100", {"mask": BLOCK_MASK, "head_dim": 64}, None),
        ("FA3", "h100", {"function_ops": 3, "dtype": "fp16"}, None),
        ("FA4", "h100", {"mask": BLOCK_MASK, "dtype": "fp16"}, None),  # a tie
        ("FA3", "h100", {"head_dim": 64, "mask": "full"}, None),
        ("FA3", "h100", {"mask": BLOCK_MASK, "head_dim": 96}, None),  # of which nothing is known
        ("FA3", "h100", {"mask": BLOCK_MASK, "value_dim": 64}, None),
        ("FA3", "h100", {"mask": BLOCK_MASK, "head_dim": 256}, None),
        ("FA3", "a100", {"mask": BLOCK_MASK}, None),
        ("FA3", "h100", {"mask": BLOCK_MASK, "called": False}, None),  # in torch's registry it only claims to be deterministic
        ("FA3", "h100", {"mask": BLOCK_MASK, "guarantee": "device"}, None),
        ("FA4", "h100", {"mask": BLOCK_MASK} | WITHOUT_GLUON, "faster: 603 TFLOPS"),
        ("FA4", "h100", {}, None),  # a tie
        ("FA2", "h100", {"mask": BLOCK_MASK}, None),
        ("FA2", "h100", {"mask": BLOCK_MASK, "sizes": (1, 32, 4, 2048)}, None),  # two passes take few chains
        ("FA2", "h100", {"sizes": (1, 32, 4, 512)}, None),
        ("FA2", "a100", {"head_dim": 64}, None),
        ("FA2", "a100", {}, None),
        ("FA2", "h100", {"head_dim": 256}, None),
    ],
)
def test_an_op_that_is_called_deterministic_stays_where_it_is_faster(implementation, device, given, expected):
    said = left(implementation, device, **{"called": True, **given})
    assert (said is None) == (expected is None) and (said is None or expected in str(said))
    assert said is None or (said.implementation is None and said.remedy.startswith("none needed: template="))


@pytest.mark.parametrize(("percent", "expected"), [(104, False), (106, True)])
@pytest.mark.parametrize(("dtype", "ours"), [("bf16", "gluon"), ("fp16", "two passes")])
def test_up_to_five_percent_is_a_tie(monkeypatch, percent, expected, dtype, ours):
    """Ours is the faster of the kernels that may be taken."""
    tflops = load_tflops("h100", 128, "gluon", mask="causal") if ours == "gluon" else load_tflops("h100", 128, mask="causal") / 0.81
    figure = replace(PUBLISHED[0], tflops=tflops * percent / 100)
    monkeypatch.setattr("dash_inductor.resolve.prices.published", lambda *asked: figure)
    given: dict[str, Any] = {"dtype": dtype, "gluon": ours == "gluon"}
    said = left("FA4", "h100", **given)
    assert bool(said) == expected and (
        said is None or str(said).endswith(f"; ours {tflops:.0f} TFLOPS, predicted by our cost file")
    )
    assert left("FA3", "h100", **given) is None  # which only claims to be deterministic
    said = left("CUDNN", "h100", **given)  # of which nobody has published one
    assert (said is not None) == expected and (said is None or said.implementation == "CUDNN")
    assert bool(left("FA3", "h100", **given, called=True)) == expected


@pytest.mark.parametrize("figure", PUBLISHED, ids=lambda x: f"{x.implementation} {x.gpu} {x.head_dim} {x.mask} {x.length}")
def test_figures_are_those_of_the_page(figure):
    """With the source."""
    lines = [line for line in ALTERNATIVES.read_text().splitlines() if line.startswith(f"| {figure.implementation}, ")]
    of_dim = [line for line in lines if f"{figure.gpu}, d {figure.head_dim}, {figure.mask}" in line]
    assert figure.source in ALTERNATIVES.read_text()
    assert any(f"{number:g}" in line for line in of_dim for number in (figure.tflops, int(figure.tflops)))
