"""Tile sizes: a function of (architecture, dtype, head dims, small or not) alone, because they decide bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple, TypeVar

MAX_HEAD_DIM = 256
LEAST_BLOCK_D = 16  # columns that a matmul takes
ONE_PASS_HEAD_DIM = 128  # the most that one pass takes
GLUON_HEAD_DIMS = (64, 128, 256)  # columns of the Gluon kernel's tiles; other head dims are padded to these
GLUON_DIMS = "a multiple of 8, from 16 to 256"  # that TMA loads: its rows are whole 16 bytes
GLUON_CONSUMERS = 8  # warps of the Gluon kernel that multiply; others load, poll and release
GLUON_PARTITIONS = 4  # of a CTA, each of which walks the table by itself; `gluon_partitions` has one more
EMULATED = "emulated"
HALF_DTYPES = ("bf16", "fp16")
# What a user can change where there is no tile.
NVIDIA = "use an NVIDIA GPU of compute capability 8.0 to 10.3, or 12.0"
DEFAULTS = "leave the settings template, schedule and kernel at their defaults"
HEAD_DIMS = "use heads of 1 to 256 columns, the same of query and key"
HALF = "compute attention in bf16 or fp16, for instance under torch.autocast"
# How many matmuls of the next step (S, dP, dV) stand before the release of a step: 0, 1 or 3. To tune: it decides no bits.
RELEASE_AFTER = 0


class Template(str, Enum):
    """Which kernels an attention takes; `by_size` holds those of both, and its sizes decide between them at run time."""

    ONE_PASS = "one_pass"
    TWO_PASS = "two_pass"
    BY_SIZE = "by_size"

    def __str__(self) -> str:
        return self.value


class Digit(NamedTuple):
    """One digit of an index of elements, in a mixed radix: `position // one % many`."""

    axis: int  # position: 0 the row, 1 the column
    one: int
    many: int


@dataclass(frozen=True)
class Fragments:
    """The accumulator of wgmma and mma.sync, which warps hold in 16 x 8 fragments: `warps_m` is warpsPerCTA[0] of Triton's layout,
    `instr_n` its instrShape[1]. Its columns may come in several accumulators, one after the other: `parts`.

    by_rows: the four of a thread that lie side by side are of one row, in two fragments, so that 64 bytes are of one row too. What
    reads eight rows then reads whole sectors. A thread moves registers for it.
    """

    warps_m: int
    instr_n: int
    parts: int = 1
    by_rows: bool = False

    def digits(self, rows: int, columns: int) -> tuple[Digit, ...]:
        """Row: tile, warp, half, lane / 4. Column: part, instruction, 8-column blocks, lane % 4, pair."""
        if self.parts > 1:
            columns //= self.parts
            return (Digit(1, columns, self.parts), *replace(self, parts=1).digits(rows, columns))
        half, blocks = Digit(0, 8, 2), Digit(1, 8, 2)
        return (
            Digit(0, 16 * self.warps_m, rows // (16 * self.warps_m)),
            *((Digit(1, 16, self.instr_n // 16), half) if self.by_rows else (Digit(1, 8, self.instr_n // 8),)),
            Digit(1, self.instr_n, columns // self.instr_n),
            Digit(0, 16, self.warps_m),
            Digit(0, 1, 8),
            Digit(1, 2, 4),
            blocks if self.by_rows else half,
            Digit(1, 1, 2),
        )


@dataclass(frozen=True)
class TensorMemory:
    """The accumulator of tcgen05 with M = 64, as eight warps load it from tensor memory: a thread holds a quarter of a row."""

    def digits(self, rows: int, columns: int) -> tuple[Digit, ...]:
        """Row: warp % 4, lane % 16. Column: half, warp / 4; quarter, lane / 16; four columns."""
        return (
            Digit(1, 4, columns // 16),
            Digit(1, columns // 2, 2),
            Digit(0, 16, rows // 16),
            Digit(1, columns // 4, 2),
            Digit(0, 1, 16),
            Digit(1, 1, 4),
        )


@dataclass(frozen=True)
class Tile:
    """How one CTA works: Q tiles of `block_m` rows, a KV tile of `block_n` rows, head dims padded to `block_d`, of value to
    `block_dv`; `tile` sets those two.

    `accumulator` describes that of the dq matmul: its values are added in the order in which registers hold them. Another order
    stays correct and only costs shuffles.
    """

    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int
    dq_transposed: bool  # dq^T = k^T ds^T instead of dq = ds k
    accumulator: Fragments | TensorMemory
    atomic_add: bool  # vector RED; else load, add, store
    ctas_per_sm: int = 1
    preprocess_warps: int = 4
    block_dv: int = 0
    kinds = 1  # of CTAs, each with a main loop of its own

    @property
    def largest(self) -> tuple[int, int]:
        """Rows of Q and keys that are worked on together."""
        return self.block_m, self.block_n

    @property
    def dq_digits(self) -> tuple[Digit, ...]:
        """Those of the index at which an element of a dq tile is kept, slowest first: four of a thread lie side by side."""
        rows, columns = (self.block_d, self.block_m) if self.dq_transposed else (self.block_m, self.block_d)
        return self.accumulator.digits(rows, columns)

    @property
    def mean_dim(self) -> int:
        """Cost-weighted mean: 3 matmuls use block_d, 2 use block_dv."""
        return (3 * self.block_d + 2 * self.block_dv) // 5

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}x{dims_text(self.block_d, self.block_dv)}"


@dataclass(frozen=True)
class TwoPassTile:
    """How the CTAs of two passes work. dK/dV: `kv_rows` keys stay, `block_m` query rows a step. dQ: `q_rows` query rows stay,
    `block_n` keys a step.

    So `block_m` and `block_n` are what the order of the sums depends on, as in `Tile`; `two_pass_tile` sets block_d and block_dv.
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
    block_dv: int = 0

    @property
    def kinds(self) -> int:
        """How many kinds of CTAs there are, each with a main loop of its own."""
        return 3 if self.split else 2

    @property
    def largest(self) -> tuple[int, int]:
        """The most rows of Q, and keys, that a kind of CTAs works on together."""
        return max(self.q_rows, self.block_m), max(self.kv_rows, self.block_n)

    @property
    def mean_dim(self) -> int:
        """Cost-weighted mean: 4 matmuls use block_d, 3 use block_dv."""
        return (4 * self.block_d + 3 * self.block_dv) // 7

    def sizes(self) -> dict[str, int]:
        """What their price depends on, by the names of the cost model."""
        own = ("block_m", "block_n", "kv_rows", "q_rows", "split")
        return {"head_dim": self.mean_dim, **{name: getattr(self, name) for name in own}}

    def __str__(self) -> str:
        dims = dims_text(self.block_d, self.block_dv)
        return f"{self.block_m}x{self.kv_rows}x{dims} and {self.q_rows}x{self.block_n}x{dims}"


