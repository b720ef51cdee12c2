"""Which elements of the scores a stock forward drops: a function of their place, the seed and the offset, in plain torch.

Both forwards draw from Philox (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3; SC 2011), at a counter that neither
their tiles nor their threads decide. Sources: pytorch/pytorch, mem_eff_attention/kernel_forward.h and kernel_backward.h;
Dao-AILab/flash-attention, csrc/flash_attn/src/dropout.h and philox.cuh. `is_kept` in templates/functions.py.jinja is the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

EFFICIENT, FLASH = "efficient", "flash"
ROUNDS = {EFFICIENT: 10, FLASH: 7}
MOST_SCORES = 2**31  # of a whole batch: the memory-efficient kernels count them in 32 bits, and its backward has a sign
# Integer operations for an element, of the kernels' own code: 2 products and 2 exclusive ors a round, and its place.
OPERATIONS = {EFFICIENT: 50, FLASH: 45}
WORD = 0xFFFFFFFF
MULTIPLIERS, KEY_STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)


@dataclass(frozen=True)
class Dropout:
    """p: the probability of a drop, more than 0 and less than 1. generator: whose bits, EFFICIENT or FLASH."""

    p: float
    generator: str

    @property
    def threshold(self) -> int:
        """Of EFFICIENT the least word that is kept; of FLASH the largest byte that is."""
        if self.generator == FLASH:
            keep = 1 - torch.tensor(self.p, dtype=torch.float32)
            return math.floor(keep.item() * 255)
        least, most = 0, WORD + 1
        while least < most:
            middle = (least + most) // 2
            if _uniform(middle) > _in_fp32(self.p):
                most = middle
            else:
                least = middle + 1
        return least

    def scale(self, dtype: torch.dtype) -> float:
        """What is kept is multiplied with: by the memory-efficient kernels in the dtype of the tensors."""
        if self.generator == FLASH:
            return (1 / (1 - torch.tensor(self.p, dtype=torch.float32))).item()
        return torch.tensor(1 / (1 - _in_fp32(self.p)), dtype=torch.float32).to(dtype).item()


def kept(dropout: Dropout, state: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """Whether elements of the scores [B, H, S_q, S_k] are kept. state: seed and offset, int64 [2], read as unsigned."""
    seed, offset = (int(x) % 2**64 for x in state.tolist())
    batch, heads, q_len, kv_len = shape
    head, m, n = torch.arange(batch * heads)[:, None, None], torch.arange(q_len)[:, None], torch.arange(kv_len)
    of = _flash if dropout.generator == FLASH else _efficient
    return of(dropout.threshold, (seed & WORD, seed >> 32), offset, head, m, n, (q_len, kv_len)).view(shape)


def philox(counter: tuple[Tensor, ...], key: tuple[int, int], rounds: int) -> tuple[Tensor, ...]:
    """Philox 4x32: four words for each counter of four words, int64 tensors with values below 2**32."""
    a, b, c, d = counter
    for _ in range(rounds):
        (high_a, low_a), (high_c, low_c) = (_product(x, by) for x, by in zip((a, c), MULTIPLIERS, strict=True))
        a, b, c, d = high_c ^ b ^ key[0], low_c, high_a ^ d ^ key[1], low_a
        key = tuple((word + step) & WORD for word, step in zip(key, KEY_STEPS, strict=True))  # type: ignore[assignment]
    return a, b, c, d


def _efficient(
    threshold: int, key: tuple[int, int], offset: int, head: Tensor, m: Tensor, n: Tensor, lengths: tuple[int, int]
) -> Tensor:
    """curand's: of one sequence of words, that at the offset and the element's index."""
    q_len, kv_len = lengths
    low, high = _sum(offset, (head * q_len + m) * kv_len + n)
    counter = (low >> 2) | ((high & 3) << 30), high >> 2
    words = philox((*counter, *_zeros(low, 2)), key, ROUNDS[EFFICIENT])
    return _chosen(words, low & 3) >= threshold


def _flash(
    threshold: int, key: tuple[int, int], offset: int, head: Tensor, m: Tensor, n: Tensor, lengths: tuple[int, int]
) -> Tensor:
    """16 bytes for each lane of a warp in each 16 rows and 32 columns."""
    low, high = _sum(offset, head * 32 + m % 8 * 4 + n % 8 // 2)
    words = philox((low, high, m // 16 + 0 * n, n // 32 + 0 * m), key, ROUNDS[FLASH])
    byte = n % 32 // 16 * 8 + n % 16 // 8 * 4 + m % 16 // 8 * 2 + n % 2
    return (_chosen(words, byte // 4) >> (byte % 4 * 8)) & 255 <= threshold


def _product(x: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """High and low word. The product overflows into the sign, which the shift brings along and the mask takes off."""
    product = x * by
    return (product >> 32) & WORD, product & WORD


def _sum(offset: int, place: Tensor) -> tuple[Tensor, Tensor]:
    """Low and high word of offset + place, modulo 2**64."""
    low = (offset & WORD) + (place & WORD)
    return low & WORD, ((offset >> 32) + (place >> 32) + (low >> 32)) & WORD


def _chosen(words: tuple[Tensor, ...], index: Tensor) -> Tensor:
    index, *words = torch.broadcast_tensors(index, *words)
    return torch.stack(words).gather(0, index[None])[0]


def _zeros(like: Tensor, count: int) -> list[Tensor]:
    return [torch.zeros_like(like)] * count


def _in_fp32(x: float) -> float:
    return torch.tensor(x, dtype=torch.float32).item()


def _uniform(word: int) -> float:
    """curand_uniform, in (0, 1]."""
    return (torch.tensor(word, dtype=torch.int64).float() * 2.0**-32 + 2.0**-33).item()
