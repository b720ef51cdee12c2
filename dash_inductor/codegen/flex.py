"""A FlexAttention for a GPU that is not there: its functions, its tensors and its mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import create_fw_bw_graph
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import BlockMask

from ..problem import DTYPES
from .mods import MASK_MODS, SCORE_MODS

TORCH_DTYPES = {ours: getattr(torch, name.removeprefix("torch.")) for name, ours in DTYPES.items()}
OPTIONS = {"BACKEND": "AUTO", "PRESCALE_QK": False, "ROWS_GUARANTEED_SAFE": False, "BLOCKS_ARE_CONTIGUOUS": False}
OPTIONS |= {"WRITE_DQ": True, "OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": False}


@dataclass(frozen=True)
class FlexAttention:
    """A FlexAttention of [B, H, S, D] views of [B, S, H, D] tensors."""

    length: int
    heads: int
    kv_heads: int
    head_dim: int
    score_mod: str = "none"  # of SCORE_MODS
    mask_mod: str = "causal"  # of MASK_MODS; "none": no BlockMask
    batch: int = 1
    block: int = 128  # rows and columns of a block of the BlockMask
    mask_heads: int = 1  # that have lists of blocks; 1: all have the same
    dtype: str = "bf16"
    kernel_options: Mapping[str, object] | None = None
    trained: bool = False  # whether ALiBi's slopes have a gradient
    value_dim: int | None = None  # None: head_dim

    @property
    def dim_of_value(self) -> int:
        """`value_dim`, where it is head_dim too."""
        return self.head_dim if self.value_dim is None else self.value_dim

    def functions(self) -> tuple[Any, Any]:
        """The graphs of score_mod and of its gradient."""
        score = torch.zeros((), dtype=TORCH_DTYPES[self.dtype], requires_grad=True)
        indices: Any = [torch.zeros((), dtype=torch.int32) for _ in range(4)]
        slopes = torch.zeros(self.heads, requires_grad=self.trained)
        # On the CPU, since autograd cannot run on fake CUDA tensors; with Inductor's decompositions, as a joint graph has it.
        forward, joint = create_fw_bw_graph(SCORE_MODS[self.score_mod], (score, *indices), (slopes,))
        joint = make_fx(joint, decomposition_table=select_decomp_table())(score.detach(), *indices, score.detach(), slopes)
        return forward, joint

    def tensors(self) -> list[Tensor]:
        """Query, key, value, gradient, output, logsumexp, slopes, documents, and the lists of the BlockMask."""
        query, key, value = (self.heads, self.head_dim), (self.kv_heads, self.head_dim), (self.kv_heads, self.dim_of_value)
        rows = [query, key, value, *[(self.heads, self.dim_of_value)] * 2]
        blocks = -(-self.length // self.block)
        ints = [(self.length,), *[(1, self.mask_heads, blocks), (1, self.mask_heads, blocks, blocks)] * 4]
        return [
            *(_empty(self.batch, self.length, *row, dtype=TORCH_DTYPES[self.dtype]).transpose(1, 2) for row in rows),
            *(_empty(*size) for size in ((self.batch, self.heads, self.length), (self.heads,))),
            *(_empty(*size, dtype=torch.int32) for size in ints),
        ]

    def mask(self, lists: Sequence[Tensor | None]) -> BlockMask:
        """The BlockMask of these lists."""
        block = self.block
        if self.mask_mod == "none":  # as torch makes one, which it cannot of fake CUDA tensors
            num, indices = (torch.full((1,) * dims, dims == 3, dtype=torch.int32, device="cuda") for dims in (3, 4))
            lists, block = (num, indices, None, None) * 2, 1 << 30
        parts: list[Any] = [(self.length, self.length), *lists, (block, block), MASK_MODS[self.mask_mod]]
        return BlockMask(*parts)


def _empty(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(size, dtype=dtype, device="cuda")
