"""`torch.compile(model, backend="dash")`: Inductor with the pass, whether or not it is switched on for everybody."""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import Any

import torch

from . import install
from .config import current


def dash(gm: torch.fx.GraphModule, example_inputs: list[Any], *, mode: str | None = None, options: dict[str, Any] | None = None) -> Any:
    """Compiles `gm` with Inductor; `mode` and `options` are those of torch.compile."""
    inductor = torch._TorchCompileInductorWrapper(mode, options, None)
    if not current().enabled:
        _warn_off()
        return inductor(gm, example_inputs)
    with _installed():
        return inductor(gm, example_inputs)


@contextlib.contextmanager
def _installed() -> Any:
    """The pass is in Inductor while this graph is compiled. The salt stays: the backward is compiled later."""
    install.install()
    try:
        yield
    finally:
        if not install.is_enabled():
            install.remove_pass()


@functools.cache
def _warn_off() -> None:
    warnings.warn('DASH_INDUCTOR=0: backend="dash" is plain Inductor', stacklevel=2)
