"""What is timed: a sweep over mask, head dim and length, and the attentions of known models."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

TOKENS = 16_384
HIDDEN = 2048
LENGTHS = (8192, 2048, 512, 32_768, 4096, 1024, 16_384)  # in the order of interest: a time limit cuts the end off
HEAD_DIMS = (128, 64, 256)
MASKS = ("causal", "full")


@dataclass(frozen=True)
class Shape:
    """One self-attention: query [batch, heads, length, head_dim], key and value with kv_heads, bf16."""

    name: str
    mask: str  # full or causal
    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.mask not in MASKS:
            raise ValueError(f"mask={self.mask!r} is not one of {', '.join(MASKS)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} does not divide heads={self.heads}")

    @property
    def causal(self) -> bool:
        return self.mask == "causal"

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def flop(self) -> int:
        """FLOP of the backward's five matmuls, 2.5 times the forward's two; of a causal mask half, as is usual."""
        return 10 * self.batch * self.heads * self.length**2 * self.head_dim // (2 if self.causal else 1)


def _swept(mask: str, head_dim: int, length: int) -> Shape:
    heads = HIDDEN // head_dim
    return Shape(f"d{head_dim}-{mask}-{length}", mask, max(1, TOKENS // length), heads, heads, length, head_dim)


SWEEP = tuple(_swept(mask, d, length) for d, mask, length in product(HEAD_DIMS, MASKS, LENGTHS))
# Heads, head dims and context lengths from the models' published configurations.
MODELS = (
    Shape("llama3-8b", "causal", 2, 32, 8, 8192, 128),
    Shape("qwen2.5-7b", "causal", 4, 28, 4, 4096, 128),
    Shape("qwen2.5-7b-alone", "causal", 1, 28, 4, 2048, 128),  # one short sequence: fewer KV tiles than SMs
    Shape("mistral-7b-v0.3", "causal", 1, 32, 8, 32_768, 128),
    Shape("vit-h-14", "full", 64, 16, 16, 257, 80),
)
# The first of the sweep is what the project is measured by, then the models, then the rest.
SHAPES = (SWEEP[0], *MODELS, *SWEEP[1:])
QUICK = tuple(
    s for s in SHAPES if s.name in {"d128-causal-8192", "d128-full-8192", "d64-causal-2048", "d64-full-2048", "llama3-8b"}
)