AnyTile = Tile | TwoPassTile
Entry = TypeVar("Entry", Tile, TwoPassTile)


class NoTile(ValueError):
    """Why there is no tile for what is asked; `remedy` is what a user can change."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.remedy = remedy


# (arch, largest padded head dim) -> tile. Three stages: with two, the loads of a step are issued at the end of the step before it,
# and waited for at once.
_TILES: dict[tuple[int | str, int], Tile] = {
    (80, 64): Tile(32, 128, 64, 8, 3, False, Fragments(2, 8), atomic_add=False),  # 64 rows spill, whatever else is changed
    (80, 128): Tile(64, 64, 128, 8, 3, False, Fragments(4, 8), atomic_add=False),
    # 128 rows pay half as often for what a step costs beside its matmuls; their dq^T leaves registers to both accumulators.
    (90, 64): Tile(128, 128, 64, 8, 3, True, Fragments(4, 64), atomic_add=True),
    (90, 128): Tile(64, 128, 128, 8, 3, True, Fragments(8, 64), atomic_add=True),
    (100, 64): Tile(64, 128, 64, 8, 3, False, TensorMemory(), atomic_add=True),
    (100, 128): Tile(64, 64, 128, 8, 3, False, TensorMemory(), atomic_add=True),
}
# The smaller of two, for blocks of a mask that the larger does not divide, for kernels that would spill much with it, and for head
# dims that are not its own: dq^T, whose rows are columns of key, has no fewer than 64.
_SMALLER_TILES: dict[tuple[int | str, int], Tile] = {
    (90, 64): Tile(64, 128, 64, 8, 3, False, Fragments(4, 32), atomic_add=True),
}
# The same for two passes: the largest tiles whose loops neither spill nor wait behind every matmul, ragged, causal and grouped.
_TWO_PASS_TILES: dict[tuple[int | str, int], TwoPassTile] = {
    (80, 64): TwoPassTile(32, 64, 64, kv_rows=128, q_rows=128),
    (80, 128): TwoPassTile(64, 32, 128, kv_rows=64, q_rows=128),
    (80, 256): TwoPassTile(32, 32, 256, kv_rows=64, q_rows=64, preprocess_warps=8),
    (90, 64): TwoPassTile(64, 64, 64, kv_rows=128, q_rows=128),
    (90, 128): TwoPassTile(64, 64, 128, kv_rows=128, q_rows=128),
    # With 64 keys both halves of eight warps compute the same S and dP; with 128 registers do not hold dK and dV of 256 columns.
    (90, 256): TwoPassTile(32, 32, 256, kv_rows=128, q_rows=128, split=True, preprocess_warps=8),
    (100, 64): TwoPassTile(64, 64, 64, kv_rows=128, q_rows=128),
    (100, 128): TwoPassTile(64, 64, 128, kv_rows=128, q_rows=128),
    (100, 256): TwoPassTile(32, 32, 256, kv_rows=64, q_rows=64, preprocess_warps=8),
    (86, 256): TwoPassTile(32, 32, 256, kv_rows=32, q_rows=32, preprocess_warps=8),
    (120, 64): TwoPassTile(32, 32, 64, kv_rows=128, q_rows=128),  # with twice the keys some loops spill there, these too
    (120, 128): TwoPassTile(64, 16, 128, kv_rows=64, q_rows=128),
}
# An architecture takes the tiles that it has none of from one with the same matmuls, copies and additions.
_TILES_OF = {80: 80, 86: 80, 87: 80, 89: 86, 90: 90, 100: 100, 103: 100, 120: 86}
_SMALL = {86, 89, 120}  # a CTA has 99 KiB of shared memory there


def padded(head_dim: int) -> int:
    """The next power of two: what a block of Triton can hold."""
    return max(LEAST_BLOCK_D, 1 << (head_dim - 1).bit_length())


def dims_text(head_dim: object, value_dim: object) -> str:
    """Head dims of query and key, and of value, where that is another.

    >>> dims_text(64, 64), dims_text(192, 128)
    ('64', '192/128')
    """
    return f"{head_dim}" if head_dim == value_dim else f"{head_dim}/{value_dim}"


def tile(arch: int | str, dtype: str, head_dim: int, value_dim: int | None = None, *, small: bool = False) -> Tile:
    """The tile of an architecture (80, 90, 100 or "emulated"), a dtype ("bf16", "fp16", "fp32") and a head dim; `value_dim` is
    that of value, None for the same. small: the smaller one, where there are two.

    Raises:
        NoTile: there is none.
    """
    dims = _checked(arch, dtype, head_dim, value_dim, ONE_PASS_HEAD_DIM)
    block_d, block_dv = _columns(arch, *dims)
    if arch == EMULATED:
        # Small tiles, so that short sequences have several KV tiles and a race test proves something.
        return Tile(16, 32, block_d, 4, 2, block_d == 128, Fragments(1, 16), atomic_add=True, block_dv=block_dv)
    table, key = _TILES, max(64, block_d, block_dv)
    entry = _entry(table, arch, key)
    if small or not block_d == block_dv == entry.block_d:
        table = _TILES | _SMALLER_TILES
        entry = _entry(table, arch, key)
    of_dq = _entry(table, arch, max(64, block_d))  # dQ's layout depends on query's dim only
    accumulator = of_dq.accumulator
    if isinstance(accumulator, Fragments):
        accumulator = replace(accumulator, instr_n=min(accumulator.instr_n, block_d))
    return replace(
        entry,
        block_d=block_d,
        block_dv=block_dv,
        dq_transposed=of_dq.dq_transposed,
        accumulator=accumulator,
        num_stages=entry.num_stages if prefetches(arch, block_d, block_dv) else 2,
    )


def tiles_of(arch: int | str) -> int:
    """The architecture whose tiles an architecture takes, mostly its own, but for those that do not fit; NoTile if there are none.

    >>> tiles_of(90), tiles_of(89)
    (90, 80)
    """
    if arch not in _TILES_OF:
        raise NoTile(f"no tile for sm_{arch} (there are tiles for {', '.join(f'sm_{a}' for a in _TILES_OF)})", NVIDIA)
    like = _TILES_OF[int(arch)]
    return like if like == arch else tiles_of(like)


def prefetches(arch: int | str, block_d: int, block_dv: int) -> bool:
    """Whether an architecture's shared memory holds the three stages with which the main loop prefetches."""
    return arch not in _SMALL or not block_d == block_dv > 64


