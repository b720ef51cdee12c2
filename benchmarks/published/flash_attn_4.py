"""Compiles the backward of flash-attn-4 for sm_90 without a GPU: `extract` starts it with the variables that keep the cubin."""

from __future__ import annotations

import site
import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

BATCH, LENGTH, HEADS = 2, 8192, 16


def main(packages: str, head_dim: int, mask: str) -> None:
    """Call the backward with tensors that have no memory: it compiles, and launches nothing."""
    site.addsitedir(packages)  # CuTe DSL's lies behind a .pth file
    torch.cuda.current_device = lambda: 0  # type: ignore[assignment]
    from flash_attn.cute.interface import _flash_attn_bwd  # type: ignore[import-not-found]

    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
        return torch.empty(*shape, dtype=dtype, device="cuda")

    with FakeTensorMode():
        tensors = [tensor(BATCH, LENGTH, HEADS, head_dim) for _ in range(5)]
        lse = tensor(BATCH, HEADS, LENGTH, dtype=torch.float32)
        _flash_attn_bwd(*tensors, lse, causal=mask == "causal")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
