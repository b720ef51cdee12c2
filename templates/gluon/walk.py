"""How each partition of the Gluon kernel walks its CTA's chains, by a table, by rows of its own or by a mask's lists."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..positions import straddling_chain, straddling_step
from .functions import barrier

STAGES = gl.constexpr(2)  # of what a step reads


@gluon.jit
def chain_of(
    walk,
    turn,
    CAUSAL: gl.constexpr,
    ROUND_ROBIN: gl.constexpr,
    BLOCKS: gl.constexpr,
    WARPS: gl.constexpr,
):
    # Of a worker's turn: KV tile or -1, its steps of a query head, its row's place behind a pointer, the pointer, its kv head, its
    # set of query heads, and the rank from which its ranks are counted. The table: dash_inductor/schedule/packing.py.
    # ROUND_ROBIN: 0 if the table has the rows, else Q tiles of a KV tile; then it may have none. WARPS: of the partition.
    of_set = 0
    rank = 0
    if BLOCKS:
        _TABLE, _own_row, _own_role, _first_head, _rounds, chain = walk
        j, steps, row, rows, head, of_set, rank = chain
    elif ROUND_ROBIN:
        if gl.load(walk[0] + 6) > 0:
            j, steps, row, rows, head = chain_in_queue(walk, turn, CAUSAL, ROUND_ROBIN, WARPS)
        else:
            j, steps, row, rows, head = chain_in_table(walk, turn)
    else:
        j, steps, row, rows, head = chain_in_table(walk, turn)
    return j, steps, row, rows, head, of_set, rank


@gluon.jit
def chain_in_table(walk, turn):
    TABLE, _own_row, own_role, first_head, _rounds, _chain = walk
    roles = gl.load(TABLE)
    heads_in_flight = gl.load(TABLE + 1)
    slots = gl.load(TABLE + 2)
    mirrored = gl.load(TABLE + 3)
    n_kv = gl.load(TABLE + 4)
    row_length = gl.load(TABLE + 5)
    chains = 8
    lengths = chains + slots * roles
    role = own_role
    if (mirrored & turn) != 0:
        role = roles - 1 - own_role
    j = gl.load(TABLE + chains + (turn % slots) * roles + role)
    steps = 0
    if j >= 0:
        steps = gl.load(TABLE + lengths + j)
    return j, steps, lengths + n_kv + j * row_length, TABLE, first_head + (turn // slots) * heads_in_flight


@gluon.jit
def chain_in_queue(walk, turn, CAUSAL: gl.constexpr, RATIO: gl.constexpr, WARPS: gl.constexpr):
    # Of a head that straddles rounds. The partition writes the chain's row: (Q tile | rank << 16) of each step, as a table has it.
    TABLE, own_row, own_role, _first_head, _rounds, _chain = walk
    roles = gl.load(TABLE)
    slots = gl.load(TABLE + 2)
    n = gl.load(TABLE + 4)
    n_q = gl.load(TABLE + 5)
    queue = gl.load(TABLE + 6)
    begin = (turn // slots) * roles  # the round's first unit in the queue of all heads
    head = (begin + own_role) // queue
    begin -= head * queue
    j = straddling_chain(begin, own_role, turn % slots, n, CAUSAL)
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
            gl.store(own_row + t, i | (rank << 16), mask=t < steps)
        barrier()  # all of them read what each has written
    return j, steps, 0, own_row, head


@gluon.jit
def chain_in_lists(
    ROWS,
    STEPS,
    sizes,
    ticket,
    KV_HEADS,
    HKV,
    NKV,
    GROUP: gl.constexpr,
    BLOCKS: gl.constexpr,
    KV_TILES: gl.constexpr,
    BANDS: gl.constexpr,
    SETS: gl.constexpr,
    MOST_CHAINS: gl.constexpr,
    LEAST_STEPS: gl.constexpr,
):
    # Under a mask in blocks: the chain of a CTA, or its part of one, j = -1 if it has none; the mask's number; how many parts sum
    # dK and dV, and which of them this is. As in block_mask.py.jinja the last KV tile of a head has the lowest ticket, or of a band
    # of all heads, and of the KV tiles of a block those after j add first. WIDTH: of a row of STEPS. Query heads of a group may
    # have masks of their own if each is a set.
    MASK_Z, MASK_H, KV_BLOCKS, Q_BLOCKS, WIDTH = sizes
    HEADS: gl.constexpr = GROUP // SETS
    band = 0
    of_set = ticket % SETS
    if BANDS == 1:
        head = ticket // SETS // NKV
        j = NKV - 1 - ticket // SETS % NKV
    else:
        unit = ticket
        kv_tiles = NKV
        for later in gl.static_range(1, BANDS):
            in_band = kv_tiles * SETS * KV_HEADS
            if (band == later - 1) & (unit >= in_band):
                unit -= in_band
                band += 1
                kv_tiles = gl.minimum(NKV, gl.cdiv(gl.cdiv(NKV, KV_TILES), 1 << later) * KV_TILES)
        head = unit // SETS % KV_HEADS
        j = kv_tiles - 1 - unit // (SETS * KV_HEADS)
    block = j // KV_TILES
    mask = head // HKV % MASK_Z * MASK_H + (head % HKV * GROUP + of_set * HEADS) % MASK_H
    row = mask * KV_BLOCKS + block
    rank = gl.minimum(KV_TILES, NKV - block * KV_TILES) - 1 - j % KV_TILES
    ENDS = STEPS + row * WIDTH
    steps = 0
    if block < KV_BLOCKS:
        steps = gl.load(ENDS + (WIDTH - 1))
    first = 0
    filled = 1
    before = 0
    if BANDS > 1:
        any_block = gl.arange(0, MOST_CHAINS, layout=gl.BlockedLayout([4], [32], [8], [0]))
        totals = STEPS + (mask * KV_BLOCKS + any_block) * WIDTH + (WIDTH - 1)
        longest = gl.max(gl.load(totals, mask=any_block < KV_BLOCKS, other=0), 0)
        is_part = (steps == 0) & (band == 0)  # zeros are written by who has no steps, once
        if longest * HEADS < LEAST_STEPS:
            is_part = band == 0
        elif steps > 0:
            filled = 0
            for b in gl.static_range(BANDS):
                begin = 0
                if b > 0:
                    begin = gl.load(ENDS + (b - 1))
                end = gl.load(ENDS + b)
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
    chain = j, steps, row * Q_BLOCKS + first // BLOCKS, ROWS, head, of_set, rank
    return chain, mask, filled * SETS, before * SETS + of_set


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