def gluon_semaphores(columns: int) -> int:
    """How many a Q tile has in the Gluon kernel: in 256 columns one for each half of dQ, which warps of their own add."""
    return 2 if columns > ONE_PASS_HEAD_DIM else 1


def gluon_tile(arch: int | str, dtype: str, head_dim: int, value_dim: int | None = None) -> Tile:
    """The tile of the Gluon kernel: 128 rows of Q in 64 columns, which registers hold in two parts; 64 keys in 256 columns.

    Raises:
        NoTile: there is none.
    """
    if arch != 90:
        raise NoTile(f"the Gluon kernel is made for sm_90, not {arch if arch == EMULATED else f'sm_{arch}'}", DEFAULTS)
    dims = _checked(arch, dtype, head_dim, value_dim, MAX_HEAD_DIM)
    if reason := why_not_gluon_dims(*dims):
        raise NoTile(reason, DEFAULTS)
    columns = gluon_columns(*dims)
    if columns > ONE_PASS_HEAD_DIM:
        halves = Fragments(warps_m=4, instr_n=64, parts=2, by_rows=True)  # of dq, whose columns are those of two matmuls
        return Tile(64, 64, columns, 8, 2, False, halves, atomic_add=True, preprocess_warps=8, block_dv=columns)
    block_m = 128 if columns == 64 else 64
    # dq is never transposed: block_m / 16 warps share its rows, the others its columns. A block of its epilogue has 1,024 elements,
    # of 64 columns 16 rows.
    accumulator = Fragments(warps_m=block_m // 16, instr_n=columns * block_m // 128, by_rows=columns > 64)
    return replace(tile(arch, dtype, columns), block_m=block_m, dq_transposed=False, accumulator=accumulator)


def gluon_partitions(*, stores_values: bool) -> int:
    """The partitions of a CTA of the Gluon kernel. stores_values: whether one stores what elements add to a gradient."""
    return GLUON_PARTITIONS + stores_values


def gluon_columns(head_dim: int, value_dim: int) -> int:
    """The columns of the Gluon kernel's tiles for head dims that it takes.

    >>> gluon_columns(96, 64)
    128
    """
    return next(columns for columns in GLUON_HEAD_DIMS if columns >= max(head_dim, value_dim))


def why_not_gluon_dims(head_dim: int, value_dim: int) -> str | None:
    """Why the Gluon kernel does not take head dims; None if it does."""
    if all(dim % 8 == 0 and 16 <= dim <= MAX_HEAD_DIM for dim in (head_dim, value_dim)):
        return None
    return f"the Gluon kernel takes head dims of {GLUON_DIMS}, not {dims_text(head_dim, value_dim)}"


def two_pass_tile(arch: int | str, dtype: str, head_dim: int, value_dim: int | None = None) -> TwoPassTile:
    """The tile of two passes, as `tile`.

    Raises:
        NoTile: there is none.
    """
    dims = _checked(arch, dtype, head_dim, value_dim, MAX_HEAD_DIM)
    block_d, block_dv = _columns(arch, *dims)
    most = max(block_d, block_dv)
    split = block_d == block_dv == 256
    if arch == EMULATED:
        # Nothing waits, but sums still have several terms.
        return TwoPassTile(16, 32, block_d, kv_rows=64, q_rows=32, split=split, num_warps=4, block_dv=block_dv)
    entry = _entry(_TWO_PASS_TILES, arch, max(64, most))
    stages = entry.num_stages if prefetches(arch, block_d, block_dv) else 2
    return replace(entry, block_d=block_d, block_dv=block_dv, split=entry.split and split, num_stages=stages)


def _columns(arch: int | str, head_dim: int, value_dim: int) -> tuple[int, int]:
    """block_d and block_dv, the same in one pass and in two, which may fill the same scratch."""
    block_d, block_dv = padded(head_dim), padded(value_dim)
    if arch == EMULATED or tiles_of(arch) != 80:
        return block_d, block_dv
    # With 16 columns an SM would hold two CTAs of some kernels and one of others; with more of value than of query kernels spill.
    block_dv = max(32, block_dv)
    return max(block_d, block_dv), block_dv


def _entry(table: Mapping[tuple[int | str, int], Entry], arch: int | str, head_dim: int) -> Entry:
    """An architecture's own, or that of the nearest whose tiles it takes."""
    return table[arch, head_dim] if (arch, head_dim) in table else _entry(table, _TILES_OF[int(arch)], head_dim)


def _checked(arch: int | str, dtype: str, head_dim: int, value_dim: int | None, most: int) -> tuple[int, int]:
    """Both head dims."""
    dims = head_dim, head_dim if value_dim is None else value_dim
    if reason := why_head_dims(*dims, most):
        raise NoTile(reason, HEAD_DIMS)
    dtypes = (*HALF_DTYPES, "fp32") if arch == EMULATED else HALF_DTYPES
    if dtype not in dtypes:
        raise NoTile(f"dtype {dtype} is not one of {', '.join(dtypes)}", HALF)
    if arch != EMULATED:
        tiles_of(arch)
    return dims


def why_head_dims(head_dim: int, value_dim: int, most: int = MAX_HEAD_DIM) -> str | None:
    """Why head dims are not taken; None if they are."""
    if min(head_dim, value_dim) >= 1 and max(head_dim, value_dim) <= most:
        return None
    return f"head dim {dims_text(head_dim, value_dim)} is outside 1..{most}"
