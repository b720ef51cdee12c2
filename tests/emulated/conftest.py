"""Fixtures of the tests that run generated code in Triton's interpreter."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
from attention import poison_uninitialised_memory
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler

import dash_inductor
from dash_inductor import config, emulation
from dash_inductor.resolve import prices


def make_once(kind: type) -> None:
    """Objects of a class that has no state take their attributes from the first one."""
    make, made = kind.__init__, dict[str, Any]()

    def __init__(self: Any) -> None:
        if not made:
            make(self)
            made.update(vars(self))
        vars(self).update(made)

    kind.__init__ = __init__


make_once(DtypePropagationOpsHandler)  # Inductor makes one for each node of a graph, in 4 % of the time of these tests


@pytest.fixture
def deterministic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Deterministic mode is on; caches and counters are empty."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    emulation.clear_launches()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()


@pytest.fixture
def rewriting(deterministic: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The pass is on too, nothing comes out of a cache, and uninitialised memory is full of NaN."""
    poison_uninitialised_memory(monkeypatch)
    with dash_inductor.enabled(), inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        yield


@pytest.fixture
def as_installed(deterministic: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Under emulation, settings are the defaults, nothing is recorded, and caplog has what the package logs."""
    monkeypatch.setattr(config, "_current", config.Config())
    dash_inductor.clear_decisions()
    caplog.set_level(logging.DEBUG, "dash_inductor")
    with caplog.filtering(logging.Filter("dash_inductor")), emulation.emulate():
        yield
    dash_inductor.configure(**vars(config.Config()))  # whoever follows the settings forgets what the test has set


@pytest.fixture
def cheap_passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two passes cost so little that both templates are chosen on the emulated device."""

    def forget() -> None:
        prices._step_costs.cache_clear()
        prices.two_pass_costs.cache_clear()

    forget()
    with monkeypatch.context() as patch:
        patch.setattr("dash_inductor.devices.cost_files.two_pass_percent", lambda device, head_dim: (170, True))
        yield
    forget()
