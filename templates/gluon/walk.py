"""How each partition of the Gluon kernel walks its CTA's chains, by a table, by rows of its own or by a mask's lists."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..positions import straddling_chain, straddling_step
from .barriers import WARPS
from .functions import barrier, of_first_lane


class Attention(NamedTuple):
    """What a launch computes. Names in capitals are compiled in.

    heads: kv heads of all batches. hkv: those of one. nq: Q tiles of a head. GROUP: query heads of a kv head, in SETS.
    SHARED_ROW: whether the table has one row for all chains. ROUND_ROBIN: 0 if the table has the rows, else Q tiles of a KV tile;
    then it may have none. BLOCKS: Q tiles of a block of the mask, 0 if the mask is not in blocks. EVEN_N: whether kv_len is a
    multiple of the KV tile. SEGMENTS: of the queries, each with gradients of its own. SLICED: whether a launch has a slice of the
    KV tiles. KEY_DIM and VALUE_DIM: columns of key and of value.
    FUNCTIONS: whether there is a function of the scores; scores.py has the next four fields, of which DERIVATIVE is None for 1.
    drop_bits: int32, what templates/dropout_bits.py.jinja writes, of a forward with dropout. DROP_SCALE: what that multiplied the
    elements of P with that it kept; None where it dropped nothing.
    SHARE: that of shares.py, None where no gradient of a captured tensor is wanted. BY_TMA: whether TMA stores dK and dV.
    """

    heads: Any
    hkv: Any
    nq: Any
    kv_len: Any
    GROUP: Any
    SETS: Any
    CAUSAL: Any
    SHARED_ROW: Any
    ROUND_ROBIN: Any
    BLOCKS: Any
    EVEN_N: Any
    SCALE: Any
    SCALE_LOG2E: Any
    KEY_DIM: Any = 0
    VALUE_DIM: Any = 0
    q_len: Any = 0
    EVEN_M: Any = True
    FUNCTIONS: Any = False
    BEFORE: Any = None
    SCORES: Any = None
    DERIVATIVE: Any = None
    captures: Any = ()
    SEGMENTS: Any = 1
    SLICED: Any = False
    drop_bits: Any = ()
    DROP_SCALE: Any = None
    SHARE: Any = None
    BY_TMA: Any = False


class Walk(NamedTuple):
    """A worker's turns in a table, whose layout is that of dash_inductor/schedule/packing.py.

    own_row: where the partition may write a chain's row. own_role, first_head and rounds: of `turns_in_table`. Under a mask in
    blocks there is one turn, of `chain`.
    """

    table: Any
    own_row: Any
    own_role: Any
    first_head: Any
    rounds: Any
    chain: Any


@gluon.jit
def turns_in_table(table, ticket, attention):
    # (role, first head, rounds) of the worker that drew `ticket`.
    roles = gl.load(table)
    heads_in_flight = gl.load(table + 1)
    slots = gl.load(table + 2)
    own_role = ticket % roles
    first_head = ticket // roles
    rounds = 0
    if first_head < heads_in_flight:
        rounds = gl.cdiv(attention.heads - first_head, heads_in_flight) * slots
    if attention.ROUND_ROBIN:
        queue = gl.load(table + 6)
        if queue > 0:
            rounds = gl.cdiv(attention.heads * queue - own_role, roles) * slots
    return own_role, first_head, rounds


@gluon.jit
def chain_of(walk, turn, attention, WARPS: gl.constexpr):
    # The chain of a worker's turn: its KV tile or -1, its steps of a query head, where its row begins behind a pointer, the
    # pointer, its kv head, its set of query heads, and the rank from which its ranks are counted. WARPS: how many the partition
    # has.
    of_set = 0
    rank = 0
    if attention.BLOCKS:
        j, steps, row, rows, head, of_set, rank = walk.chain
    elif attention.ROUND_ROBIN:
        if gl.load(walk.table + 6) > 0:
            j, steps, row, rows, head = chain_in_queue(walk, turn, attention.CAUSAL, attention.ROUND_ROBIN, WARPS)
        else:
            j, steps, row, rows, head = chain_in_table(walk, turn)
    else:
        j, steps, row, rows, head = chain_in_table(walk, turn)
        if attention.SHARED_ROW:
            rank = j  # chain j adds after the j chains before it
    return j, steps, row, rows, head, of_set, rank


@gluon.jit
def chain_in_table(walk, turn):
    table = walk.table
    roles = gl.load(table)
    heads_in_flight = gl.load(table + 1)
    slots = gl.load(table + 2)
    mirrored = gl.load(table + 3)
    n_kv = gl.load(table + 4)
    row_length = gl.load(table + 5)
    chains = 8
    lengths = chains + slots * roles
    role = walk.own_role
    if (mirrored & turn) != 0:
        role = roles - 1 - walk.own_role
    j = gl.load(table + chains + (turn % slots) * roles + role)
    steps = 0
    if j >= 0:
        steps = gl.load(table + lengths + j)
    return j, steps, lengths + n_kv + j * row_length, table, walk.first_head + (turn // slots) * heads_in_flight


@gluon.jit
def chain_in_queue(walk, turn, CAUSAL: gl.constexpr, RATIO: gl.constexpr, WARPS: gl.constexpr):
    # The chain of a head that straddles rounds. The partition writes its row: (Q tile | rank << 16) of each step, as a table has
    # it.
    table = walk.table
    roles = gl.load(table)
    slots = gl.load(table + 2)
    n = gl.load(table + 4)
    n_q = gl.load(table + 5)
    queue = gl.load(table + 6)
    begin = (turn // slots) * roles  # the round's first unit in the queue of all heads
    head = (begin + walk.own_role) // queue
    begin -= head * queue
    j = straddling_chain(begin, walk.own_role, turn % slots, n, CAUSAL)
    steps = 0
    if j >= 0:
        steps = n_q
        if CAUSAL:
            steps -= j * RATIO
        THREADS: gl.constexpr = 32 * WARPS
        barrier()  # all threads have read the row of the chain before
        for start in range(0, steps, THREADS):
            t = start + gl.arange(0, THREADS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
            i, rank = straddling_step(j, t, begin, queue, roles, n_q, n, RATIO, CAUSAL)
            gl.store(walk.own_row + t, i | (rank << 16), mask=t < steps)
        barrier()  # all of them read what each has written
    return j, steps, 0, walk.own_row, head


@gluon.jit
def of_slice(slices, attention, BLOCK_N: gl.constexpr):
    # The first KV tile of a launch, how many it has, and how many the launches before it have: those of the last keys come first.
    # slices: KV tiles of a slice and the number of this one, nothing for a launch of all keys.
    n_kv = gl.cdiv(attention.kv_len, BLOCK_N)
    first = 0
    tiles = n_kv
    before = 0
    if attention.SLICED:
        kv_tiles, number = slices
        before = number * kv_tiles
        first = gl.maximum(0, n_kv - before - kv_tiles)
        tiles = n_kv - before - first
    return first, tiles, before


@gluon.jit
def chain_in_lists(table, lists, sizes, slices, ticket, attention, BLOCK_N: gl.constexpr):
    # Under a mask in blocks: (chain, segment, row of bits, parts, place). chain: that of a CTA, or its part of one, with j = -1 if
    # it has none. segment: that of its queries; lower ones have lower tickets. parts: how many sum dK and dV, of which this one is
    # the place-th. The walk is that of block_mask.py.jinja: the last KV tile of a head, or of a band of all heads, has the lowest
    # ticket, and the KV tiles of the block after j add before it does. Query heads of a group may have masks of their own if each
    # is a set.
    first_tile, tiles, tiles_before = of_slice(slices, attention, BLOCK_N)
    if attention.SLICED:
        ticket -= tiles_before * (attention.heads * attention.SETS * attention.SEGMENTS)
    segment = 0
    if attention.SEGMENTS > 1:
        of_segment = tiles * (attention.heads * attention.SETS)
        segment = ticket // of_segment
        ticket %= of_segment
    mask_z, mask_h, kv_blocks, q_blocks, width = sizes
    GROUP: gl.constexpr = attention.GROUP
    SETS: gl.constexpr = attention.SETS
    BANDS: gl.constexpr = lists.bands
    KV_TILES: gl.constexpr = lists.kv_tiles
    HEADS: gl.constexpr = GROUP // SETS
    n_kv = gl.cdiv(attention.kv_len, BLOCK_N)
    band = 0
    of_set = ticket % SETS
    if BANDS == 1:
        head = ticket // SETS // tiles
        j = first_tile + tiles - 1 - ticket // SETS % tiles
    else:
        unit = ticket
        kv_tiles = n_kv
        for later in gl.static_range(1, BANDS):
            in_band = kv_tiles * SETS * attention.heads
            if (band == later - 1) & (unit >= in_band):
                unit -= in_band
                band += 1
                kv_tiles = gl.minimum(n_kv, gl.cdiv(gl.cdiv(n_kv, KV_TILES), 1 << later) * KV_TILES)
        head = unit // SETS % attention.heads
        j = kv_tiles - 1 - unit // (SETS * attention.heads)
    block = j // KV_TILES
    mask = head // attention.hkv % mask_z * mask_h + (head % attention.hkv * GROUP + of_set * HEADS) % mask_h
    listed = block  # a row of the mask
    if attention.SEGMENTS > 1:
        listed = block * attention.SEGMENTS + segment
    row = mask * kv_blocks + listed
    rank = gl.minimum(KV_TILES, n_kv - block * KV_TILES) - 1 - j % KV_TILES
    ends = lists.steps + row * width
    steps = 0
    if listed < kv_blocks:
        steps = gl.load(ends + (width - 1))
    first = 0
    filled = 1
    before = 0
    if BANDS > 1:
        any_block = gl.arange(0, lists.most_chains, layout=gl.BlockedLayout([4], [32], [WARPS], [0]))
        totals = lists.steps + (mask * kv_blocks + any_block) * width + (width - 1)
        longest = of_first_lane(gl.max(gl.load(totals, mask=any_block < kv_blocks, other=0), 0))
        is_part = (steps == 0) & (band == 0)  # zeros are written by who has no steps, once
        if longest * HEADS < lists.least_steps:
            is_part = band == 0
        elif steps > 0:
            filled = 0
            for b in gl.static_range(BANDS):
                begin = 0
                if b > 0:
                    begin = gl.load(ends + (b - 1))
                end = gl.load(ends + b)
                if b == band:
                    first = begin
                    steps = end - begin
                    before = filled
                if end > begin:
                    filled += 1
            is_part = steps > 0
        if not is_part:
            j = -1
            steps = 0
    chain = j, steps, row * q_blocks + first // attention.BLOCKS, table, head, of_set, rank
    of_bits = mask * n_kv + j
    if attention.SLICED:
        of_bits = mask * slices[0] + j - first_tile
    return chain, segment, of_bits, filled * SETS, before * SETS + of_set


@gluon.jit
def step_of(rows, turn, BLOCKS: gl.constexpr):
    # (Q tile, rank) of a step of one query head; 0x10000 more than the Q tile where the mask hides some of it. BLOCKS: Q tiles of a
    # block of the mask, 0 if there is none.
    if BLOCKS:
        entry = gl.load(rows + turn // BLOCKS)
        i = (entry & 0x7FFF) * BLOCKS + turn % BLOCKS + ((~entry & 0x8000) << 1)
    else:
        entry = gl.load(rows + turn)
        i = entry & 0xFFFF
    return i, entry >> 16


@gluon.jit
def hides_some(i, j, attention, BLOCK_N: gl.constexpr):
    # Under a mask in blocks: whether the mask hides some of the tile of `step_of` and KV tile j, or the end of the keys does.
    hidden = (i & 0x10000) != 0
    if not attention.EVEN_N:
        hidden = hidden | ((j + 1) * BLOCK_N > attention.kv_len)
    return hidden
