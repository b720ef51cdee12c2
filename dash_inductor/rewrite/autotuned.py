"""Which kernels of a FlexAttention Inductor chooses by timing, so that bits may differ from run to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx
from torch._inductor import config as inductor_config

from ..op import FlexArguments
from .nodes import module_of
from .score_function import operations

FORWARD = "BLOCK_M", "BLOCK_N", "num_warps", "num_stages"
BACKWARD = "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2", "num_warps", "num_stages"


def chosen_by_timing(node: fx.Node, *, rewritten: bool) -> str | None:
    """Which kernels Inductor chooses by timing: "forward", "backward" or "forward and backward"; None where neither is.

    node: a backward of FlexAttention.

    Under max_autotune the lowerings in torch's _inductor/kernel/flex offer several kernels, unless kernel_options give their tiles,
    warps and stages. `AlgorithmSelectorCache` in torch's inductor takes the first one where
    `torch._inductor.config.deterministic` is on, and else the fastest. BACKEND="FLASH" has several for a score_mod alone, and one
    backward.
    """
    if not inductor_config.max_autotune or inductor_config.deterministic:
        return None
    arguments = FlexArguments(*node.args)
    options = arguments.kernel_options
    if options.get("BACKEND") == "FLASH":
        return "forward" if operations(module_of(node, arguments.score_mod)) else None
    forward, backward = not _are_given(options, "fwd_", FORWARD), not rewritten and not _are_given(options, "bwd_", BACKWARD)
    return " and ".join(["forward"] * forward + ["backward"] * backward) or None


def _are_given(options: Mapping[str, Any], prefix: str, names: Sequence[str]) -> bool:
    return all(name in options or prefix + name in options for name in names)
