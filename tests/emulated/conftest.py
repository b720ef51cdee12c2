"""Fixtures of the tests that run generated code in Triton's interpreter."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from attention import poison_uninitialised_memory
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

import dash_inductor
from dash_inductor import emulation


@pytest.fixture
def rewriting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Deterministic mode and the pass are on, nothing comes out of a cache, and uninitialised memory is full of NaN."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    poison_uninitialised_memory(monkeypatch)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors are small, and waking a second thread takes milliseconds on busy cores
    torch._dynamo.utils.counters.clear()
    emulation.clear_launches()
    torch.use_deterministic_algorithms(True)
    try:
        with (
            dash_inductor.enabled(),
            inductor_config.patch(fx_graph_cache=False),
            functorch_config.patch(enable_autograd_cache=False),
        ):
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
        torch._dynamo.reset()
