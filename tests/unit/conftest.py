"""Fixtures of the tests that switch the package on and off.

How many examples hypothesis tries: HYPOTHESIS_PROFILE=nightly for thousands of random ones, else a hundred fixed ones.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("quick", max_examples=100, deadline=None, derandomize=True, database=None)
settings.register_profile("nightly", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


@pytest.fixture
def switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Deterministic mode is on and the package off; caches are empty, settings the defaults."""
    import torch

    import dash_inductor
    from dash_inductor import config
    from dash_inductor.hooks import install

    was_enabled = install.is_enabled()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(config, "_current", config.Config())
    dash_inductor.disable()
    torch._dynamo.reset()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    dash_inductor.disable()
    torch._dynamo.reset()
    if was_enabled:
        install.want()
