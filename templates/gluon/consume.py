"""The warps that multiply at head dims up to 128. The numbers of the matmuls, the sizes and the channels are those of kernel.py."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from .barriers import THREADS, WARPS
from .dropout import drop, drop_and_scale, drop_words, own_drop_bits
from .functions import (
    await_matmuls,
    barrier,
    end_chain,
    in_accumulator_order,
    load_bits,
    probabilities,
    product,
    row_of,
    thread,
)
from .scores import kept_of, own_place
from .shares import gradients_of_scores, store_share
from .walk import chain_of, hides_some, step_of


@gluon.jit
def consume(walk, attention, bits, tiles, channels, outputs, shares):
    BITS, first_word = bits
    if attention.BLOCKS:
        first_word += thread()
    HEADS: gl.constexpr = attention.GROUP // attention.SETS
    q_tiles, do_tiles, k_tile, v_tile, neg_lse_tiles, delta_tiles, _p_tile, ds_tile, dq_tiles = tiles
    of_q, of_do, kv_full, of_dq = channels
    BLOCK_M: gl.constexpr = q_tiles.shape[3]
    BLOCK_N: gl.constexpr = k_tile.shape[2]
    HEAD_DIM: gl.constexpr = k_tile.shape[3]
    dtype: gl.constexpr = k_tile.dtype
    # Rows of Q whose S and dP stand in registers at a time. Beside 128 there is no room for what functions and dropout keep, and
    # under a mask in blocks they gain nothing.
    IS_PLAIN: gl.constexpr = not attention.BLOCKS and not attention.FUNCTIONS and attention.DROP_SCALE is None
    PART: gl.constexpr = BLOCK_M if IS_PLAIN else 64
    PARTS: gl.constexpr = BLOCK_M // PART
    SHARES: gl.constexpr = BLOCK_M // shares[0].shape[1] if len(shares) > 0 else 0  # stores of a step
    # The rows of S^T and dP^T, keys, are those of dK and dV: their registers are the left operands of the dV and dK matmuls. Two
    # warpgroups share dQ by rows, or by columns where it has 64 rows.
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, PART, 16])
    DKV_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HEAD_DIM, 16])
    OF_64: gl.constexpr = BLOCK_M // 64
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS // 2 * OF_64, 2 // OF_64], [16, HEAD_DIM * OF_64 // 2, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, DKV_LAYOUT, 2)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    k = k_tile.reshape([BLOCK_N, HEAD_DIM])
    v = v_tile.reshape([BLOCK_N, HEAD_DIM])
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
                v_operand = v
                if PARTS == 2:  # registers hold it: then dP's matmul reads half as much from shared memory
                    v_operand = v.load(gl.DotOperandLayout(0, S_LAYOUT, 2))
                next_i, _ = step_of(rows + row, 0, attention.BLOCKS)
                kept = kept_of(z, first_hq, j, own, BLOCK_N, attention, S_LAYOUT)
                drops = drop_words(own_bits, first_zh, j, next_i, attention, BLOCK_M, BLOCK_N)
                for step in range(steps):
                    i = next_i & 0xFFFF
                    hq = first_hq + step % HEADS
                    if HEADS > 1:
                        kept = kept_of(z, hq, j, own, BLOCK_N, attention, S_LAYOUT)
                    place = (z, hq, own, kept)
                    q_stage = of_q.stage(count)
                    stage = of_do.stage(count)
                    of_q.wait(count)
                    q = q_tiles.index(q_stage).reshape([BLOCK_M, HEAD_DIM])
                    do = do_tiles.index(stage).reshape([BLOCK_M, HEAD_DIM])
                    neg_lse = neg_lse_tiles.index(q_stage)
                    delta = delta_tiles.index(stage)
                    if PART == 128:
                        # All queries of a step at once: in parts half as wide the matmuls would read more of shared memory. There
                        # are no registers for what could be loaded ahead. P becomes the operand of DV's matmul when dP is gone.
                        # (1) S^T = K Q^T
                        s_t = product(k, q.permute([1, 0]), S_LAYOUT)
                        of_do.wait(count)
                        # (2) dP^T = V DO^T
                        dp_t = product(v, do.permute([1, 0]), S_LAYOUT)
                        if step > 0:  # dQ of the step before it: the fence waits under these two matmuls
                            fence_async_shared()
                            of_dq.arrive(count - 1)
                        s_t = await_matmuls(1, deps=[s_t])
                        shift = row_of(neg_lse, 0, PART, ROW_LAYOUT)
                        p_t, factor = probabilities(s_t, shift, 0, False, j * BLOCK_N, i * BLOCK_M, place, attention, S_LAYOUT)
                        dp_t = await_matmuls(0, deps=[dp_t])
                        ds_t = (factor * (dp_t - row_of(delta, 0, PART, ROW_LAYOUT))).to(dtype)
                        # (3) DV += P^T DO
                        dv = warpgroup_mma(gl.convert_layout(p_t.to(dtype), OPERAND), do, dv, is_async=True)
                        barrier()  # all warps have waited for the matmul that reads the last step's
                        ds_tile.store(ds_t)
                    else:
                        # A step is one part of 64 rows or two. S of the second is queued behind dP of the first, dV behind dP
                        # before dP is waited for, and so on: the tensor cores do not idle while the warps are busy with a part. A
                        # load or a store of a warp waits until the matmuls that it issued before have begun: so what a part needs
                        # is loaded before its matmuls are issued, and dQ stored when none is queued.
                        shift = row_of(neg_lse, 0, PART, ROW_LAYOUT)
                        # (1) S^T = K Q^T
                        s_t = product(k, q.slice(0, PART).permute([1, 0]), S_LAYOUT)
                        of_do.wait(count)
                        # (2) dP^T = V DO^T
                        dp_t = product(v_operand, do.slice(0, PART).permute([1, 0]), S_LAYOUT)
                        if step > 0:  # dQ of the step before it: the fence waits under these two matmuls
                            fence_async_shared()
                            of_dq.arrive(count - 1)
                        if PARTS == 2:
                            # (1) of the second part
                            next_s_t = product(k, q.slice(PART, PART).permute([1, 0]), S_LAYOUT)
                        has_hidden = False
                        word = 0
                        next_word = 0
                        if attention.BLOCKS:
                            has_hidden = hides_some(next_i, j, attention, BLOCK_N)
                            if has_hidden:
                                word = load_bits(BITS + (first_word + i * (THREADS * PARTS)))
                                if PARTS == 2:
                                    next_word = load_bits(BITS + (first_word + i * (2 * THREADS) + THREADS))
                        s_t = await_matmuls(PARTS, deps=[s_t])
                        p_t, factor = probabilities(
                            s_t, shift, word, has_hidden, j * BLOCK_N, i * BLOCK_M, place, attention, S_LAYOUT
                        )
                        delta_row = row_of(delta, 0, PART, ROW_LAYOUT)
                        # (3) DV += P^T DO
                        p_t = drop(p_t, drops, 0, attention, S_LAYOUT)
                        dv = warpgroup_mma(gl.convert_layout(p_t.to(dtype), OPERAND), do.slice(0, PART), dv, is_async=True)
                        dp_t = await_matmuls(PARTS, deps=[dp_t])
                        dp_t = drop_and_scale(dp_t, drops, 0, attention, S_LAYOUT)
                        ds_t, share_t = gradients_of_scores(
                            p_t, factor, dp_t - delta_row, j * BLOCK_N, i * BLOCK_M, place, attention, shares, dtype, S_LAYOUT
                        )
                        if SHARES > 0 and PARTS == 2:
                            store_share(share_t, shares, SHARES * count, 0)
                        barrier()  # all warps have waited for the matmul that reads the last step's
                        ds_tile.slice(0, PART, dim=1).store(ds_t)
                        if PARTS == 2:
                            # (2) of the second part, (5) of the first
                            dp_t = product(v_operand, do.slice(PART, PART).permute([1, 0]), S_LAYOUT)
                            dk = warpgroup_mma(gl.convert_layout(ds_t, OPERAND), q.slice(0, PART), dk, is_async=True)
                            shift = row_of(neg_lse, PART, PART, ROW_LAYOUT)
                            s_t = await_matmuls(3, deps=[next_s_t])
                            p_t, factor = probabilities(
                                s_t,
                                shift,
                                next_word,
                                has_hidden,
                                j * BLOCK_N,
                                i * BLOCK_M + PART,
                                place,
                                attention,
                                S_LAYOUT,
                            )
                            delta_row = row_of(delta, PART, PART, ROW_LAYOUT)
                            # (3) of the second part
                            p_t = drop(p_t, drops, 1, attention, S_LAYOUT)
                            dv = warpgroup_mma(gl.convert_layout(p_t.to(dtype), OPERAND), do.slice(PART, PART), dv, is_async=True)
                            dp_t = await_matmuls(2, deps=[dp_t])
                            change = drop_and_scale(dp_t, drops, 1, attention, S_LAYOUT) - delta_row
                            ds_t, share_t = gradients_of_scores(
                                p_t, factor, change, j * BLOCK_N, i * BLOCK_M + PART, place, attention, shares, dtype, S_LAYOUT
                            )
                            ds_tile.slice(PART, PART, dim=1).store(ds_t)
                    # (5) DK += dS^T Q: from registers, so that it runs under the fence and the barrier that (4) needs
                    dk = warpgroup_mma(gl.convert_layout(ds_t, OPERAND), q.slice((PARTS - 1) * PART, PART), dk, is_async=True)
                    if SHARES > 0:
                        store_share(share_t, shares, SHARES * count + PARTS - 1, 0)  # its fence is for dS too
                    else:
                        fence_async_shared()
                    barrier()
                    # (4) DQ = dS K
                    dq = product(ds_tile.permute([1, 0]), k, DQ_LAYOUT)
                    # Read under these two matmuls, which are the longest wait, and never past the chain.
                    next_step = gl.minimum(step + 1, steps - 1)
                    next_i, _ = step_of(rows + row, next_step // HEADS, attention.BLOCKS)
                    drops = drop_words(own_bits, first_zh + next_step % HEADS, j, next_i, attention, BLOCK_M, BLOCK_N)
                    of_dq.wait_for_stage(count)
                    dq, dv, dk = await_matmuls(0, deps=[dq, dv, dk])
                    of_do.arrive(count)
                    of_q.arrive(count)
                    dq_tiles.index(of_dq.stage(count)).store(in_accumulator_order(dq, dq_tiles.shape[2]))
                    if SHARES > PARTS:
                        store_share(share_t, shares, SHARES * count + PARTS, 1)
                    count += 1
                fence_async_shared()
                of_dq.arrive(count - 1)
                if attention.BY_TMA:  # until both places of dQ are free
                    of_dq.wait_for_stage(count)
                    of_dq.wait_for_stage(count + 1)
            end_chain(outputs, head, j, dk, dv, dq_tiles, attention, DKV_LAYOUT)
