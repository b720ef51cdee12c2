"""What the demo must notice."""

import json
import sys
from types import SimpleNamespace

import pytest

from dash_inductor import config
from dash_inductor.cli import demo
from dash_inductor.cli.main import main

GRADIENT = "gradient of head.weight in step 1"


def run(**digests: str) -> dict:
    return {"digests": {"loss of step 1": "a", GRADIENT: "b"} | digests}


@pytest.mark.parametrize(
    ("words", "settings", "message"),
    [
        ("--steps 0", {}, "argument --steps: must be at least 1, got 0"),
        ("--steps 10001", {}, "argument --steps: must be at most 10000, got 10001"),
        ("--steps many", {}, "argument --steps: must be an integer, got 'many'"),
        ("--train no.json", {}, "--train needs a GPU, or emulation: set DASH_INDUCTOR_EMULATE=1"),
        ("--train no.json", {"enabled": False}, "DASH_INDUCTOR=0 switches off what the demo shows: unset it"),
        ("", {"enabled": False}, "DASH_INDUCTOR=0 switches off what the demo shows: unset it"),
    ],
)
def test_what_cannot_be_is_one_line(words, settings, message, monkeypatch, capsys):
    monkeypatch.setattr(config, "_current", config.Config(**settings))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        main(["demo", *words.split()])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"python -m dash_inductor demo: error: {message}\n"


def test_waits_are_added_up():
    assert demo._waits([SimpleNamespace(waits=2), SimpleNamespace(waits=5)]) == 7


@pytest.mark.parametrize("launches", [[], [SimpleNamespace(waits=3), SimpleNamespace(waits=0)]])
def test_an_attention_without_a_wait_proves_nothing(launches):
    with pytest.raises(RuntimeError, match="no CTA had to wait"):
        demo._waits(launches)


def test_the_first_line_comes_before_torch(monkeypatch, capsys):
    """Importing torch takes seconds, in which a new user would see nothing."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit):
        main(["demo"])
    out, err = capsys.readouterr()
    assert out == f"{demo.OPENING}\n" and "torch" in err


def test_the_text_is_real_and_long():
    assert len(demo._text()) > 100_000


@pytest.mark.parametrize(("other", "difference"), [({}, None), ({GRADIENT: "c"}, f"the {GRADIENT} differs")])
def test_the_report(other, difference, capsys):
    """The exit status, and the same in text and JSON."""
    attentions = [
        {"module": "blocks.0", "shape": "B=1", "mask": "causal", "schedule": "shift", "predicted_us": 1.5, "workspace_bytes": 64}
    ]
    runs = [run(**digests) | {"emulated": True, "attentions": attentions, "waits": 3} for digests in ({}, other)]
    assert demo.report(*runs, as_json=True) == demo.report(*runs, as_json=False) == (difference is not None)
    out, err = capsys.readouterr()
    report, end = json.JSONDecoder().raw_decode(out)
    assert report == {
        "identical": difference is None,
        "difference": difference,
        "tensors": 2,
        "waits": [3, 3],
        "emulated": True,
        "attentions": attentions,
    }
    assert "predicted us" in out[end:] and ("bitwise: identical (2 tensors" in out[end:]) == (difference is None)
    assert err == (f"bitwise: {difference}\n" if difference else "")
