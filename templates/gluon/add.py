"""The warps of the Gluon kernel that add dQ: from shared memory into global memory, in the order of ranks."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .functions import COMPLETE, READ, READ_BUT_LAST, async_add, async_store, await_in_warp, release, wait_for_rank
from .walk import chain_of, step_of


@gluon.jit
def put(dq_target, place, dq, rank):
    # The first contributor stores: the scratch needs no zero fill, and what stood in it cannot survive.
    ROWS: gl.constexpr = dq_target.block_shape[0]
    if rank == 0:
        async_store(dq_target, [place * ROWS, 0], dq)
    else:
        async_add(dq_target, [place * ROWS, 0], dq)


@gluon.jit
def add_in_order(walk, attention, sums, STAGE: gl.constexpr):
    # The steps whose dQ has this stage. They are counted one by one: of a range from (count + STAGE) % STAGES on, Triton 3.6 and
    # 3.7 take the beginning for a constant.
    dq_target, dq_tiles, of_dq, SEMAPHORES, REPORT = sums
    HEADS: gl.constexpr = attention.GROUP // attention.SETS
    count = 0  # of the steps of all chains
    for turn in range(walk.rounds):
        _j, steps, row, rows, head, of_set, first_rank = chain_of(walk, turn, attention, WARPS=1)
        for step in range(steps * HEADS):
            if of_dq.stage(count) == STAGE:
                i, rank = step_of(rows + row, step // HEADS, attention.BLOCKS)
                index = (head * attention.GROUP + of_set * HEADS + step % HEADS) * attention.nq + (i & 0xFFFF)
                rank += first_rank
                # The rank first: it may have come before dQ is there.
                wait_for_rank(SEMAPHORES, index, rank, attention.nq, REPORT)
                of_dq.meet(STAGE)
                put(dq_target, index, dq_tiles.index(STAGE), rank)
                await_in_warp(READ)
                mbarrier.arrive(of_dq.mbarrier(STAGE), count=1)
                await_in_warp(COMPLETE)
                release(SEMAPHORES + index)
            count += 1


@gluon.jit
def add_half_in_order(walk, attention, sums, HALF: gl.constexpr):
    # At head dim 256: one half of the columns of each dQ. The second part of the second half takes the first place, where the first
    # part of the first half was.
    dq_target, dq_tiles, of_dq, SEMAPHORES, REPORT = sums
    HEADS: gl.constexpr = attention.GROUP // attention.SETS
    first_tile, second_tile, third_tile = dq_tiles
    SEMAPHORES += HALF * (attention.heads * attention.GROUP * attention.nq)
    for turn in range(walk.rounds):
        _j, steps, row, rows, head, of_set, first_rank = chain_of(walk, turn, attention, WARPS=1)
        for step in range(steps * HEADS):
            i, rank = step_of(rows + row, step // HEADS, attention.BLOCKS)
            index = (head * attention.GROUP + of_set * HEADS + step % HEADS) * attention.nq + (i & 0xFFFF)
            rank += first_rank
            # The rank first: it may have come before the half is there.
            wait_for_rank(SEMAPHORES, index, rank, attention.nq, REPORT)
            of_dq.meet(HALF)
            if HALF == 0:
                put(dq_target, 4 * index, first_tile, rank)
                put(dq_target, 4 * index + 1, second_tile, rank)
                await_in_warp(READ_BUT_LAST)
                mbarrier.arrive(of_dq.mbarrier(0), count=1)
            else:
                put(dq_target, 4 * index + 2, third_tile, rank)
                put(dq_target, 4 * index + 3, first_tile, rank)
            await_in_warp(READ)
            mbarrier.arrive(of_dq.mbarrier(1), count=1)
            await_in_warp(COMPLETE)
            release(SEMAPHORES + index)
