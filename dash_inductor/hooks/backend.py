"""`torch.compile(model, backend="dash")`: Inductor with the pass, whether or not it is switched on for everybody."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch

# Before Dynamo traces, as plain torch.compile does: emulation starts with it, and lets FlexAttention train on the CPU.
import torch._inductor.compile_fx
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

from ..import_hook import require_triton

try:
    from .failures import compile_graph
    from .hook import PATCHES
    from .install import eager_backward, forget_limit, is_enabled, watch_limit
    from .joint_pass import PASS, ready
    from .table import COMPILATION
    from .told import tell_off
except ImportError:
    require_triton()
    raise

CUSTOM = "joint_custom_post_pass"
_asked: ContextVar[bool] = ContextVar("asked", default=False)  # whether this thread compiles with the pass


def dash(
    gm: torch.fx.GraphModule, example_inputs: list[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Any:
    """Compiles `gm` with Inductor; `mode` and `options` are those of torch.compile."""
    if not ready().enabled:
        tell_off()
        _warn_off("DASH_INDUCTOR=0")
    elif not torch.are_deterministic_algorithms_enabled():
        _warn_off("torch.use_deterministic_algorithms is off")
    elif is_enabled():
        with eager_backward():
            return torch._TorchCompileInductorWrapper(mode, options, None)(gm, example_inputs)
    else:
        options = dict(options or {})
        of_user = options.pop(CUSTOM, getattr(inductor_config, CUSTOM))
        inductor = torch._TorchCompileInductorWrapper(mode, options, None)
        watch_limit()
        with in_this_thread(of_user), eager_backward():
            return compile_graph(inductor, gm, example_inputs)
    return torch._TorchCompileInductorWrapper(mode, options, None)(gm, example_inputs)


def _reset() -> None:
    """What torch._dynamo.reset() does for the stock backend: drops recorded CUDA graphs. Frames are compiled anew."""
    forget_limit()
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is not None:
        trees.reset_cudagraph_trees()


dash.reset = _reset  # type: ignore[attr-defined]


class Chain(CustomGraphPass):
    """Passes one after the other, as one: torch 2.11 takes no more. Ours acts in the thread that asked for it, whose setting torch
    2.11 gives to every thread."""

    def __init__(self, passes: tuple[Any, ...]) -> None:
        self._passes = passes

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Runs them all."""
        for each in self._passes:
            if each is not PASS or _asked.get():
                each(graph)

    def uuid(self) -> Any:
        """Theirs; None, which keeps graphs out of caches, where one has none."""
        uuids = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in self._passes]
        return None if None in uuids else tuple(uuids)


@contextlib.contextmanager
def in_this_thread(of_user: Any) -> Iterator[None]:
    """Inside, what this thread compiles gets the pass, and then the user's own: none, one, or since torch 2.13 a list or tuple."""
    passes = of_user if isinstance(of_user, (list, tuple)) else [] if of_user is None else [of_user]
    PATCHES.ask(*COMPILATION)
    token = _asked.set(True)
    try:
        with inductor_config.patch({CUSTOM: Chain((PASS, *passes))}):
            yield
    finally:
        _asked.reset(token)
        PATCHES.leave()


@functools.cache
def _warn_off(why: str) -> None:
    warnings.warn(f'{why}: backend="dash" is plain Inductor', stacklevel=2)
