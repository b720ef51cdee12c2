"""What is said when a kernel is first used on a GPU, which is faked here; trials are in tests/emulated/test_first_use.py."""

from types import SimpleNamespace

import pytest
import torch
import triton

from dash_inductor.config import Config
from dash_inductor.first_use import verdict


@pytest.mark.parametrize(
    ("capability", "version", "said"),
    [((9, 0), "3.6.0", 1), ((9, 0), "3.7.1", 0), ((9, 0), "3.10.0", 0), ((8, 0), "3.6.0", 0), ((10, 0), "3.6.0", 0)],
)
def test_a_hopper_whose_triton_leaves_out_a_fence(monkeypatch, caplog, capability, version, said):
    """Once a process, also where no kernel is tried."""
    verdict._say_if_a_fence_is_missing.cache_clear()
    monkeypatch.setattr(verdict.target, "is_there", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(triton, "__version__", version)
    resolution = SimpleNamespace(settings=Config(guard="off"))
    for _ in range(2):
        assert verdict.require_fit(resolution, torch.device("cuda", 0)) is resolution
    assert len(caplog.messages) == said
    assert all("Triton 3.6.0 leaves out a fence on sm_90" in message for message in caplog.messages)
