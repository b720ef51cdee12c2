"""Tests that need a GPU: left out, and said so, where there is none."""

import os
from collections.abc import Iterator

import pytest
import torch
from lost_device import pytest_runtest_protocol  # noqa: F401 (a hook)

import dash_inductor
from dash_inductor.hooks import install

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # strict mode asks for it: the references multiply by cuBLAS


@pytest.fixture(autouse=True)
def rewriting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.use_deterministic_algorithms(True)
    monkeypatch.setattr(install, "OUTSIDE", ())  # references are eager
    with dash_inductor.enabled(on_unsupported="error"):
        yield
    torch.use_deterministic_algorithms(False)
