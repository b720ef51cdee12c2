"""What is said when a kernel is first used on a GPU, which is faked here; trials are in tests/emulated/test_first_use.py."""

from types import SimpleNamespace

import pytest
import torch
import triton

from dash_inductor.config import Config
from dash_inductor.first_use import verdict


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
    resolution = SimpleNamespace(settings=Config(guard="off"))
    for _ in range(2):
        assert verdict.require_fit(resolution, torch.device("cuda", 0)) is resolution
    assert len(caplog.messages) == said
    assert all("Triton 3.6.0 leaves out a fence on sm_90" in message for message in caplog.messages)


@pytest.mark.parametrize(("kernel", "remedy"), [("gluon", "; kernel='triton' takes another kernel"), ("triton", "")])
def test_a_kernel_that_fails_its_trial(monkeypatch, kernel, remedy):
    """Of Gluon's the error says that there is another."""
    failed = verdict.Verdict(fit=False, said="dq is 0.5 off")
    monkeypatch.setattr(verdict.target, "is_there", lambda device: True)
    monkeypatch.setattr(verdict, "kinds_of", lambda resolution: [SimpleNamespace(kernel=kernel)])
    monkeypatch.setattr(verdict, "settings_for", lambda kind, resolution: Config())
    monkeypatch.setattr(verdict, "_verdict", lambda *_: failed)
    resolution = SimpleNamespace(settings=Config(guard="always"))
    with pytest.raises(verdict.UnfitKernelError) as raised:
        verdict.require_fit(resolution, torch.device("cpu"))
    assert str(raised.value).endswith(f" failed its trial on this GPU: dq is 0.5 off{remedy}")
