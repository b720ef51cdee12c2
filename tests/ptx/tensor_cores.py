"""Layouts and products of tensor cores: which thread holds which element, and at which byte or cell of a memory it lies.

Pure functions on numpy arrays. Nothing here knows a machine's state, and nothing is guessed: what a function does not know raises
`Unsupported` by its name. Numbers in comments are sections of the PTX ISA 9.2.

- `mma`, `wgmma`: the fragments of an opcode. `matrix` and `registers` go from registers to matrices and back.
- `ldmatrix`, `stmatrix`: 8x8 matrices of 16-bit elements between shared memory and registers.
- `wgmma_descriptor`, `tcgen05_descriptor`, `element_addresses`: matrices in shared memory. `tma_addresses`: a box as TMA writes it.
- `instruction_descriptor`, `tmem_cells`, `tmem_lanes`: tcgen05 and its tensor memory (TMEM).
- `multiply_add`: the product.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Words = NDArray[np.uint32]
Floats = NDArray[np.float32]

WARP, WARPGROUP = 32, 128
CHUNK = 16  # bytes that a swizzle moves together
BITS = {"bf16": 16, "f16": 16, "tf32": 32, "f32": 32}
TMEM_LANES, TMEM_COLUMNS = 128, 512  # 9.7.16.1, of 32-bit cells


class Unsupported(NotImplementedError):
    """A shape, type or modifier that has no semantics here, or that the PTX ISA does not allow."""


def unpack(words: Words, element: str) -> Floats:
    """The elements of 32-bit words, lowest bits first: [...] to fp32 [..., elements of a word]."""
    words = np.ascontiguousarray(words, np.uint32)[..., None]
    if element == "f32":
        return words.view(np.float32)
    if element == "bf16":
        return (words.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    if element == "f16":
        return words.view(np.float16).astype(np.float32)
    if element == "tf32":  # 5.2.3 has ten bits of mantissa: the lowest 13 bits of the word are not read
        return (words & np.uint32(0xFFFFE000)).view(np.float32)
    raise Unsupported(f"elements of type {element}")


def multiply_add(a: Floats, b: Floats, c: Floats | None) -> Floats:
    """a [..., m, k] @ b [..., k, n] + c [..., m, n] (without c: 0) in fp32: exact products, whose sum is rounded once.

    9.7.14.5.14: sums have at least the precision of fp32, and their order is not given. So a GPU may differ in the last bits.
    """
    with np.errstate(all="ignore"):
        total = np.matmul(a, b, dtype=np.float64)
        return (total if c is None else total + c).astype(np.float32)


# ---------------------------------------------------------------- registers


@dataclass(frozen=True, eq=False)
class Layout:
    """A matrix in the registers of a warp or warpgroup: element i of thread t is the matrix's (row[t, i], column[t, i]).

    A thread's elements fill its registers in order, and each register from its lowest bits. No element is held twice.
    """

    row: Ints  # [threads, elements]
    column: Ints

    @functools.cached_property
    def shape(self) -> tuple[int, int]:
        return int(self.row.max()) + 1, int(self.column.max()) + 1

    @functools.cached_property
    def held(self) -> Ints:
        """[threads, elements]: positions in the matrix, row by row."""
        return self.row * self.shape[1] + self.column

    @functools.cached_property
    def holder(self) -> Ints:
        """[rows * columns]: thread * elements + element that holds each position."""
        return np.argsort(self.held, axis=None)


def _layout(threads: int, counts: Sequence[int], row: Callable[..., Ints], column: Callable[..., Ints]) -> Layout:
    """The layout whose rows and columns are functions of the thread and of indices below `counts`, the last one fastest."""
    thread, *indices = np.indices((threads, *counts)).reshape(1 + len(counts), threads, -1)
    return Layout(row(thread, *indices), column(thread, *indices))


@functools.cache
def fragment_a(element: str, k: int, threads: int = WARP) -> Layout:
    """A of m16n8k: 9.7.14.5.6 (k4), .7 (k8), .8 (k16). With 128 threads of wgmma, 16 rows a warp: 9.7.15.5.1.1."""
    packed = 32 // BITS[element]
    return _layout(
        threads,
        (k // (4 * packed), 2, packed),  # registers go down first: rows 0-7, rows 8-15, then the next columns
        lambda thread, part, below, e: thread // WARP * 16 + thread % WARP // 4 + 8 * below,
        lambda thread, part, below, e: (4 * part + thread % 4) * packed + e,
    )


@functools.cache
def fragment_b(element: str, k: int) -> Layout:
    """B [k, 8] of m16n8k: 9.7.14.5.6 (k4), .7 (k8), .8 (k16)."""
    packed = 32 // BITS[element]
    return _layout(
        WARP,
        (k // (4 * packed), packed),
        lambda lane, part, e: (4 * part + lane % 4) * packed + e,
        lambda lane, part, e: lane // 4,
    )


@functools.cache
def accumulator(n: int, threads: int = WARP) -> Layout:
    """C and D in fp32, [16 rows a warp, n]: of mma.sync n = 8 (9.7.14.5.8), of wgmma's 128 threads every n (9.7.15.5.1.1)."""
    return _layout(
        threads,
        (n // 8, 2, 2),
        lambda thread, block, below, e: thread // WARP * 16 + thread % WARP // 4 + 8 * below,
        lambda thread, block, below, e: 8 * block + 2 * (thread % 4) + e,
    )


def matrix(words: Words, layout: Layout, element: str = "f32") -> Floats:
    """The matrices in registers [registers, groups * threads]: fp32 [groups, rows, columns]."""
    threads = len(layout.row)
    values = unpack(words, element)
    values = values.reshape(len(words), -1, threads, values.shape[-1]).transpose(1, 2, 0, 3)
    return values.reshape(len(values), -1)[:, layout.holder].reshape(-1, *layout.shape)


def registers(values: Floats, layout: Layout) -> Words:
    """The inverse of `matrix` for fp32: [groups, rows, columns] to [registers, groups * threads]."""
    words = np.ascontiguousarray(values, np.float32).view(np.uint32).reshape(len(values), -1)
    return words[:, layout.held].transpose(2, 0, 1).reshape(layout.held.shape[1], -1)


class Product(NamedTuple):
    """What an opcode multiplies: [m, k] by [k, n], elements of one type into fp32."""

    m: int
    n: int
    k: int
    element: str
    a: Layout
    b: Layout | None  # None: in shared memory
    d: Layout


@functools.cache
def mma(opcode: str) -> Product:
    """The shape, type and fragments of a warp's mma.sync (9.7.14.5.14)."""
    found = re.fullmatch(r"mma\.sync\.aligned\.m16n8k(\d+)\.row\.col\.f32\.(\w+)\.(\w+)\.f32", opcode)
    if not found or (found[2], int(found[1])) not in {("bf16", 8), ("bf16", 16), ("f16", 8), ("f16", 16), ("tf32", 4), ("tf32", 8)}:
        raise Unsupported(opcode)
    if found[2] != found[3]:
        raise Unsupported(f"{opcode}: types differ")
    k, element = int(found[1]), found[2]
    return Product(16, 8, k, element, fragment_a(element, k), fragment_b(element, k), accumulator(8))


@functools.cache
def wgmma(opcode: str) -> Product:
    """The shape, type and fragments of a warpgroup's wgmma.mma_async (9.7.15.5.2); A may lie in shared memory instead."""
    found = re.fullmatch(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.f32\.(\w+)\.(\w+)", opcode)
    if not found or (found[3], int(found[2])) not in {("bf16", 16), ("f16", 16), ("tf32", 8)}:
        raise Unsupported(opcode)
    n, k, element = int(found[1]), int(found[2]), found[3]
    if n % 8 or not 8 <= n <= 256 or element != found[4]:  # 9.7.15.2
        raise Unsupported(f"{opcode}: n is a multiple of 8 up to 256, and A and B have one type")
    return Product(64, n, k, element, fragment_a(element, k, WARPGROUP), None, accumulator(n, WARPGROUP))


# ---------------------------------------------------------------- ldmatrix and stmatrix


@functools.cache
def matrix_tiles(opcode: str) -> tuple[int, bool]:
    """How many matrices ldmatrix (9.7.14.5.15) or stmatrix (9.7.14.5.16) moves, and whether it transposes them."""
    found = re.fullmatch(r"(ldmatrix|stmatrix)\.sync\.aligned\.m8n8\.x([124])(\.trans)?(\.shared(?:::cta)?)?\.b16", opcode)
    if not found:
        raise Unsupported(opcode)
    return int(found[2]), bool(found[3])


def row_addresses(addresses: Ints, count: int) -> Ints:
    """[warps * 32] to [warps, count, 8]: thread 8 i + r of a warp has the address of row r, 16 bytes, of matrix i."""
    return addresses.reshape(-1, WARP)[:, : 8 * count].reshape(-1, count, 8)


def ldmatrix(rows: NDArray[np.uint16], transposed: bool) -> Words:
    """Registers [count, warps * 32] from rows in memory [warps, count, 8 rows, 8 elements].

    Thread t has elements 2 (t % 4) and 2 (t % 4) + 1 of row t // 4; transposed: of column t // 4.
    """
    tiles = rows.swapaxes(2, 3) if transposed else rows
    words = np.ascontiguousarray(tiles).view(np.uint32)  # [warps, count, 8, 4]
    return words.transpose(1, 0, 2, 3).reshape(rows.shape[1], -1)


def stmatrix(words: Words, transposed: bool) -> NDArray[np.uint16]:
    """The inverse of `ldmatrix`: registers [count, warps * 32] to rows in memory [warps, count, 8, 8]."""
    tiles = np.ascontiguousarray(words.reshape(len(words), -1, 8, 4).transpose(1, 0, 2, 3)).view(np.uint16)
    return tiles.swapaxes(2, 3) if transposed else tiles


# ---------------------------------------------------------------- shared memory


class MatrixDescriptor(NamedTuple):
    """A matrix in shared memory; all but `base_offset` in bytes."""

    start: int
    leading: int
    stride: int
    swizzle: int  # 0 (none), 32, 64 or 128
    base_offset: int  # in units of 128 bytes: where the swizzle's pattern begins, if not at a multiple of its size


def _descriptor(bits: int, fixed: int, swizzles: dict[int, int], what: str) -> MatrixDescriptor:
    """`fixed`: all bits but those of fields. `swizzles`: the widths by the highest three bits."""
    start, leading, stride = (((bits >> low) & 0x3FFF) << 4 for low in (0, 16, 32))
    base_offset, mode = bits >> 49 & 7, bits >> 61
    if bits & ~0xE00E_3FFF_3FFF_3FFF != fixed or mode not in swizzles or (base_offset and not swizzles[mode]):
        raise Unsupported(f"{what} {bits:#018x}: reserved bits, an absolute stride, an unknown swizzle, or an offset without one")
    return MatrixDescriptor(start, leading, stride, swizzles[mode], base_offset)


def wgmma_descriptor(bits: int) -> MatrixDescriptor:
    """9.7.15.5.1.2.2, Matrix Descriptor Format."""
    return _descriptor(bits, 0, {0: 0, 2: 128, 4: 64, 6: 32}, "wgmma descriptor")  # two bits of a mode, and a reserved one


def tcgen05_descriptor(bits: int) -> MatrixDescriptor:
    """9.7.16.4.1, Shared Memory Descriptor; with relative strides only."""
    return _descriptor(bits, 1 << 46, {0: 0, 2: 128, 4: 64, 6: 32}, "tcgen05 descriptor")


def swizzle(addresses: Ints, width: int, base_offset: int = 0) -> Ints:
    """Byte addresses as a swizzle of `width` bytes moves them, in chunks of 16. 5.5.7 (TMA), 9.7.15.5.1.2 and 9.7.16.3 (matrices).

    The number of the 128-byte line, counted from where the pattern begins, is added to the chunk's number without carry.
    """
    if width not in (0, 32, 64, 128):
        raise Unsupported(f"a swizzle of {width} bytes")
    chunks = max(width // CHUNK, 1)
    return addresses ^ (((addresses >> 7) - base_offset) % chunks * CHUNK)


def element_addresses(where: MatrixDescriptor, rows: int, depth: int, size: int, mn_major: bool) -> Ints:
    """[rows of M or N, depth along K]: byte addresses of elements of `size` bytes. 9.7.15.5.1.2.1 and 9.7.16.3, strides.

    Eight lines make a core. K-major, a line is a part of one row: cores of further rows are `stride` apart. Without a swizzle,
    cores of further k are `leading` apart. MN-major, a line is several rows of one k: cores of further k are `stride` apart, and
    cores of further rows `leading`; without a swizzle it is the other way round.
    """
    line = where.swizzle or CHUNK  # bytes
    row, k = np.arange(rows)[:, None], np.arange(depth)[None, :]
    if not mn_major:
        if where.swizzle and where.start % line + depth * size > line:
            raise Unsupported(f"a K-major matrix of {depth * size} bytes from byte {where.start % line} of a swizzle of {line}")
        part, within = (0, k * size) if where.swizzle else (k * size // CHUNK, k * size % CHUNK)
        address = row // 8 * where.stride + row % 8 * line + part * where.leading + within
    else:
        if size != 2:  # 9.7.15.5.2: only 16-bit types are transposed; 9.7.16.3: tf32 takes a swizzle with atoms of 32 bytes
            raise Unsupported(f"an MN-major matrix with elements of {size} bytes")
        along_k, along_rows = (where.stride, where.leading) if where.swizzle else (where.leading, where.stride)
        address = k // 8 * along_k + k % 8 * line + row * size // line * along_rows + row * size % line
    return swizzle(where.start + address, where.swizzle, where.base_offset)


def tma_addresses(start: int, box: Sequence[int], size: int, width: int) -> Ints:
    """[*box], the innermost dimension last: byte addresses of elements of `size` bytes under a swizzle of `width` bytes. 5.5.7."""
    inner = box[-1] * size
    if start % 128 or inner % CHUNK:
        raise Unsupported(f"TMA to shared memory at {start} with rows of {inner} bytes: multiples of 128 and 16")
    if width and inner != width:
        raise Unsupported(f"TMA with rows of {inner} bytes under a swizzle of {width}")
    return swizzle(start + np.arange(np.prod(box)).reshape(box) * size, width)


# ---------------------------------------------------------------- tcgen05


class InstructionDescriptor(NamedTuple):
    """What tcgen05.mma multiplies: [m, k] by [k, n] into fp32."""

    m: int
    n: int
    k: int
    element: str
    a_mn_major: bool
    b_mn_major: bool
    negate_a: bool
    negate_b: bool


def instruction_descriptor(opcode: str, bits: int) -> InstructionDescriptor:
    """9.7.16.4.2, table 42: .kind::f16 and .kind::tf32, dense, of one CTA."""
    found = re.fullmatch(r"tcgen05\.mma\.cta_group::1\.kind::(f16|tf32)", opcode)
    if not found:
        raise Unsupported(opcode)
    types = {"f16": {0: "f16", 1: "bf16"}, "tf32": {2: "tf32"}}[found[1]]
    m, n, d, a, b = (bits >> 24 & 31) << 4, (bits >> 17 & 63) << 3, bits >> 4 & 3, bits >> 7 & 7, bits >> 10 & 7
    if bits & 0xE080_004F or d != 1 or a != b or a not in types:
        raise Unsupported(f"{opcode}, instruction descriptor {bits:#010x}: sparse, saturating, shifted, or types {d}, {a}, {b}")
    if not (m in (64, 128) and 8 <= n <= 256 and n % (8 if m == 64 else 16) == 0):  # 9.7.16.2.1, Matrix Shape
        raise Unsupported(f"{opcode}, instruction descriptor {bits:#010x}: m {m}, n {n}")
    flags = [bool(bits >> bit & 1) for bit in (15, 16, 13, 14)]
    return InstructionDescriptor(m, n, 256 // BITS[types[a]], types[a], *flags)


def tmem_address(bits: int) -> tuple[int, int]:
    """The lane and column of an address of tensor memory: 9.7.16.1.1."""
    return bits >> 16, bits & 0xFFFF


def tmem_lanes(m: int) -> Ints:
    """[m]: the lane of each row of D, and of A in tensor memory, from the address on. 9.7.16.10.5: layouts D (128) and F (64)."""
    if m not in (64, 128):
        raise Unsupported(f"tcgen05.mma of one CTA with {m} rows")
    row = np.arange(m)
    return row if m == 128 else row // 16 * 32 + row % 16


# Of tcgen05.ld and .st: registers of a thread at .x1; lane and column of register r of thread t, from the address on. 9.7.16.2.3.1.
TMEM_SHAPES: dict[str, tuple[int, Callable[..., tuple[Ints, Ints]]]] = {
    "32x32b": (1, lambda t, r, split: (t, r)),
    "16x32bx2": (1, lambda t, r, split: (t % 16, r + t // 16 * split)),  # two loads of 16 lanes, of half a warp each
    "16x64b": (1, lambda t, r, split: (t // 4 + t % 2 * 8, t // 2 % 2 + 2 * r)),
    "16x128b": (2, lambda t, r, split: (t // 4 + r % 2 * 8, t % 4 + r // 2 * 4)),
    "16x256b": (4, lambda t, r, split: (t // 4 + r // 2 % 2 * 8, r % 2 + t % 4 * 2 + r // 4 * 8)),
}


def tmem_cells(opcode: str, address: int, warp: int, split: int = 0) -> tuple[Ints, Ints]:
    """Lanes and columns [32 threads, registers] of a warp's tcgen05.ld or .st (9.7.16.8); `split` is .16x32bx2's last operand."""
    found = re.fullmatch(rf"tcgen05\.(?:ld|st)\.sync\.aligned\.({'|'.join(TMEM_SHAPES)})\.x(1|2|4|8|16|32|64|128)\.b32", opcode)
    if not found:
        raise Unsupported(opcode)
    per, cells = TMEM_SHAPES[found[1]]
    if per * int(found[2]) > 128:  # table 49
        raise Unsupported(opcode)
    lane, column = tmem_address(address)
    lanes, columns = cells(*np.indices((WARP, per * int(found[2]))), split)
    lanes, columns = lane + lanes, column + columns
    if (lanes // 32 != warp % 4).any():  # 9.7.16.8.1, access restrictions
        raise Unsupported(f"{opcode}: warp {warp} at lanes {lanes.min()} to {lanes.max()}, which are not its own")
    if columns.max() >= TMEM_COLUMNS:
        raise Unsupported(f"{opcode}: columns to {columns.max()} of {TMEM_COLUMNS}")
    return lanes, columns
