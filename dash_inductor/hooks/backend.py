"""`torch.compile(model, backend="dash")`: Inductor with the pass, whether or not it is switched on for everybody."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from typing import Any

import torch

# Before Dynamo traces, as plain torch.compile does: emulation starts with it, and lets FlexAttention train on the CPU.
import torch._inductor.compile_fx

from ..config import ready
from . import install


def dash(
    gm: torch.fx.GraphModule, example_inputs: list[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Any:
    """Compiles `gm` with Inductor; `mode` and `options` are those of torch.compile."""
    inductor = torch._TorchCompileInductorWrapper(mode, options, None)
    if not ready().enabled:
        _warn_off("DASH_INDUCTOR=0")
    elif not torch.are_deterministic_algorithms_enabled():
        _warn_off("torch.use_deterministic_algorithms is off")
    else:
        with _installed(), install.eager_backward():
            return inductor(gm, example_inputs)
    return inductor(gm, example_inputs)


def _reset() -> None:
    """What torch._dynamo.reset() does for the stock backend: drops recorded CUDA graphs."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is not None:
        trees.reset_cudagraph_trees()


dash.reset = _reset  # type: ignore[attr-defined]


@contextlib.contextmanager
def _installed() -> Any:
    """Pass and cache key are in Inductor while this graph is compiled."""
    install.install()
    try:
        yield
    finally:
        if not install.is_enabled():
            install.uninstall()


@functools.cache
def _warn_off(why: str) -> None:
    warnings.warn(f'{why}: backend="dash" is plain Inductor', stacklevel=2)
