"""Tile sizes: a function of (architecture, dtype, head dim) alone, because they decide bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
ONE_PASS_HEAD_DIM = 128  # the most that one pass takes
GLUON_HEAD_DIMS = (64, 128)
EMULATED = "emulated"
HALF_DTYPES = ("bf16", "fp16")
# How many matmuls of the next step (S, dP, dV) stand before the release of a step: 0, 1 or 3. To tune: it decides no bits.
RELEASE_AFTER = 0


class Template(str, Enum):
    """Which kernels an attention takes; `by_size` holds those of both, and its sizes decide between them at run time."""

    ONE_PASS = "one_pass"
    TWO_PASS = "two_pass"
    BY_SIZE = "by_size"

    def __str__(self) -> str:
        return self.value


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

    @property
    def kinds(self) -> int:
        """Of CTAs, each with a main loop."""
        return 1

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}x{self.block_d}"


@dataclass(frozen=True)
class TwoPassTile:
    """How the CTAs of two passes work. dK/dV: `kv_rows` keys stay, `block_m` query rows a step. dQ: `q_rows` query rows stay,
    `block_n` keys a step.

    So `block_m` and `block_n` are what the order of the sums depends on, as in `Tile`.
    """

    block_m: int
    block_n: int
    block_d: int
    kv_rows: int
    q_rows: int
    split: bool = False  # dK and dV have CTAs of their own, since registers do not hold both
    num_warps: int = 8
    num_stages: int = 3
    preprocess_warps: int = 4

    @property
    def kinds(self) -> int:
        """Of CTAs, each with a main loop."""
        return 3 if self.split else 2

    def sizes(self) -> dict[str, int]:
        """What their price depends on, by the names of the cost model."""
        own = ("block_m", "block_n", "kv_rows", "q_rows", "split")
        return {"head_dim": self.block_d, **{name: getattr(self, name) for name in own}}

    def __str__(self) -> str:
        return f"{self.block_m}x{self.kv_rows}x{self.block_d} and {self.q_rows}x{self.block_n}x{self.block_d}"


class EitherTile(NamedTuple):
    """Both tiles, where sizes decide which is taken."""

    one_pass: Tile
    two_pass: TwoPassTile

    def __str__(self) -> str:
        return f"{self.one_pass} or {self.two_pass}"


AnyTile = Tile | TwoPassTile | EitherTile


def rows_of(tile: AnyTile) -> Tile | TwoPassTile:
    """The tile by whose block_m the rows of delta and logsumexp are padded: of two, either, since it is the same in both."""
    return tile.one_pass if isinstance(tile, EitherTile) else tile


# (arch, largest padded head dim) -> tile. Three stages: with two, the loads of a step are issued at the end of the step before it,
# and waited for at once.
_TILES: dict[tuple[int | str, int], Tile] = {
    (80, 64): Tile(32, 128, 64, 8, 3, False, 2, 8, atomic_add=False),  # 64 rows spill, whatever else is changed
    (80, 128): Tile(64, 64, 128, 8, 3, False, 4, 8, atomic_add=False),
    (90, 64): Tile(64, 128, 64, 8, 3, False, 4, 32, atomic_add=True),
    (90, 128): Tile(64, 128, 128, 8, 3, True, 8, 64, atomic_add=True),
    (100, 64): Tile(64, 128, 64, 8, 3, False, 4, 32, atomic_add=True),
    (100, 128): Tile(64, 64, 128, 8, 3, False, 4, 32, atomic_add=True),
}
# The same for two passes: the largest tiles whose loops neither spill nor wait behind every matmul, ragged, causal and grouped.
_TWO_PASS_TILES: dict[tuple[int | str, int], TwoPassTile] = {
    (80, 64): TwoPassTile(32, 64, 64, kv_rows=128, q_rows=128),
    (80, 128): TwoPassTile(64, 32, 128, kv_rows=64, q_rows=128),
    (80, 256): TwoPassTile(32, 32, 256, kv_rows=64, q_rows=64, preprocess_warps=8),
    (90, 64): TwoPassTile(64, 64, 64, kv_rows=128, q_rows=128),
    (90, 128): TwoPassTile(64, 64, 128, kv_rows=128, q_rows=128),
    # With 64 keys both halves of eight warps compute the same S and dP; with 128 registers do not hold dK and dV together.
    (90, 256): TwoPassTile(32, 32, 256, kv_rows=128, q_rows=128, split=True, preprocess_warps=8),
    (100, 64): TwoPassTile(64, 64, 64, kv_rows=128, q_rows=128),
    (100, 128): TwoPassTile(64, 64, 128, kv_rows=128, q_rows=128),
    (100, 256): TwoPassTile(32, 32, 256, kv_rows=64, q_rows=64, preprocess_warps=8),
}
# Architectures with the matmuls, copies and additions of one that has tiles take those, if shared memory is large enough for them.
_TILES_OF = {80: 80, 86: 80, 87: 80, 89: 80, 90: 90, 100: 100, 103: 100}
_SMALL = {86, 89}  # a CTA has 99 KiB of shared memory there: no room for a head dim of 256, nor for three stages at 128


def padded(head_dim: int) -> int:
    """The next power of two: what a block of Triton can hold."""
    return max(MIN_HEAD_DIM, 1 << (head_dim - 1).bit_length())


def tile(arch: int | str, dtype: str, head_dim: int) -> Tile:
    """The tile of an architecture (80, 90, 100 or "emulated"), a dtype ("bf16", "fp16", "fp32") and a head dim.

    Raises:
        ValueError: with the reason, when there is none.
    """
    _check(arch, dtype, head_dim, ONE_PASS_HEAD_DIM)
    block_d = padded(head_dim)
    if arch == EMULATED:
        # Small tiles, so that short sequences have several KV tiles and a race test proves something.
        return Tile(16, 32, block_d, 4, 2, block_d == 128, 1, 16, atomic_add=True)
    entry = _TILES[tiles_of(arch), max(64, block_d)]
    if tiles_of(arch) == 80:
        block_d = max(32, block_d)  # with 16 columns an SM would hold two CTAs of some kernels and one of others
    return replace(entry, block_d=block_d, instr_n=min(entry.instr_n, block_d), num_stages=_stages(entry, arch, block_d))


def tiles_of(arch: int | str) -> int:
    """The architecture whose tiles an architecture takes, mostly its own; ValueError if there are none.

    >>> tiles_of(90), tiles_of(89)
    (90, 80)
    """
    if arch not in _TILES_OF:
        raise ValueError(f"no tile for sm_{arch} (there are tiles for {', '.join(f'sm_{a}' for a in _TILES_OF)})")
    return _TILES_OF[int(arch)]


def gluon_tile(arch: int | str, dtype: str, head_dim: int) -> Tile:
    """The tile of the Gluon kernel: twice as many rows of Q as one pass takes at head dim 64, which registers hold in two parts.

    Raises:
        ValueError: with the reason, when there is none.
    """
    if arch != 90:
        raise ValueError(f"the Gluon kernel is made for sm_90, not {arch if arch == EMULATED else f'sm_{arch}'}")
    if head_dim not in GLUON_HEAD_DIMS:
        raise ValueError(f"the Gluon kernel takes head dim {' or '.join(map(str, GLUON_HEAD_DIMS))}, not {head_dim}")
    block_m = 128 if head_dim == 64 else 64
    # dq is never transposed: block_m / 16 warps share its rows, the others its columns.
    return replace(
        tile(arch, dtype, head_dim), block_m=block_m, dq_transposed=False, warps_m=block_m // 16, instr_n=head_dim * block_m // 128
    )


def two_pass_tile(arch: int | str, dtype: str, head_dim: int) -> TwoPassTile:
    """The tile of two passes, as `tile`.

    Raises:
        ValueError: with the reason, when there is none.
    """
    _check(arch, dtype, head_dim, MAX_HEAD_DIM)
    block_d = padded(head_dim)
    if arch == EMULATED:
        # Nothing waits, but sums still have several terms.
        return TwoPassTile(16, 32, block_d, kv_rows=64, q_rows=32, split=block_d == 256, num_warps=4)
    if arch in _SMALL and block_d == 256:
        raise ValueError(f"no tile for head dim {head_dim} fits the shared memory of sm_{arch}")
    entry = _TWO_PASS_TILES[tiles_of(arch), max(64, block_d)]
    return replace(entry, block_d=block_d, num_stages=_stages(entry, arch, block_d))


def _stages(entry: Tile | TwoPassTile, arch: int | str, block_d: int) -> int:
    """Of a tile of the tables, on an architecture that takes it."""
    return 2 if arch in _SMALL and block_d == 128 else entry.num_stages


def _check(arch: int | str, dtype: str, head_dim: int, most: int) -> None:
    if not MIN_HEAD_DIM <= head_dim <= most:
        raise ValueError(f"head dim {head_dim} is outside {MIN_HEAD_DIM}..{most}")
    dtypes = (*HALF_DTYPES, "fp32") if arch == EMULATED else HALF_DTYPES
    if dtype not in dtypes:
        raise ValueError(f"dtype {dtype} is not one of {', '.join(dtypes)}")
    if arch != EMULATED:
        tiles_of(arch)
