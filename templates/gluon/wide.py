"""The warps that multiply at head dim 256: tiles of 64 queries x 64 keys, whose S and dP two warpgroups share by queries.

The numbers of the matmuls, the sizes and the channels are those of kernel.py. dK and dV of 256 columns take 128 registers of a
thread, so there are no more keys. P goes through shared memory as dS does. dQ is made in halves of its columns, each stored in two
parts, in three places: the second half takes the third and the first. dQ's channel has a named barrier for each half, and two
mbarriers: TMA has read the first place of the first half, and has read all of both.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from .barriers import ARRIVE, KV_READ, WARPGROUP, WARPS, at_barrier
from .dropout import drop, drop_and_scale, drop_words, own_drop_bits
from .functions import (
    await_matmuls,
    barrier,
    end_chain,
    in_accumulator_order,
    load_16_bits,
    probabilities,
    product,
    row_of,
    thread,
)
from .scores import kept_of, own_place
from .walk import chain_of, hides_some, step_of


@gluon.jit
def store_half(dq, first_tile, second_tile):
    # A half of a step's dQ, in two parts.
    ROWS: gl.constexpr = first_tile.shape[0]
    WIDTH: gl.constexpr = first_tile.shape[1]
    first, second = gl.split(in_accumulator_order(dq, WIDTH).reshape([2, ROWS, WIDTH]).permute([1, 2, 0]))
    first_tile.store(first)
    second_tile.store(second)


@gluon.jit
def half_stored(of_dq, HALF: gl.constexpr):
    fence_async_shared()
    of_dq.arrive(HALF)


@gluon.jit
def consume_wide(walk, attention, bits, tiles, channels, outputs):
    BITS, first_bits = bits
    if attention.BLOCKS:
        # A word has the bits of a thread in each warpgroup, 16 of each, since each has half of the queries.
        BITS = BITS.to(gl.pointer_type(gl.int16), bitcast=True)
        first_bits = 2 * (first_bits + thread() % WARPGROUP) + thread() // WARPGROUP
    HEADS: gl.constexpr = attention.GROUP // attention.SETS
    q_tiles, do_tiles, k_tile, v_tile, neg_lse_tiles, delta_tiles, p_tile, ds_tile, dq_tiles = tiles
    of_q, of_do, kv_full, of_dq = channels
    BLOCK_M: gl.constexpr = q_tiles.shape[3]
    BLOCK_N: gl.constexpr = k_tile.shape[2]
    HEAD_DIM: gl.constexpr = k_tile.shape[3]
    HALF: gl.constexpr = HEAD_DIM // 2
    dtype: gl.constexpr = k_tile.dtype
    # Two warpgroups share all of them by columns: S^T and dP^T by queries. By keys there is one tile of 64 for both.
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS // 2, 2], [16, BLOCK_M // 2, 16])
    DKV_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS // 2, 2], [16, HALF, 16])
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS // 2, 2], [16, HALF // 2, 16])
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    k = k_tile.reshape([BLOCK_N, HEAD_DIM])
    v = v_tile.reshape([BLOCK_N, HEAD_DIM])
    do = do_tiles.index(0).reshape([BLOCK_M, HEAD_DIM])
    delta = delta_tiles.index(0)
    own = (0, 0)
    if attention.FUNCTIONS:
        own = own_place(BLOCK_N)
    own_bits = own_drop_bits(attention, BLOCK_N)
    count = 0  # of the steps of all chains
    kv_phase = 0
    for turn in range(walk.rounds):
        j, steps, row, rows, head, of_set, _rank = chain_of(walk, turn, attention, WARPS)
        z = head // attention.hkv
        first_hq = head % attention.hkv * attention.GROUP + of_set * HEADS
        first_zh = head * attention.GROUP + of_set * HEADS
        if j >= 0:
            dk = gl.zeros([BLOCK_N, HEAD_DIM], gl.float32, DKV_LAYOUT)
            dv = gl.zeros([BLOCK_N, HEAD_DIM], gl.float32, DKV_LAYOUT)
            steps *= HEADS
            if steps > 0:
                mbarrier.wait(kv_full, kv_phase)
                kv_phase ^= 1
                next_i, _ = step_of(rows + row, 0, attention.BLOCKS)
                kept = kept_of(z, first_hq, j, own, BLOCK_N, attention, S_LAYOUT)
                drops = drop_words(own_bits, first_zh, j, next_i, attention, BLOCK_M, BLOCK_N)
                for step in range(steps):
                    i = next_i & 0xFFFF
                    hq = first_hq + step % HEADS
                    if HEADS > 1:
                        kept = kept_of(z, hq, j, own, BLOCK_N, attention, S_LAYOUT)
                    place = (z, hq, own, kept)
                    stage = of_q.stage(count)
                    of_q.wait(count)
                    q = q_tiles.index(stage).reshape([BLOCK_M, HEAD_DIM])
                    # As in consume.py, what a part needs is loaded before its matmuls are issued.
                    shift = row_of(neg_lse_tiles.index(stage), 0, BLOCK_M, ROW_LAYOUT)
                    # (1) S^T = K Q^T
                    s_t = product(k, q.permute([1, 0]), S_LAYOUT)
                    of_do.wait(count)
                    # (2) dP^T = V DO^T
                    dp_t = product(v, do.permute([1, 0]), S_LAYOUT)
                    if step > 0:  # of the step before it
                        half_stored(of_dq, 1)
                    has_hidden = False
                    word = 0
                    if attention.BLOCKS:
                        has_hidden = hides_some(next_i, j, attention, BLOCK_N)
                        if has_hidden:
                            word = load_16_bits(BITS + (first_bits + i * (BLOCK_M * BLOCK_N // 16)))
                    s_t = await_matmuls(1, deps=[s_t])
                    p_t, factor = probabilities(s_t, shift, word, has_hidden, j * BLOCK_N, i * BLOCK_M, place, attention, S_LAYOUT)
                    p_t = drop(p_t, drops, 0, attention, S_LAYOUT)
                    p_tile.store(p_t.to(dtype))
                    delta_row = row_of(delta, 0, BLOCK_M, ROW_LAYOUT)
                    fence_async_shared()
                    barrier()
                    # (3) DV += P^T DO
                    dv = warpgroup_mma(p_tile, do, dv, is_async=True)
                    dp_t = await_matmuls(1, deps=[dp_t])
                    dp_t = drop_and_scale(dp_t, drops, 0, attention, S_LAYOUT)
                    ds_tile.store((factor * (dp_t - delta_row)).to(dtype))
                    fence_async_shared()
                    barrier()
                    # (4) DQ = dS K, the first half of its columns
                    dq = product(ds_tile.permute([1, 0]), k.slice(0, HALF, dim=1), DQ_LAYOUT)
                    # (5) DK += dS^T Q
                    dk = warpgroup_mma(ds_tile, q, dk, is_async=True)
                    # Read under these two matmuls, and never past the chain.
                    next_step = gl.minimum(step + 1, steps - 1)
                    next_i, _ = step_of(rows + row, next_step // HEADS, attention.BLOCKS)
                    drops = drop_words(own_bits, first_zh + next_step % HEADS, j, next_i, attention, BLOCK_M, BLOCK_N)
                    mbarrier.wait(of_dq.mbarrier(1), (count + 1) % 2)  # both halves of the step before are read
                    dq, dv = await_matmuls(1, deps=[dq, dv])
                    of_do.arrive(count)
                    store_half(dq, dq_tiles[0], dq_tiles[1])
                    half_stored(of_dq, 0)
                    # (4) the second half, behind (5), which runs while the first half is on its way to global memory.
                    dq = product(ds_tile.permute([1, 0]), k.slice(HALF, HALF, dim=1), DQ_LAYOUT)
                    barrier()  # between stores to the first place: Triton's own would stand behind the waits
                    mbarrier.wait(of_dq.mbarrier(0), count % 2)  # the first place is read
                    dq, dk = await_matmuls(0, deps=[dq, dk])
                    of_q.arrive(count)
                    store_half(dq, dq_tiles[2], dq_tiles[0])
                    count += 1
                half_stored(of_dq, 1)
            end_chain(outputs, head, j, dk, dv, (k_tile, v_tile), attention, DKV_LAYOUT)
            if attention.BY_TMA:
                at_barrier(ARRIVE, KV_READ)
