"""Which elements of the scores a stock forward drops: a function of their place, the seed and the offset, in plain torch.

Both forwards draw from Philox (philox.py), at a counter that neither their tiles nor their threads decide. Sources:
pytorch/pytorch, mem_eff_attention/kernel_forward.h and kernel_backward.h; Dao-AILab/flash-attention, csrc/flash_attn/src/dropout.h
and philox.cuh. `is_kept` in templates/functions.py.jinja is the same.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .philox import WORD, philox, plus

EFFICIENT, FLASH = "efficient", "flash"
ROUNDS = {EFFICIENT: 10, FLASH: 7}
MOST_SCORES = 2**31  # of a whole batch: the memory-efficient kernels count them in 32 bits, and its backward has a sign
# What it costs, in operations of a function of scores: by the replay of one pass for an H100, compiled by Triton 3.7.1, 90 to 144
# of EFFICIENT and 29 to 38 of FLASH, of whose elements those of a thread share a Philox.
OPERATIONS = {EFFICIENT: 115, FLASH: 33}
# What the bits for the Gluon kernel cost, in cycles of an SM for 64 x 128 elements: an estimate by the instructions of the kernel
# that makes them, as Triton 3.7.1 compiles it for an H100. Of EFFICIENT it is up to twice as much where the length of keys is no
# multiple of 4.
BITS_CYCLES = {EFFICIENT: 1290, FLASH: 460}


@dataclass(frozen=True)
class Dropout:
    """p: the probability of a drop, more than 0 and less than 1. generator: whose bits, EFFICIENT or FLASH."""

    p: float
    generator: str

    @property
    def threshold(self) -> int:
        """The least word that EFFICIENT keeps, or the largest byte that FLASH keeps."""
        p = torch.tensor(self.p, dtype=torch.float32)
        if self.generator == FLASH:
            return math.floor((1 - p).item() * 255)
        return bisect.bisect_left(range(WORD + 1), True, key=lambda word: _uniform(word) > p.item())

    @property
    def bits_cycles(self) -> int:
        """What its bits cost (BITS_CYCLES)."""
        return BITS_CYCLES[self.generator]

    def scale(self, dtype: torch.dtype) -> float:
        """What is kept is multiplied with: by the memory-efficient kernels in the dtype of the tensors."""
        p = torch.tensor(self.p, dtype=torch.float32)
        return (1 / (1 - p)).item() if self.generator == FLASH else (1 / (1 - p.double())).float().to(dtype).item()


def kept(dropout: Dropout, state: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """Whether elements of the scores [B, H, S_q, S_k] are kept. state: seed and offset, int64 [2], read as unsigned. Places behind
    2**64, which no generator's offset comes near, are taken modulo 2**64."""
    seed, offset = (int(x) % 2**64 for x in state.tolist())
    batch, heads, q_len, kv_len = shape
    head, m, n = torch.arange(batch * heads)[:, None, None], torch.arange(q_len)[:, None], torch.arange(kv_len)
    of = _flash if dropout.generator == FLASH else _efficient
    return of(dropout.threshold, (seed & WORD, seed >> 32), offset, head, m, n, (q_len, kv_len)).view(shape)


def _efficient(
    threshold: int, key: tuple[int, int], offset: int, head: Tensor, m: Tensor, n: Tensor, lengths: tuple[int, int]
) -> Tensor:
    """curand's: of one sequence of words, that at the offset and the element's index."""
    q_len, kv_len = lengths
    low, high = plus(offset, (head * q_len + m) * kv_len + n)
    counter = (low >> 2) | ((high & 3) << 30), high >> 2
    zeros = torch.zeros_like(low)
    words = philox((*counter, zeros, zeros), key, ROUNDS[EFFICIENT])
    return _chosen(words, low & 3) >= threshold


def _flash(
    threshold: int, key: tuple[int, int], offset: int, head: Tensor, m: Tensor, n: Tensor, lengths: tuple[int, int]
) -> Tensor:
    """16 bytes for each lane of a warp in each 16 rows and 32 columns."""
    low, high = plus(offset, head * 32 + m % 8 * 4 + n % 8 // 2)
    words = philox((low, high, m // 16 + 0 * n, n // 32 + 0 * m), key, ROUNDS[FLASH])
    byte = n % 32 // 16 * 8 + n % 16 // 8 * 4 + m % 16 // 8 * 2 + n % 2
    return (_chosen(words, byte // 4) >> (byte % 4 * 8)) & 255 <= threshold


def _chosen(words: tuple[Tensor, ...], index: Tensor) -> Tensor:
    index, *words = torch.broadcast_tensors(index, *words)
    return torch.stack(words).gather(0, index[None])[0]


def _uniform(word: int) -> float:
    """curand_uniform, in (0, 1]."""
    return (torch.tensor(word, dtype=torch.int64).float() * 2.0**-32 + 2.0**-33).item()
