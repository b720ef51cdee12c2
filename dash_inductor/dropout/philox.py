"""Philox 4x32, of Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011).

Words are int64 tensors below 2**32.
"""

from __future__ import annotations

from torch import Tensor

WORD = 0xFFFFFFFF
MULTIPLIERS, KEY_STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)


def philox(counter: tuple[Tensor, ...], key: tuple[int, int], rounds: int) -> tuple[Tensor, ...]:
    """Four words for each counter of four words."""
    a, b, c, d = counter
    for _ in range(rounds):
        (high_a, low_a), (high_c, low_c) = (_product(x, by) for x, by in zip((a, c), MULTIPLIERS, strict=True))
        a, b, c, d = high_c ^ b ^ key[0], low_c, high_a ^ d ^ key[1], low_a
        key = tuple((word + step) & WORD for word, step in zip(key, KEY_STEPS, strict=True))  # type: ignore[assignment]
    return a, b, c, d


def plus(offset: int, place: Tensor) -> tuple[Tensor, Tensor]:
    """Low and high word of offset + place, modulo 2**64."""
    low = (offset & WORD) + (place & WORD)
    return low & WORD, ((offset >> 32) + (place >> 32) + (low >> 32)) & WORD


def _product(x: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """High and low word. The product overflows into the sign, which the shift brings along and the mask takes off."""
    product = x * by
    return (product >> 32) & WORD, product & WORD
