"""Tile sizes: a function of (architecture, dtype, head dim) alone, because they decide bits (kernel.md section 2)."""

from __future__ import annotations

from dataclasses import dataclass, replace

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 128
EMULATED = "emulated"
HALF_DTYPES = ("bf16", "fp16")


@dataclass(frozen=True)
class Tile:
    """How one CTA works: Q tiles of `block_m` rows, a KV tile of `block_n` rows, head dim padded to `block_d`.

    `warps_m` and `instr_n` describe the accumulator of the dq matmul (warpsPerCTA[0] and instrShape[1] of its layout): its
    values are added in the order in which registers hold them. Other numbers stay correct and only cost shuffles.
    """

    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int
    dq_transposed: bool  # dq^T = k^T ds^T instead of dq = ds k
    warps_m: int
    instr_n: int
    atomic_add: bool  # vector RED; else load, add, store
    ctas_per_sm: int = 1
    preprocess_warps: int = 4


# (arch, largest padded head dim) -> tile. sm_90: kernel.md section 2, the columns of its first table. sm_80 and sm_100: its
# paragraph "Others".
_TILES: dict[tuple[int | str, int], Tile] = {
    (80, 64): Tile(32, 128, 64, 8, 2, False, 2, 8, atomic_add=False),  # 64 rows spill, whatever else is changed
    (80, 128): Tile(64, 64, 128, 8, 2, False, 4, 8, atomic_add=False),
    (90, 64): Tile(64, 128, 64, 8, 2, False, 4, 32, atomic_add=True),
    (90, 128): Tile(64, 128, 128, 8, 2, True, 8, 64, atomic_add=True),
    (100, 64): Tile(64, 128, 64, 8, 2, False, 4, 32, atomic_add=True),
    (100, 128): Tile(64, 64, 128, 8, 2, False, 4, 32, atomic_add=True),
}


def padded(head_dim: int) -> int:
    """The next power of two: what a block of Triton can hold."""
    return max(MIN_HEAD_DIM, 1 << (head_dim - 1).bit_length())


def tile(arch: int | str, dtype: str, head_dim: int) -> Tile:
    """The tile of an architecture (80, 90, 100 or "emulated"), a dtype ("bf16", "fp16", "fp32") and a head dim.

    Raises:
        ValueError: with the reason, when there is none.
    """
    if not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head dim {head_dim} is outside {MIN_HEAD_DIM}..{MAX_HEAD_DIM}")
    block_d = padded(head_dim)
    if arch == EMULATED:
        # Small tiles, so that short sequences have several KV tiles and a race test proves something (architecture.md).
        if dtype not in (*HALF_DTYPES, "fp32"):
            raise ValueError(f"dtype {dtype} is not one of bf16, fp16, fp32")
        return Tile(16, 32, block_d, 4, 2, block_d == 128, 1, 16, atomic_add=True)
    if dtype not in HALF_DTYPES:
        raise ValueError(f"dtype {dtype} is not one of {', '.join(HALF_DTYPES)}")
    widest = max(64, block_d)
    if (arch, widest) not in _TILES:
        known = ", ".join(f"sm_{a}" for a in sorted({a for a, _ in _TILES}))
        raise ValueError(f"no tile for sm_{arch} (there are tiles for {known})")
    found = _TILES[arch, widest]
    return replace(found, block_d=block_d, instr_n=min(found.instr_n, block_d))
