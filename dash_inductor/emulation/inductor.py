"""Patches of Inductor: Triton kernels for CPU tensors, an emulated SM count, and blocks that suit numpy."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import triton
from torch._inductor import config, utils
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._inductor.runtime.hints import HeuristicType

from .driver import EmulatedDriver
from .patches import Patches
from .session import ACTIVE, LOCK

POINTWISE_ELEMENTS = 4096
"""Elements of a pointwise block. Never more: Inductor drops the mask of an XBLOCK where 4096 divides the number of elements."""

REDUCTION_ROWS = 64
"""Rows (XBLOCK) of a reduction; R0_BLOCK stays, it decides the order of the sum."""


SETTINGS = {"cpu_backend": "triton", "compile_threads": 1}  # nothing is compiled: no pool of workers


def install_inductor(patches: Patches) -> None:
    """Sets all patches of Inductor."""
    patches.set(triton.runtime.driver, "_active", EmulatedDriver())
    _compile_alone(patches)
    patches.set(triton_helpers, "set_driver_to_cpu", lambda: None)
    patches.set(utils, "get_max_num_sms", lambda: ACTIVE[-1].emulation.sms)
    patches.set(GraphLowering, "is_unspec_arg", lambda *_: False)  # a tensor without dims is in memory, as those of a GPU
    _enlarge_blocks(patches)


def _compile_alone(patches: Patches) -> None:
    """One thread at a time, whichever it is, under our settings: torch 2.13 keeps Inductor's for each thread."""
    compile_fx = importlib.import_module("torch._inductor.compile_fx")
    for name in ("compile_fx", "_compile_fx_inner"):  # a graph; its forward, or its backward, which may come later
        patches.set(compile_fx, name, _alone(getattr(compile_fx, name)))


def _alone(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def run(*args: Any, **kwargs: Any) -> Any:
        with LOCK, config.patch(SETTINGS):
            return stock(*args, **kwargs)

    return run


def _enlarge_blocks(patches: Patches) -> None:
    """A program costs Python calls, however few its elements: let Inductor's own kernels have fewer and larger programs."""
    stock = triton_heuristics.cached_autotune

    def cached_autotune(
        size_hints: Any, configs: list[Any], triton_meta: Any, heuristic_type: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if size_hints and heuristic_type in _LIMITS:
            limit = _LIMITS[heuristic_type]
            for block in (c.kwargs for c in configs):
                if block.get("XBLOCK", 0) > 0 and "RSPLIT" not in block:
                    others = block.get("YBLOCK", 1) * block.get("ZBLOCK", 1)
                    rows = max(block["XBLOCK"], min(limit // others, size_hints["x"]))
                    # Under batch_invariant torch gives one row several times, which the interpreter does not let it store.
                    block["XBLOCK"] = 1 if size_hints["x"] == 1 else rows
        return stock(size_hints, configs, triton_meta, heuristic_type, *args, **kwargs)

    patches.set(triton_heuristics, "cached_autotune", cached_autotune)


_LIMITS = {
    HeuristicType.POINTWISE: POINTWISE_ELEMENTS,
    HeuristicType.PERSISTENT_REDUCTION: REDUCTION_ROWS,
    HeuristicType.REDUCTION: REDUCTION_ROWS,
}
