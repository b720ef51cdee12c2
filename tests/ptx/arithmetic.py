"""The helpers of lowered blocks: what numpy's operators and functions do not say of PTX's arithmetic (ISA 9.7.1 to 9.7.9)."""

from __future__ import annotations

from functools import reduce  # noqa: F401, for the blocks
from typing import Any

import numpy as np

Array = Any  # of an element a thread, or a scalar
TINY = np.float32(2.0**-126)


def wide(x: Array, n: int, dtype: Any, offset: int = 0) -> np.ndarray:
    """An array of n elements, whatever x is; `offset` added."""
    made = np.empty(n, dtype)
    made[:] = x
    if offset:
        made += offset
    return made


def pack(n: int, dtype: Any, *rows: Array) -> np.ndarray:
    """[rows, n]."""
    made = np.empty((len(rows), n), dtype)
    for row, value in enumerate(rows):
        made[row] = value
    return made


def from_bf16(x: Array) -> Array:
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def number(x: Array) -> Array:
    """The value of a float: bf16's, which numpy lacks, as float32."""
    return from_bf16(x) if x.dtype == np.uint16 else x


def to_bf16(x: Array) -> Array:
    """To nearest even."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def two_halves(high: Array, low: Array, kind: str) -> Array:
    convert = to_bf16 if kind == "bf16" else lambda x: np.asarray(x, np.float32).astype(np.float16).view(np.uint16)
    return (convert(high).astype(np.uint32) << np.uint32(16)) | convert(low)


def to_tf32(bits: Array) -> Array:
    """To nearest, ties away from zero; ten bits of the mantissa stay."""
    return (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)


def ftz(x: Array) -> Array:
    return np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x)


def fma(a: Array, b: Array, c: Array) -> Array:
    """The product is exact in float64; the sum is rounded there, then to float32: in rare cases not what one rounding gives."""
    if a.dtype == np.float64:
        return a * b + c
    return (np.multiply(a, b, dtype=np.float64) + c).astype(np.float32)


def fma_down(a: Array, b: Array, c: Array) -> Array:
    """Towards minus infinity; of a sum that is rounded to float64 first."""
    exact = np.multiply(a, b, dtype=np.float64) + c
    nearest = exact.astype(np.float32)
    return np.where(nearest > exact, np.nextafter(nearest, np.float32(-np.inf)), nearest)


def half(word: Array, low: bool, kind: str) -> Array:
    """One of the two numbers of a word."""
    bits = (word if low else word >> np.uint32(16)).astype(np.uint16)
    return from_bf16(bits) if kind == "bf16" else bits.view(np.float16)


def div(a: Array, b: Array) -> Array:
    """Towards zero; by zero gives all ones, as GPUs do, where PTX leaves it open."""
    a, b = np.broadcast_arrays(a, b)
    by = np.where(b == 0, b.dtype.type(1), b)
    if a.dtype.kind == "u":
        quotient = a // by
    else:
        whole = np.abs(a.astype(np.int64)) // np.abs(by.astype(np.int64))
        quotient = np.where((a < 0) != (by < 0), -whole, whole).astype(a.dtype)
    return np.where(b == 0, ~a.dtype.type(0), quotient)


def rem(a: Array, b: Array) -> Array:
    return a - div(a, b) * b


def high(a: Array, b: Array) -> Array:
    """The upper half of the product."""
    bits = 8 * a.dtype.itemsize
    if bits == 64:
        return np.array([(int(x) * int(y)) >> 64 for x, y in zip(*np.broadcast_arrays(np.atleast_1d(a), b), strict=True)]).astype(
            a.dtype
        )
    double = f"{a.dtype.kind if a.dtype.kind == 'i' else 'u'}{a.dtype.itemsize * 2}"
    return ((a.astype(double) * b.astype(double)) >> np.dtype(double).type(bits)).astype(a.dtype)


def shift(a: Array, count: Array, way: str) -> Array:
    """Counts of the width or more clear everything, or leave the sign."""
    bits = 8 * a.dtype.itemsize
    if isinstance(count, np.generic) and count < bits:
        return a << a.dtype.type(count) if way == "shl" else a >> a.dtype.type(count)
    kept = np.minimum(count, bits - 1).astype(a.dtype)
    if way == "shr" and a.dtype.kind == "i":
        return a >> kept
    return np.where(count >= bits, a.dtype.type(0), a << kept if way == "shl" else a >> kept)


def funnel(low: Array, up: Array, count: Array, way: str, mode: str) -> Array:
    both = (up.astype(np.uint64) << np.uint64(32)) | low
    by = (count & np.uint32(31) if mode == "wrap" else np.minimum(count, np.uint32(32))).astype(np.uint64)
    return ((both << by) >> np.uint64(32) if way == "l" else both >> by).astype(np.uint32)


def extract(a: Array, start: Array, length: Array) -> Array:
    start, length = start & 255, length & 255
    bits = 8 * a.dtype.itemsize
    top = np.where(length == 0, 0, np.minimum(start + length - 1, bits - 1)).astype(np.int64)
    if a.dtype.kind == "u":
        mask = (np.uint64(1) << np.minimum(length, 63).astype(np.uint64)) - np.uint64(1)
        return ((a.astype(np.uint64) >> np.minimum(start, 63).astype(np.uint64)) & mask).astype(a.dtype)
    up = (63 - top).astype(np.int64)
    wide_a = (a.astype(np.int64) << up) >> np.minimum(up + start.astype(np.int64), 63)
    return np.where(length == 0, 0, wide_a).astype(a.dtype)


def saturated(x: Array, dtype: Any) -> Array:
    limits = np.iinfo(dtype)
    return np.clip(np.nan_to_num(np.asarray(x, np.float64) if x.dtype.kind == "f" else x), limits.min, limits.max).astype(dtype)


def lop3(a: Array, b: Array, c: Array, table: int) -> Array:
    terms = [(a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c) for n in range(8) if table >> n & 1]
    return np.bitwise_or.reduce(np.broadcast_arrays(*terms)) if terms else np.uint32(0)


def permute(a: Array, b: Array, selector: Array) -> Array:
    """prmt.b32 in its default mode."""
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    made = np.uint64(0)
    for n in range(4):
        nibble = (selector.astype(np.uint64) >> np.uint64(4 * n)) & np.uint64(15)
        byte = (both >> ((nibble & np.uint64(7)) << np.uint64(3))) & np.uint64(255)
        byte = np.where(nibble & np.uint64(8), np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0)), byte)
        made = made | (byte << np.uint64(8 * n))
    return made.astype(np.uint32)


def ones(a: Array) -> Array:
    """How many bits are set."""
    bits = np.atleast_1d(a)[:, None] >> np.arange(8 * a.dtype.itemsize).astype(a.dtype) & a.dtype.type(1)
    return bits.sum(1, dtype=np.uint32)


OPERATIONS: dict[str, np.ufunc] = {
    **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "abs": np.abs},
    **{"min": np.fmin, "max": np.fmax, "min.NaN": np.minimum, "max.NaN": np.maximum},
    **{"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor},
}


def by_elements(op: str, kind: str, *given: Array) -> Array:
    """Arithmetic on registers that hold several elements, each computed by itself."""
    element = kind.removesuffix("x2")
    dtype = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "s16": np.int16, "u16": np.uint16}[element]
    arrays = [np.atleast_1d(np.ascontiguousarray(x)) for x in np.broadcast_arrays(*given)]
    values = [from_bf16(x.view(dtype)) if element == "bf16" else x.view(dtype) for x in arrays]
    if op == "fma":
        exact = np.multiply(values[0], values[1], dtype=np.float64) + values[2]
        made = exact.astype(np.float32) if element != "f16" else exact.astype(np.float16)
    else:
        made = OPERATIONS[op](*values)
    return np.ascontiguousarray(to_bf16(made) if element == "bf16" else made).view(arrays[0].dtype)
