"""The model of the demo, and of examples: a small GPT that attends by `F.scaled_dot_product_attention`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A layer of the transformer: causal attention, then an MLP, both residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, width] to [B, S, width]."""
        query, key, value = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Bytes, or other tokens, [batch, length] and those that follow them -> the mean cross entropy in nats."""

    def __init__(self, length: int, width: int, heads: int, layers: int, tokens: int = 256) -> None:
        super().__init__()
        self.bytes = nn.Embedding(tokens, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)

    def forward(self, x: Tensor, following: Tensor) -> Tensor:
        """The mean cross-entropy of the bytes `following` those of x, [B, S] each."""
        logits = self.head(self.norm(self.blocks(self.bytes(x) + self.positions)))
        return F.cross_entropy(logits.flatten(0, 1).float(), following.flatten())


def example() -> tuple[GPT, tuple[Tensor, Tensor]]:
    """A model of 12 heads and two layers in bf16 and a batch for it, to try `explain` on."""
    length = 2048
    tokens = torch.zeros(8, length + 1, dtype=torch.long)
    return GPT(length, width=768, heads=12, layers=2).bfloat16(), (tokens[:, :-1], tokens[:, 1:])
