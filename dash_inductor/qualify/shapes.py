"""What is timed: a sweep over mask, head dim and length, and the attentions of known models, some of them by FlexAttention."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

TOKENS = 16_384
HIDDEN = 2048
LENGTHS = (8192, 2048, 512, 32_768, 4096, 1024, 16_384)  # in the order of interest: a time limit cuts the end off
HEAD_DIMS = (128, 64, 256)
MASKS = ("causal", "full")


@dataclass(frozen=True)
class Shape:
    """One self-attention: query [batch, heads, length, head_dim], key and value with kv_heads.

    Attributes:
        mask: full or causal.
        window: a query sees the keys that are fewer tokens than this away, itself included.
        documents: the tokens of each document that a sequence is packed of; a query sees its own. The same in the whole batch.
        softcap: scores become softcap * tanh(score / softcap).
        alibi: head h adds 2^(-8 (h + 1) / heads) * (key - query) to its scores.
        dtype: bf16 or fp16.

    Raises:
        ValueError: for a mask or numbers of heads that make no attention.
    """

    name: str
    mask: str
    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int
    window: int | None = None
    documents: tuple[int, ...] = ()
    softcap: float | None = None
    alibi: bool = False
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        if self.mask not in MASKS:
            raise ValueError(f"mask={self.mask!r} is not one of {', '.join(MASKS)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} does not divide heads={self.heads}")

    @property
    def causal(self) -> bool:
        return self.mask == "causal"

    @property
    def masked(self) -> bool:
        """Whether more is hidden than the causal mask hides."""
        return self.window is not None or bool(self.documents)

    @property
    def flex(self) -> bool:
        """Whether FlexAttention alone has an efficient form of it."""
        return self.masked or self.softcap is not None or self.alibi

    @property
    def flop(self) -> int:
        """FLOP of the backward's five matmuls, 2.5 times the forward's two, for the pairs of query and key that see each other.

        Those of each document, less those that are a window or more apart; of a causal mask half, as is usual.
        """
        pairs = 0
        for length in self.documents or (self.length,):
            apart = 0 if self.window is None else max(0, length - self.window)
            pairs += length**2 - apart * (apart + 1)
        return 10 * self.batch * self.heads * pairs * self.head_dim // (2 if self.causal else 1)


def _swept(mask: str, head_dim: int, length: int) -> Shape:
    heads = HIDDEN // head_dim
    return Shape(f"d{head_dim}-{mask}-{length}", mask, max(1, TOKENS // length), heads, heads, length, head_dim)


SWEEP = tuple(_swept(mask, d, length) for d, mask, length in product(HEAD_DIMS, MASKS, LENGTHS))
# Heads, head dims, context lengths, windows and soft-caps from the models' published configurations.
MODELS = (
    Shape("llama3-8b", "causal", 2, 32, 8, 8192, 128),
    Shape("qwen2.5-7b", "causal", 4, 28, 4, 4096, 128),
    Shape("qwen2.5-7b-alone", "causal", 1, 28, 4, 2048, 128),  # one short sequence: fewer KV tiles than SMs
    Shape("mistral-7b-v0.3", "causal", 1, 32, 8, 32_768, 128),
    Shape("vit-h-14", "full", 64, 16, 16, 257, 80),
)
# Made up: many short ones and few long ones, at no multiple of a block.
DOCUMENTS = (1187, 402, 2951, 96, 731, 158, 1643, 287, 64, 673)
# Models with layers of two kinds have a shape for each; gpt-oss is without its attention sinks.
FLEX = (
    Shape("llama3-8b-packed", "causal", 2, 32, 8, 8192, 128, documents=DOCUMENTS),
    Shape("gemma2-27b-local", "causal", 2, 32, 16, 8192, 128, window=4096, softcap=50.0),
    Shape("gemma2-27b-global", "causal", 2, 32, 16, 8192, 128, softcap=50.0),
    Shape("mistral-7b-v0.1", "causal", 1, 32, 8, 32_768, 128, window=4096),
    Shape("gpt-oss-20b-local", "causal", 2, 64, 8, 8192, 64, window=128),
    Shape("modernbert-large-local", "full", 2, 16, 16, 8192, 64, window=65, documents=DOCUMENTS),
    Shape("modernbert-large-global", "full", 2, 16, 16, 8192, 64, documents=DOCUMENTS),
)


# What decides who gets which kernel (`dash_inductor/resolve/prices.py`), beside the causal ones of the sweep.
OF_A_KIND: dict[str, dict[str, Any]] = {
    "documents": {"documents": DOCUMENTS},
    "window": {"window": 1024},
    "soft-cap": {"softcap": 50.0},
    "alibi": {"alibi": True},
    "fp16": {"dtype": "fp16"},
}
KINDS = tuple(
    replace(_swept("causal", d, 8192), name=f"d{d}-{kind}-8192", **own) for d, (kind, own) in product((128, 64), OF_A_KIND.items())
)
# The first of the sweep is what the project is measured by, then the models, the kinds and the rest.
SHAPES = (SWEEP[0], *MODELS, *FLEX, *KINDS, *SWEEP[1:])
QUICK = tuple(
    s for s in SHAPES if s.name in {"d128-causal-8192", "d128-full-8192", "d64-causal-2048", "d64-full-2048", "llama3-8b"}
)
TUNED = "d128-causal-8192,d64-causal-8192,d128-full-2048,d64-full-2048,llama3-8b"
SIZES = "MASK:BxHxKxSxD"  # of a shape that is given by its sizes: batch, heads, kv heads, length, head dim


def shapes_called(names: str) -> list[Shape]:
    """The shapes of these names or patterns, separated by commas, in the order of SHAPES; then those that SIZES give.

    Raises:
        ValueError: one is called by no name, or has sizes that make no attention.

    >>> [shape.name for shape in shapes_called("full:2x8x4x512x64,llama3-8?")]
    ['llama3-8b', 'full:2x8x4x512x64']
    """
    asked = dict.fromkeys(names.split(","))
    sized = [_of_sizes(name) for name in asked if ":" in name]
    patterns = [name for name in asked if ":" not in name]
    named = matching("shape", patterns, [shape.name for shape in SHAPES], f", and sizes are given as {SIZES}")
    return [shape for shape in SHAPES if shape.name in named] + sized


def matching(what: str, patterns: Collection[str], names: Collection[str], hint: str = "") -> set[str]:
    """The names that match any of the patterns; ValueError for a pattern that none does."""
    found = set()
    for pattern in patterns:
        matches = set(fnmatch.filter(names, pattern))
        if not matches:
            raise ValueError(f"no {what} is called {pattern!r}; there are {', '.join(names)}{hint}")
        found |= matches
    return found


def _of_sizes(text: str) -> Shape:
    found = re.fullmatch(r"(\w+):([1-9]\d*)x([1-9]\d*)x([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text)
    if found is None:
        raise ValueError(f"{text!r} is not of the form {SIZES}, such as causal:2x32x8x8192x128")
    mask, *sizes = found.groups()
    batch, heads, kv_heads, length, head_dim = map(int, sizes)
    return Shape(text, mask, batch, heads, kv_heads, length, head_dim)
