"""The stock backwards of attention: SDPA's ops of ATen, FlexAttention's HOP."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..op import FLEX_BACKWARD, FlexArguments

aten = torch.ops.aten

FLASH = aten._scaled_dot_product_flash_attention_backward.default
FLASH_CPU = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
# Matched only to say why they stay.
UNSUPPORTED = {
    aten._scaled_dot_product_efficient_attention_backward.default: "the memory-efficient op (masks, fp32) is not rewritten",
    aten._scaled_dot_product_cudnn_attention_backward.default: (
        "the cuDNN op is not rewritten; torch.backends.cuda.enable_cudnn_sdp(False) makes SDPA take flash"
    ),
    aten._scaled_dot_product_fused_attention_overrideable_backward.default: "the op of another backend is not rewritten",
}
SDPA_TARGETS = [FLASH, FLASH_CPU, *UNSUPPORTED]
TARGETS = [*SDPA_TARGETS, FLEX_BACKWARD]


def arguments(node: fx.Node) -> dict[str, Any]:
    """The node's arguments by the names of its schema, defaults filled in."""
    if node.target is FLEX_BACKWARD:
        return FlexArguments(*node.args)._asdict()
    named = {}
    for index, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if not argument.kwarg_only and index < len(node.args):
            named[argument.name] = node.args[index]
        else:
            named[argument.name] = node.kwargs.get(argument.name, argument.default_value)
    return named
