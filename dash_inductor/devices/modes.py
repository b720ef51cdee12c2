"""torch's modes and precisions that may decide bits."""

from __future__ import annotations

import operator
from typing import Any

import torch

OF_TORCH = (  # attributes of torch
    *("utils.deterministic.fill_uninitialized_memory", "backends.cudnn.deterministic", "backends.cudnn.benchmark"),
    *("backends.cudnn.allow_tf32", "backends.cuda.matmul.allow_tf32"),
    *("backends.cuda.matmul.allow_bf16_reduced_precision_reduction", "backends.cuda.matmul.allow_fp16_reduced_precision_reduction"),
)
SDPA_KERNELS = ("flash", "mem_efficient", "math", "cudnn")  # of attention, each of which may be switched off


def mode(name: str) -> Any:
    """One of OF_TORCH, or why it cannot be read."""
    try:
        return operator.attrgetter(name)(torch)
    except (AttributeError, RuntimeError) as error:  # torch refuses to say where old and new settings of TF32 are mixed
        return f"not readable: {error}"
