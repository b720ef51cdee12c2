"""`choose` and the pass, whose decisions `codegen` prints, say the same about an attention, under the same settings."""

from __future__ import annotations

import json

import pytest

from benchmarks.machine_code.__main__ import main
from benchmarks.machine_code.generate import attention_backward
from dash_inductor import enabled
from dash_inductor.cli.main import main as of_package
from dash_inductor.decision import Decision

BASE = {"q_len": 2048, "kv_len": 2048, "batch": 2, "heads": 16, "kv_heads": 16, "head_dim": 128, "mask": "causal"}
SAID = ("family", "roles", "heads_in_flight", "stride", "tile", "predicted_us", "workspace_bytes", "guarantee")


@pytest.mark.parametrize(
    ("device", "settings", "change"),
    [
        ("h100", {}, {}),
        ("h200", {}, {"mask": "full", "kv_len": 1000, "head_dim": 64}),
        ("h100", {}, {"kv_heads": 1}),  # two passes
        ("a100", {"guarantee": "device"}, {}),
        ("b200", {"schedule": "shift_round_robin"}, {"mask": "full"}),
        ("h100", {"schedule": "symmetric"}, {"q_len": 512, "kv_len": 512}),
        ("h100", {"launch": "chained"}, {}),
        ("h100", {"sm_reserve": 16}, {}),
        ("h100", {"schedule": "shift"}, {}),
        ("h100", {"kernel": "gluon"}, {}),
        ("h100", {"template": "one_pass"}, {"head_dim": 192}),
        ("b200", {}, {"kv_len": 2049}),
        ("rtx5090", {}, {}),
    ],
)
def test_they_say_the_same(device: str, settings: dict, change: dict, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = BASE | change
    words = [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
    with enabled(**settings):
        (decision,) = attention_backward(device, **sizes).decisions
        of_package(["choose", f"--device={device}", "--json", *words])
    figures = json.loads(capsys.readouterr().out)
    assert figures["declined"] == decision.reason
    if decision.rewritten:
        assert {name: figures[name] for name in SAID} == {name: getattr(decision, name) for name in SAID}


FLEX = ["codegen", "--device=b200", "--q-len=4096", "--kv-len=4096", "--batch=1", "--head-dim=64"]


def test_codegen_shows_flex_attention(capsys: pytest.CaptureFixture[str]) -> None:
    """The time depends on the mask, so the decision has that of a visited tile: more of one whose functions do more."""
    found = []
    for functions in (["--mask-mod=causal"], ["--mask-mod=documents", "--score-mod=alibi"]):
        assert main([*FLEX, "--heads=16", *functions, "--json"]) == 0
        figures = json.loads(capsys.readouterr().out)
        (decision,) = figures["decisions"]
        assert figures["gates"] == [] and decision["mask"] == "block_mask" and decision["predicted_us"] is None
        assert f"predicted by mask: {decision['step_ns']} ns for each visited tile" in str(Decision(**decision))
        rows, keys = map(int, decision["tile"].split("x")[:2])
        found.append(decision["step_ns"] / (rows * keys))
    assert found[1] > 1.2 * found[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--heads=2", "--mask-mod=causal"], "few KV tiles: one pass has work for 34 CTAs"),
        (["--heads=3", "--kv-heads=2", "--mask-mod=causal"], "kv_heads must divide heads, and 2 does not divide 3"),
        (["--heads=16", "--score-mod=soft-cap", "--dynamic"], "--mask-mod and --score-mod take one length, known when compiling"),
    ],
)
def test_codegen_says_why_not(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*FLEX, *words])
    assert said in capsys.readouterr().err
