"""The warp that loads: tensors in global memory into the stages of shared memory, by TMA."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .barriers import KV_READ, MEET, at_barrier
from .functions import async_load
from .walk import chain_of, step_of


@gluon.jit
def produce(walk, attention, sources, tiles, channels):
    HEADS: gl.constexpr = attention.GROUP // attention.SETS
    q_source, do_source, k_source, v_source, neg_lse_source, delta_source = sources
    q_tiles, do_tiles, k_tile, v_tile, neg_lse_tiles, delta_tiles = tiles
    of_q, of_do, kv_full = channels
    BLOCK_M: gl.constexpr = q_tiles.shape[3]
    BLOCK_N: gl.constexpr = k_tile.shape[2]
    HEAD_DIM: gl.constexpr = k_tile.shape[3]
    count = 0  # of the steps of all chains
    for turn in range(walk.rounds):
        j, steps, row, rows, head, of_set, _rank = chain_of(walk, turn, attention, WARPS=1)
        steps *= HEADS
        if steps > 0:
            z = head // attention.hkv
            h = head % attention.hkv
            mbarrier.expect(kv_full, 2 * BLOCK_N * HEAD_DIM * 2)
            async_load(k_source, [z, h, j * BLOCK_N, 0], kv_full, k_tile)
            async_load(v_source, [z, h, j * BLOCK_N, 0], kv_full, v_tile)
            for step in range(steps):
                i, _rank = step_of(rows + row, step // HEADS, attention.BLOCKS)
                i &= 0xFFFF
                hq = h * attention.GROUP + of_set * HEADS + step % HEADS
                first_row = ((z * attention.hkv * attention.GROUP + hq) * attention.nq + i) * BLOCK_M
                stage = of_q.stage(count)
                of_q.meet_before(count, step)
                arrived = of_q.mbarrier(count)
                mbarrier.expect(arrived, BLOCK_M * HEAD_DIM * 2 + BLOCK_M * 4)
                async_load(q_source, [z, hq, i * BLOCK_M, 0], arrived, q_tiles.index(stage))
                async_load(neg_lse_source, [first_row], arrived, neg_lse_tiles.index(stage))
                stage = of_do.stage(count)
                of_do.meet_before(count, step)
                arrived = of_do.mbarrier(count)
                mbarrier.expect(arrived, BLOCK_M * HEAD_DIM * 2 + BLOCK_M * 4)
                async_load(do_source, [z, hq, i * BLOCK_M, 0], arrived, do_tiles.index(stage))
                async_load(delta_source, [first_row], arrived, delta_tiles.index(stage))
                count += 1
            # The end of the steps that were not waited for: then K and V are free, and every stage.
            of_do.meet_last(count, steps)
            of_q.meet_last(count, steps)
        if HEAD_DIM == 256 and attention.BY_TMA:  # noqa: SIM102 - an `if` on what Triton knows is no condition
            if j >= 0:
                at_barrier(MEET, KV_READ)
