"""What is said when a kernel is first used on a GPU, which is faked here; trials are in tests/emulated/test_first_use.py."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import triton

from dash_inductor import templates
from dash_inductor.config import Config
from dash_inductor.devices.target import Target
from dash_inductor.first_use import verdict
from dash_inductor.first_use.kind import Kind
from dash_inductor.problem import Problem
from dash_inductor.resolve import resolve


@pytest.mark.parametrize(
    ("capability", "version", "kernel", "said"),
    [
        ((9, 0), "3.6.0", "triton", 1),
        ((9, 0), "3.6.0", "gluon", 0),
        ((9, 0), "3.7.1", "triton", 0),
        ((9, 0), "3.10.0", "triton", 0),
        ((8, 0), "3.6.0", "triton", 0),
        ((10, 0), "3.6.0", "triton", 0),
    ],
)
def test_a_hopper_whose_triton_leaves_out_a_fence(monkeypatch, caplog, capability, version, kernel, said):
    """Once a process, also where no kernel is tried."""
    monkeypatch.setattr(verdict, "kinds_of", lambda resolution: [SimpleNamespace(kernel=kernel)])
    verdict._say_if_a_fence_is_missing.cache_clear()
    monkeypatch.setattr(verdict.target, "is_there", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(triton, "__version__", version)
    resolution = SimpleNamespace(settings=Config(guard="off"), lacks_gluon=False)
    for _ in range(2):
        assert verdict.require_fit(resolution, torch.device("cuda", 0)) is resolution
    assert len(caplog.messages) == said
    assert all("Triton 3.6.0 leaves out a fence on sm_90" in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("version", "others", "settings", "said"),
    [
        ("3.10.0", {}, {}, 1),
        ("3.5.1", {}, {}, 1),
        ("3.9.1", {}, {}, 0),
        ("3.10.0", {"head_dim": 100}, {}, 0),  # which gets the Triton kernel by any
        ("3.10.0", {}, {"kernel": "triton"}, 0),
        ("3.10.0", {}, {"template": "two_pass"}, 0),
    ],
)
def test_a_triton_that_the_gluon_kernel_was_not_tested_with(monkeypatch, caplog, version, others, settings, said):
    """Once a process, since the bits are those of another kernel."""
    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setattr(verdict.target, "is_there", lambda device: True)
    monkeypatch.setattr(verdict, "kinds_of", lambda resolution: [])
    templates.gluon_is_tested.cache_clear()
    verdict._say_that_gluon_is_not_tested.cache_clear()
    problem = replace(Problem("causal", 2, 16, 16, 8192, 8192, 128, "bf16"), **others)
    try:
        found = resolve(problem, Config(guard="off", **settings), Target("h100", 90, 132))
        for _ in range(2):
            verdict.require_fit(found, torch.device("cuda", 0))
    finally:
        templates.gluon_is_tested.cache_clear()
    assert len(caplog.messages) == said
    text = f"Triton {version} is outside of 3.6 to 3.9, with which the Gluon kernel was tested: attention on this GPU takes"
    assert all(text in message for message in caplog.messages)


@pytest.mark.parametrize(("kernel", "remedy"), [("gluon", "; kernel='triton' takes another kernel"), ("triton", "")])
def test_a_kernel_that_fails_its_trial(monkeypatch, kernel, remedy):
    """Of Gluon's the error says that there is another."""
    failed = verdict.Verdict(fit=False, said="dq is 0.5 off")
    monkeypatch.setattr(verdict.target, "is_there", lambda device: True)
    kind = Kind("one_pass", kernel, "grouped", 90, "bf16", 64, 64, "causal", 128, 128)
    monkeypatch.setattr(verdict, "_verdict", lambda *_: failed)
    monkeypatch.setattr(verdict, "is_used", {})
    with pytest.raises(verdict.UnfitKernelError) as raised:
        verdict.require_fit_kinds([kind], torch.device("cpu"), Config(guard="always"))
    assert str(raised.value) == f"{kind} failed its trial on this GPU: dq is 0.5 off{remedy}"
    assert verdict.is_used == {kind: False}


def test_without_its_gluon_kernel_an_attention_takes_tritons(monkeypatch, caplog):
    """With one error in the log, unless that kernel was asked for."""

    def verdict_on(kind, *_):
        return verdict.Verdict(fit=kind.kernel == "triton", said="dq is 0.5 off")

    monkeypatch.setattr(verdict.target, "is_there", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(verdict, "_verdict", verdict_on)
    monkeypatch.setattr(verdict, "is_used", {})
    verdict._say_that_gluon_failed.cache_clear()
    problem, h100 = Problem("causal", 2, 16, 16, 8192, 8192, 128, "bf16"), Target("h100", 90, 132)
    asked = resolve(problem, Config(guard="always", kernel="gluon"), h100)
    with pytest.raises(verdict.UnfitKernelError, match="kernel='triton' takes another kernel"):
        verdict.require_fit(asked, torch.device("cuda", 0))
    found = resolve(problem, Config(guard="always"), h100)
    taken = [verdict.require_fit(found, torch.device("cuda", 0)) for _ in range(2)]
    assert found.kernel == "gluon" and taken == [resolve(replace(problem, gluon_fails=verdict.FAILED), found.settings, h100)] * 2
    assert taken[0].kernel == "triton"
    assert [kind.kernel for kind, used in verdict.is_used.items() if not used] == ["gluon"]
    (said,) = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert "head dim 128) on sm_90 failed its trial on this GPU: dq is 0.5 off" in said
