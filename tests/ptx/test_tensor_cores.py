"""The layouts of tensor cores against their published forms: the PTX ISA's formulas and tables, and CUTLASS's layouts.

The module computes with one formula for all types. Here each layout is written as its source writes it: the ISA's by cases, element
by element, and CUTLASS's (include/cute/atom) as shapes with strides.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.ptx import tensor_cores as cores

RANDOM = np.random.default_rng(0)


# ---------------------------------------------------------------- CuTe's notation


def flat(nested) -> list[int]:
    return [nested] if isinstance(nested, int) else [x for part in nested for x in flat(part)]


def cute(shape, stride, index: int) -> int:
    """The offset of an index: coordinates with the first mode fastest, times strides."""
    offset = 0
    for extent, step in zip(flat(shape), flat(stride), strict=True):
        index, coordinate = divmod(index, extent)
        offset += coordinate * step
    assert not index
    return offset


def cute_pairs(threads, values, rows: int) -> list[list[tuple[int, int]]]:
    """(row, column) of each thread's values, whose offsets count down columns of `rows` rows."""
    size = [int(np.prod(flat(shape))) for shape, _ in (threads, values)]
    offsets = [[cute(*threads, t) + cute(*values, v) for v in range(size[1])] for t in range(size[0])]
    return [[(offset % rows, offset // rows) for offset in thread] for thread in offsets]


def pairs(layout: cores.Layout) -> list[list[tuple[int, int]]]:
    return [[(row, column) for row, column in thread] for thread in np.stack([layout.row, layout.column], -1).tolist()]


# ---------------------------------------------------------------- mma.sync and wgmma


def isa_a_16(i: int, group: int, within: int) -> tuple[int, int]:  # 9.7.14.5.8
    row = group if 0 <= i < 2 or 4 <= i < 6 else group + 8
    return row, within * 2 + (i & 1) + (8 if i >= 4 else 0)


def isa_b_16(i: int, group: int, within: int) -> tuple[int, int]:
    return within * 2 + (i & 1) + (8 if i >= 2 else 0), group


def isa_c(i: int, group: int, within: int) -> tuple[int, int]:
    return (group if i < 2 else group + 8), within * 2 + (i & 1)


def isa_a_tf32(i: int, group: int, within: int) -> tuple[int, int]:  # 9.7.14.5.7
    return (group if i in (0, 2) else group + 8), (within if i in (0, 1) else within + 4)


def isa_b_tf32(i: int, group: int, within: int) -> tuple[int, int]:
    return (within if i == 0 else within + 4), group


def isa(formula, elements: int) -> list[list[tuple[int, int]]]:
    return [[formula(i, lane >> 2, lane % 4) for i in range(elements)] for lane in range(32)]


# Threads and values with strides, from CUTLASS's mma_traits_sm80.hpp: (A, B, C), and their rows. B is [n, k] there.
LANES = (4, 8)
CUTLASS = {
    ("bf16", 16): (((LANES, (32, 1)), ((2, 2, 2), (16, 8, 128))), ((LANES, (16, 1)), ((2, 2), (8, 64)))),
    ("f16", 8): (((LANES, (32, 1)), ((2, 2), (16, 8))), ((LANES, (16, 1)), ((2,), (8,)))),
    ("tf32", 8): (((LANES, (16, 1)), ((2, 2), (8, 64))), ((LANES, (8, 1)), ((2,), (32,)))),
    ("tf32", 4): (((LANES, (16, 1)), ((2,), (8,))), ((LANES, (8, 1)), ((1,), (0,)))),
}


def test_fragments_of_mma_are_the_isas_formulas():
    for element in ("bf16", "f16"):
        product = cores.mma(f"mma.sync.aligned.m16n8k16.row.col.f32.{element}.{element}.f32")
        assert pairs(product.a) == isa(isa_a_16, 8)
        assert pairs(product.b) == isa(isa_b_16, 4)
        assert pairs(product.d) == isa(isa_c, 4)
    product = cores.mma("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32")
    assert (product.m, product.n, product.k) == (16, 8, 8)
    assert pairs(product.a) == isa(isa_a_tf32, 4)
    assert pairs(product.b) == isa(isa_b_tf32, 2)
    assert pairs(product.d) == isa(isa_c, 4)


@pytest.mark.parametrize(("element", "k"), CUTLASS)
def test_fragments_of_mma_are_cutlass_layouts(element, k):
    product = cores.mma(f"mma.sync.aligned.m16n8k{k}.row.col.f32.{element}.{element}.f32")
    a, b = CUTLASS[element, k]
    assert pairs(product.a) == cute_pairs(*a, rows=16)
    assert pairs(product.b) == [[(depth, n) for n, depth in lane] for lane in cute_pairs(*b, rows=8)]
    assert pairs(product.d) == cute_pairs((LANES, (32, 1)), ((2, 2), (16, 8)), rows=16)


def test_fragments_of_wgmma_are_cutlass_layouts():
    warpgroup = (4, 8, 4)  # mma_traits_sm90_gmma.hpp
    for n in range(8, 257, 8):
        product = cores.wgmma(f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16")
        assert (product.m, product.n, product.k, product.element) == (64, n, 16, "bf16")
        assert pairs(product.d) == cute_pairs((warpgroup, (128, 1, 16)), ((2, 2, n // 8), (64, 8, 512)), rows=64)
    assert pairs(product.a) == cute_pairs((warpgroup, (128, 1, 16)), ((2, 2, 2), (64, 8, 512)), rows=64)
    product = cores.wgmma("wgmma.mma_async.sync.aligned.m64n16k8.f32.tf32.tf32")
    assert pairs(product.a) == cute_pairs((warpgroup, (64, 1, 16)), ((2, 2), (8, 256)), rows=64)


def bits_of(value: float, element: str) -> int:
    if element == "f16":
        return int(np.float16(value).view(np.uint16))
    word = int(np.float32(value).view(np.uint32))
    return word >> 16 if element == "bf16" else word


@pytest.mark.parametrize(("element", "k"), [("bf16", 16), ("f16", 16), ("tf32", 8)])
def test_mma_of_two_warps_multiplies(element, k):
    """Registers are packed here one by one, by the ISA's formulas."""
    opcode = f"mma.sync.aligned.m16n8k{k}.row.col.f32.{element}.{element}.f32"
    a, b, c = (RANDOM.integers(-8, 9, (2, *shape)).astype(np.float32) for shape in ((16, k), (k, 8), (16, 8)))
    per = 1 if element == "tf32" else 2
    formulas = (isa_a_tf32, isa_b_tf32) if element == "tf32" else (isa_a_16, isa_b_16)

    def pack(values, formula, registers, per, element):
        words = np.zeros((registers, 64), np.uint32)
        for warp, lane, i in itertools.product(range(2), range(32), range(registers * per)):
            bits = bits_of(values[(warp, *formula(i, lane >> 2, lane % 4))], element)
            words[i // per, 32 * warp + lane] |= np.uint32(bits << (i % per * 32 // per))
        return words

    words_a, words_b = (pack(x, f, r, per, element) for x, f, r in zip((a, b), formulas, (4, 2), strict=True))
    words_c = pack(c, isa_c, 4, 1, "f32")
    product = cores.mma(opcode)
    packed = ((words_a, product.a, element), (words_b, product.b, element), (words_c, product.d))
    operands = [cores.matrix(*given) for given in packed]
    for got, want in zip(operands, (a, b, c), strict=True):
        np.testing.assert_array_equal(got, want)
    d = cores.registers(cores.multiply_add(*operands), product.d)
    np.testing.assert_array_equal(d, pack(a @ b + c, isa_c, 4, 1, "f32"))  # small integers: exact in any order


def test_products_are_exact_and_sums_are_rounded_once():
    terms = [2.0**48, -(2.0**48), 2.0**24, -(2.0**24), 1]  # an order of fp32 additions loses the 1 in some permutation
    a, b = np.array(list(itertools.permutations(terms)), np.float32), np.ones((5, 1), np.float32)
    np.testing.assert_array_equal(cores.multiply_add(a, b, None), 1)
    one = np.ones((1, 1), np.float32)
    assert cores.multiply_add(np.array([[2.0**24, 1]], np.float32), b[:2], one) == 2**24 + 2  # 2 ** 24 + 1 is no fp32 number
    assert np.isnan(cores.multiply_add(np.full((1, 1), np.inf, np.float32), np.zeros((1, 1), np.float32), None))
    assert cores.multiply_add(np.full((1, 1), 3e38, np.float32), np.full((1, 1), 2, np.float32), None) == np.inf


def test_tf32_reads_nineteen_bits():
    words = np.array([np.float32(1 + 2**-10).view(np.uint32), np.float32(1 + 2**-10 - 2**-23).view(np.uint32)], np.uint32)
    np.testing.assert_array_equal(cores.unpack(words, "tf32")[..., 0], [1 + 2**-10, 1])


# ---------------------------------------------------------------- ldmatrix and stmatrix


def test_ldmatrix_loads_the_fragments_of_mma():
    """What both instructions are for: ldmatrix of a row-major A is mma's A, and transposed of a row-major B [k, n] mma's B."""
    a, b = (RANDOM.integers(0, 1 << 16, shape).astype(np.uint16) for shape in ((16, 16), (16, 8)))
    lanes = np.arange(32)
    at = (lanes % 16) * 16 + lanes // 16 * 8  # rows 0-15 of columns 0-7, then of columns 8-15
    rows = a.reshape(-1)[cores.row_addresses(at, 4)[..., None] + np.arange(8)]
    words = cores.ldmatrix(rows, False)
    for lane, register, half in itertools.product(range(32), range(4), range(2)):
        row, column = isa_a_16(2 * register + half, lane >> 2, lane % 4)
        assert words[register, lane] >> (16 * half) & 0xFFFF == a[row, column]
    rows = b.reshape(-1)[cores.row_addresses(lanes * 8, 2)[..., None] + np.arange(8)]
    words = cores.ldmatrix(rows, True)
    for lane, register, half in itertools.product(range(32), range(2), range(2)):
        k, n = isa_b_16(2 * register + half, lane >> 2, lane % 4)
        assert words[register, lane] >> (16 * half) & 0xFFFF == b[k, n]


# Threads, and bits of their registers, with strides: CUTLASS's copy_traits_sm75.hpp, and copy_traits_sm90.hpp for stmatrix.
LDSM = {False: ((32, 32), ((32, 4), (1, 1024))), True: (((4, 8), (256, 16)), ((16, 2, 4), (1, 128, 1024)))}


@pytest.mark.parametrize(("count", "transposed"), list(itertools.product((1, 2, 4), (False, True))))
def test_ldmatrix_and_stmatrix_are_cutlass_layouts(count, transposed):
    tiles = cores.matrix_tiles(f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' * transposed}.shared.b16")
    assert (
        tiles == cores.matrix_tiles(f"stmatrix.sync.aligned.m8n8.x{count}{'.trans' * transposed}.shared.b16") == (count, transposed)
    )
    rows = RANDOM.integers(0, 1 << 16, (3, count, 8, 8)).astype(np.uint16)  # three warps
    words = cores.ldmatrix(rows, transposed)
    threads, values = LDSM[transposed]
    for warp, lane, register, half in itertools.product(range(3), range(32), range(count), range(2)):
        bit = cute(*threads, lane) + cute(*values, 32 * register + 16 * half)
        assert words[register, 32 * warp + lane] >> (16 * half) & 0xFFFF == rows[warp].reshape(-1)[bit // 16]
    np.testing.assert_array_equal(cores.stmatrix(words, transposed), rows)


def test_rows_of_matrices_are_addressed_by_eight_threads_each():
    addresses = np.arange(64) + 1000
    for count in (1, 2, 4):
        for warp, tile, row in itertools.product(range(2), range(count), range(8)):
            assert cores.row_addresses(addresses, count)[warp, tile, row] == 1000 + 32 * warp + 8 * tile + row


# ---------------------------------------------------------------- swizzles and descriptors

# Which 16-byte chunk of its row each chunk of 128 consecutive bytes is, line by line, as the ISA draws the modes (5.5.7).
PICTURES = {
    128: ["01234567", "10325476", "23016745", "32107654", "45670123", "54761032", "67452301", "76543210"],
    64: ["01234567", "10325476", "23016745", "32107654"] * 2,
    32: ["01234567", "10325476"] * 4,
}


@pytest.mark.parametrize("width", [32, 64, 128])
def test_swizzles_are_the_isas_pictures(width):
    lines = [np.argsort(cores.swizzle(np.arange(8) * 16 + 128 * line, width)).tolist() for line in range(8)]
    assert ["".join(map(str, line)) for line in lines] == PICTURES[width]
    addresses = RANDOM.integers(0, 1 << 18, 100)
    bits = {32: 1, 64: 2, 128: 3}[width]  # CUTLASS: Swizzle<bits, 4, 3>
    mask = (1 << bits) - 1 << 7
    np.testing.assert_array_equal(cores.swizzle(addresses, width), addresses ^ (addresses & mask) >> 3)


@pytest.mark.parametrize("width", [32, 64, 128])
def test_tma_writes_chunks_where_the_pictures_say(width):
    elements = width // 2
    at = cores.tma_addresses(4096, (3, 16, elements), 2, width) - 4096
    for box, row, chunk in itertools.product(range(3), range(16), range(width // 16)):
        first = at[box, row, chunk * 8]
        assert at[box, row, chunk * 8 : chunk * 8 + 8].tolist() == list(range(first, first + 16, 2))
        dense = (box * 16 + row) * width + chunk * 16
        line, place = divmod(dense, 128)
        assert first == line * 128 + PICTURES[width][line % 8].index(str(place // 16)) * 16
    np.testing.assert_array_equal(np.sort(at, axis=None), np.arange(at.size) * 2)


def descriptor(start=0, leading=0, stride=0, mode=0, base=0, *, blackwell=False) -> int:
    """Fields at the bits of 9.7.15.5.1.2.2 and of 9.7.16.4.1, table 40."""
    bits = start // 16 | leading // 16 << 16 | stride // 16 << 32 | base << 49
    return bits | (1 << 46 | mode << 61 if blackwell else mode << 62)


MODES = {0: (0, 0), 32: (3, 6), 64: (2, 4), 128: (1, 2)}  # width: number in wgmma's and in tcgen05's descriptors


@pytest.mark.parametrize(("width", "blackwell"), list(itertools.product(MODES, (False, True))))
def test_fields_of_descriptors(width, blackwell):
    read = cores.tcgen05_descriptor if blackwell else cores.wgmma_descriptor
    base = 5 if width else 0
    bits = descriptor(0x3FFF0, 0x12340, 0x2BCD0, MODES[width][blackwell], base, blackwell=blackwell)
    assert read(bits) == (0x3FFF0, 0x12340, 0x2BCD0, width, base)


# The canonical layouts of mma_traits_sm90_gmma.hpp and mma_sm100_desc.hpp, of 16-bit elements, T of them in 16 bytes: shapes and
# strides, in elements, of [rows, k], for two cores along each dimension. W is the swizzle's width in 16 bytes.
T = 8


def canonical(width: int, mn_major: bool, leading: int, stride: int):
    W = max(width // 16, 1)
    if mn_major and width == 0:
        return ((T, 1, 2), (1, T, stride)), ((8, 2), (T, leading))
    if mn_major:
        return ((T, W, 2), (1, T, leading)), ((8, 2), (W * T, stride))
    if width == 0:
        return ((8, 2), (T, stride)), ((T, 2), (1, leading))
    return ((8, 2), (W * T, stride)), ((T, 2), (1, T))


@pytest.mark.parametrize(("width", "mn_major"), list(itertools.product(MODES, (False, True))))
def test_matrices_in_shared_memory_are_cutlass_canonical_layouts(width, mn_major):
    leading, stride, start = 0x1800, 0x2C00, 0x4000
    rows, depth = canonical(width, mn_major, leading // 2, stride // 2)
    m, k = (int(np.prod(shape)) for shape, _ in (rows, depth))
    where = cores.wgmma_descriptor(descriptor(start, leading, stride, MODES[width][0]))
    at = cores.element_addresses(where, m, k, 2, mn_major)
    bits = width.bit_length() - 5 if width else 0  # Swizzle<bits, 4, 3> of the address
    for row, column in itertools.product(range(m), range(k)):
        address = start + 2 * (cute(*rows, row) + cute(*depth, column))
        assert at[row, column] == address ^ (address & ((1 << bits) - 1 << 7)) >> 3


def test_k_major_matrix_begins_within_a_swizzled_row():
    """The second block of 16 elements along K: its descriptor starts 32 bytes on, and addresses are swizzled as a whole."""
    whole = cores.tma_addresses(0x2000, (64, 64), 2, 128)
    for block in range(4):
        where = cores.wgmma_descriptor(descriptor(0x2000 + 32 * block, 16, 1024, 1))
        np.testing.assert_array_equal(cores.element_addresses(where, 64, 16, 2, False), whole[:, 16 * block : 16 * block + 16])


def test_mn_major_matrix_is_the_box_that_tma_wrote():
    """A box [k 32, n 64] per 64 columns, one after another: B [n 128, k 16] of the second half of k, MN-major."""
    whole = cores.tma_addresses(0x2000, (2, 32, 64), 2, 128)  # [block of n, k, n]
    where = cores.tcgen05_descriptor(descriptor(0x2000 + 16 * 128, 32 * 128, 1024, 2, blackwell=True))
    at = cores.element_addresses(where, 128, 16, 2, True)
    np.testing.assert_array_equal(at, whole[:, 16:].transpose(0, 2, 1).reshape(128, 16))


def test_tf32_is_k_major_in_chunks_of_four():
    where = cores.wgmma_descriptor(descriptor(0x2000, 0, 1024, 1))
    np.testing.assert_array_equal(
        cores.element_addresses(where, 64, 8, 4, False), cores.tma_addresses(0x2000, (64, 32), 4, 128)[:, :8]
    )


def test_base_offset_moves_the_pattern():
    """9.7.15.5.1.2.2: (start of the pattern >> 7) & 7 where it does not start at a multiple of its size."""
    for line in range(8):
        start = 0x4000 + 128 * line
        where = cores.wgmma_descriptor(descriptor(start, 0, 1024, 1, line))
        at = cores.element_addresses(where, 8, 64, 2, False) - start
        for row, chunk in itertools.product(range(8), range(8)):
            assert at[row, chunk * 8] == 128 * row + 16 * int(PICTURES[128][row][chunk])


# ---------------------------------------------------------------- tcgen05

# Threads and bits of registers, with strides in bits of the image; then its bits of a lane: CUTLASS's copy_traits_sm100.hpp.
TMEM = {
    "32x32b": lambda n: ((32, 32 * n), (32 * n, 1), 32 * n),
    "16x64b": lambda n: (((2, 2, 8), (8 * 64 * n, 32, 64 * n)), ((32, n), (1, 64)), 64 * n),
    "16x128b": lambda n: (((4, 8), (32, 128 * n)), ((32, 2, n), (1, 8 * 128 * n, 128)), 128 * n),
    "16x256b": lambda n: (((4, 8), (64, 256 * n)), ((64, 2, n), (1, 8 * 256 * n, 256)), 256 * n),
    "16x32bx2": lambda n: (((16, 2), (64 * n, 32 * n)), ((32, n), (1, 32)), 64 * n),
}
MOST = {"32x32b": 128, "16x64b": 128, "16x128b": 64, "16x256b": 32, "16x32bx2": 128}  # .num of table 49


@pytest.mark.parametrize(("shape", "way"), list(itertools.product(TMEM, ("ld", "st"))))
def test_cells_of_tcgen05_ld_and_st_are_cutlass_layouts(shape, way):
    for count in (1, 2, 8, MOST[shape]):
        threads, values, row = TMEM[shape](count)
        lane0, warp = (96, 7) if shape == "32x32b" else (80, 2)
        lanes, columns = cores.tmem_cells(f"tcgen05.{way}.sync.aligned.{shape}.x{count}.b32", lane0 << 16 | 40, warp, split=count)
        registers = lanes.shape[1]
        for thread, register in itertools.product(range(32), range(registers)):
            offset = cute(*threads, thread) + cute(*values, 32 * register)
            assert (lanes[thread, register] - lane0, columns[thread, register] - 40) == (offset // row, offset % row // 32)


def test_halves_of_16x32bx2_are_apart_by_the_split():
    lanes, columns = cores.tmem_cells("tcgen05.ld.sync.aligned.16x32bx2.x4.b32", 32 << 16 | 8, 1, split=64)
    for thread, register in itertools.product(range(32), range(4)):
        column = 8 + register + (64 if thread >= 16 else 0)
        assert (lanes[thread, register], columns[thread, register]) == (32 + thread % 16, column)


def test_accumulator_lanes():
    """Layouts D and F of 9.7.16.10.5; CUTLASS's mma_traits_sm100_frag.hpp has (16, 4):(1, 32) for 64 rows."""
    assert cores.tmem_lanes(128).tolist() == list(range(128))
    assert cores.tmem_lanes(64).tolist() == [cute((16, 4), (1, 32), row) for row in range(64)]
    assert cores.tmem_lanes(64)[[0, 15, 16, 31, 32, 48, 63]].tolist() == [0, 15, 32, 47, 64, 96, 111]


def test_instruction_descriptor_fields():
    opcode = "tcgen05.mma.cta_group::1.kind::f16"
    assert cores.instruction_descriptor(opcode, 0x08200490) == (128, 128, 16, "bf16", False, False, False, False)
    assert cores.instruction_descriptor(opcode, 0x04110010) == (64, 64, 16, "f16", False, True, False, False)
    assert cores.instruction_descriptor(opcode, 0x0820A490) == (128, 128, 16, "bf16", True, False, True, False)
    assert cores.instruction_descriptor(opcode, 0x08204490) == (128, 128, 16, "bf16", False, False, False, True)
    assert cores.instruction_descriptor("tcgen05.mma.cta_group::1.kind::tf32", 0x08040910) == (128, 16, 8, "tf32", *[False] * 4)


def test_address_of_tensor_memory():
    assert cores.tmem_address(0x00400123) == (64, 0x123)


# ---------------------------------------------------------------- what is not known


F16 = "tcgen05.mma.cta_group::1.kind::f16"
UNKNOWN = {
    "mma of integers": lambda: cores.mma("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32"),
    "mma in f16": lambda: cores.mma("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16"),
    "mma of unlike types": lambda: cores.mma("mma.sync.aligned.m16n8k16.row.col.f32.f16.bf16.f32"),
    "wgmma in f16": lambda: cores.wgmma("wgmma.mma_async.sync.aligned.m64n64k16.f16.f16.f16"),
    "wgmma of n 12": lambda: cores.wgmma("wgmma.mma_async.sync.aligned.m64n12k16.f32.f16.f16"),
    "wgmma of n 264": lambda: cores.wgmma("wgmma.mma_async.sync.aligned.m64n264k16.f32.f16.f16"),
    "sparse wgmma": lambda: cores.wgmma("wgmma.mma_async.sp.sync.aligned.m64n64k32.f32.f16.f16"),
    "ldmatrix of 8 bits": lambda: cores.matrix_tiles("ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8"),
    "elements of 8 bits": lambda: cores.unpack(np.zeros(1, np.uint32), "e4m3"),
    "swizzle of 16": lambda: cores.swizzle(np.zeros(1, np.int64), 16),
    "wgmma's reserved bits": lambda: cores.wgmma_descriptor(1 << 46),
    "base offset without swizzle": lambda: cores.wgmma_descriptor(descriptor(base=1)),
    "tcgen05 without its constant": lambda: cores.tcgen05_descriptor(2 << 61),
    "tcgen05 absolute stride": lambda: cores.tcgen05_descriptor(descriptor(blackwell=True) | 1 << 52),
    "tcgen05 atoms of 32 bytes": lambda: cores.tcgen05_descriptor(descriptor(mode=1, blackwell=True)),
    "K beyond its swizzle": lambda: cores.element_addresses(cores.MatrixDescriptor(16, 0, 256, 32, 0), 8, 16, 2, False),
    "tf32 MN-major": lambda: cores.element_addresses(cores.MatrixDescriptor(0, 0, 1024, 128, 0), 8, 8, 4, True),
    "TMA unaligned": lambda: cores.tma_addresses(64, (8, 64), 2, 128),
    "TMA narrower than its swizzle": lambda: cores.tma_addresses(0, (8, 32), 2, 128),
    "tcgen05.mma of two CTAs": lambda: cores.instruction_descriptor("tcgen05.mma.cta_group::2.kind::f16", 0x08200490),
    "tcgen05.mma of fp8": lambda: cores.instruction_descriptor("tcgen05.mma.cta_group::1.kind::f8f6f4", 0x08200490),
    "tcgen05.mma in f16": lambda: cores.instruction_descriptor(F16, 0x08200480),
    "tcgen05.mma sparse": lambda: cores.instruction_descriptor(F16, 0x08200494),
    "tcgen05.mma of unlike types": lambda: cores.instruction_descriptor(F16, 0x08200410),
    "tcgen05.mma of 256 rows": lambda: cores.instruction_descriptor(F16, 0x10200490),
    "tcgen05.mma of n 8 with 128 rows": lambda: cores.instruction_descriptor(F16, 0x08020490),
    "tmem of 32 rows": lambda: cores.tmem_lanes(32),
    "tcgen05.ld packed": lambda: cores.tmem_cells("tcgen05.ld.sync.aligned.32x32b.x2.pack::16b.b32", 0, 0),
    "tcgen05.ld of too many": lambda: cores.tmem_cells("tcgen05.ld.sync.aligned.16x256b.x64.b32", 0, 0),
    "tcgen05.ld of another warp": lambda: cores.tmem_cells("tcgen05.ld.sync.aligned.32x32b.x2.b32", 32 << 16, 2),
    "tcgen05.ld across warps": lambda: cores.tmem_cells("tcgen05.ld.sync.aligned.16x64b.x1.b32", 24 << 16, 0),
    "tcgen05.ld beyond the columns": lambda: cores.tmem_cells("tcgen05.ld.sync.aligned.32x32b.x64.b32", 449, 0),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_unknown_raises(name):
    with pytest.raises(cores.Unsupported, match=r"\w"):
        UNKNOWN[name]()
