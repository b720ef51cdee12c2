"""The one-pass kernel for Hopper, warp-specialised, in Gluon. It has never run on a GPU.

The gradients of softmax(SCALE*Q K^T) V, by the matmuls of each tile, transposed so that keys are rows:

    P^T = exp2(SCALE_LOG2E*K Q^T + NEG_LSE)    dS^T = P^T*(V DO^T - DELTA)    DV = P^T DO    DK = SCALE*dS^T Q    DQ = dS K

DQ is left unscaled. Shapes stand at `sdpa_backward`. The contract is that of `one_pass.py.jinja`: the same table, ticket and
semaphores, the same sums in the same order. One CTA is three partitions, which walk the table each by itself and meet at barriers:

    consume     8 warps  the five matmuls; P and dS go from registers into dV and dK, dS through shared memory into dQ, and dQ from
                         registers into global memory: rank 0 stores, the others add
    produce     1 warp   TMA loads: K and V once per chain; Q, grad_out, -lse*log2(e) and delta once per step, into a ring
    keep_order  1 warp   waits for the step's rank and releases the step's semaphore

    barrier    arrives                     waits        says
    kv_full    TMA, by bytes               consume      K and V of a chain are there
    full       TMA, by bytes, a stage      consume      what a step reads is there
    our_turn   keep_order                  consume      the additions of lower ranks are complete
    step_done  every thread of consume     the others   the step's matmuls are complete and its additions issued

The first three are mbarriers. `step_done` is a named barrier, at which the eight warps arrive without meeting each other. A chain
ends when both one-warp partitions have seen the end of each of its steps, so no arrival is left over.

It is written for Triton 3.6 to 3.9.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from .functions import (
    add_in_order,
    async_load,
    await_step,
    barrier,
    fault_unless_zero,
    probabilities,
    release,
    row_of,
    step_done,
    store_rows,
    wait_for_rank,
)

PART = gl.constexpr(64)  # rows of Q whose S and dP stand in registers
WORKER_REGISTERS = gl.constexpr(24)  # of the one-warp partitions; the eight warps get 240


@gluon.jit
def chain_of(TABLE, own_role, first_head, turn):
    # (KV tile or -1, its steps, its row in the table, its kv head) of a worker's turn; its table: dash_inductor/schedule/packing.py
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
    return j, steps, lengths + n_kv + j * row_length, first_head + (turn // slots) * heads_in_flight


@gluon.jit
def produce(walk, sources, tiles, barriers, HKV, NQ, GROUP: gl.constexpr):
    TABLE, own_role, first_head, rounds = walk
    q_source, do_source, k_source, v_source, neg_lse_source, delta_source = sources
    q_tiles, do_tiles, k_tile, v_tile, neg_lse_tiles, delta_tiles = tiles
    full, kv_full = barriers
    STAGES: gl.constexpr = q_tiles.shape[0]
    BLOCK_M: gl.constexpr = q_tiles.shape[3]
    BLOCK_N: gl.constexpr = k_tile.shape[2]
    HEAD_DIM: gl.constexpr = k_tile.shape[3]
    stage = 0
    for turn in range(rounds):
        j, steps, row, head = chain_of(TABLE, own_role, first_head, turn)
        steps *= GROUP
        if steps > 0:
            z = head // HKV
            h = head % HKV
            mbarrier.expect(kv_full, 2 * BLOCK_N * HEAD_DIM * 2)
            async_load(k_source, [z, h, j * BLOCK_N, 0], kv_full, k_tile)
            async_load(v_source, [z, h, j * BLOCK_N, 0], kv_full, v_tile)
            for step in range(steps):
                i = gl.load(TABLE + row + step // GROUP) & 0xFFFF
                hq = h * GROUP + step % GROUP
                first_row = ((z * HKV * GROUP + hq) * NQ + i) * BLOCK_M
                if step >= STAGES:
                    await_step()
                arrived = full.index(stage)
                mbarrier.expect(arrived, 2 * BLOCK_M * HEAD_DIM * 2 + 2 * BLOCK_M * 4)
                async_load(q_source, [z, hq, i * BLOCK_M, 0], arrived, q_tiles.index(stage))
                async_load(neg_lse_source, [first_row], arrived, neg_lse_tiles.index(stage))
                async_load(do_source, [z, hq, i * BLOCK_M, 0], arrived, do_tiles.index(stage))
                async_load(delta_source, [first_row], arrived, delta_tiles.index(stage))
                stage = gl.where(stage == STAGES - 1, 0, stage + 1)
            # The end of the steps that were not waited for: then K and V are free, and every stage.
            for _step in range(gl.minimum(steps, STAGES)):
                await_step()


@gluon.jit
def keep_order(walk, our_turn, SEMAPHORES, REPORT, HKV, NQ, GROUP: gl.constexpr):
    TABLE, own_role, first_head, rounds = walk
    for turn in range(rounds):
        _j, steps, row, head = chain_of(TABLE, own_role, first_head, turn)
        z = head // HKV
        h = head % HKV
        for step in range(steps * GROUP):
            entry = gl.load(TABLE + row + step // GROUP)
            index = (z * HKV * GROUP + h * GROUP + step % GROUP) * NQ + (entry & 0xFFFF)
            wait_for_rank(SEMAPHORES, index, entry >> 16, NQ, REPORT)
            mbarrier.arrive(our_turn, count=1)
            await_step()
            release(SEMAPHORES + index)


@gluon.jit
def consume(
    walk,
    tiles,
    barriers,
    our_turn,
    outputs,
    HKV,
    NQ,
    KV_LEN,
    GROUP: gl.constexpr,
    CAUSAL: gl.constexpr,
    EVEN_N: gl.constexpr,
    SCALE: gl.constexpr,
    SCALE_LOG2E: gl.constexpr,
):
    TABLE, own_role, first_head, rounds = walk
    DQ, DK, DV, dk_strides, dv_strides = outputs
    q_tiles, do_tiles, k_tile, v_tile, neg_lse_tiles, delta_tiles, ds_tile = tiles
    full, kv_full = barriers
    STAGES: gl.constexpr = q_tiles.shape[0]
    BLOCK_M: gl.constexpr = q_tiles.shape[3]
    BLOCK_N: gl.constexpr = k_tile.shape[2]
    HEAD_DIM: gl.constexpr = k_tile.shape[3]
    dtype: gl.constexpr = k_tile.dtype
    PARTS: gl.constexpr = BLOCK_M // PART
    # The rows of S^T and dP^T, keys, are those of dK and dV: their registers are the left operands of the dV and dK matmuls. Two
    # warpgroups share dQ by rows, or by columns where it has 64 rows.
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, PART, 16])
    DKV_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, HEAD_DIM, 16])
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4 * PARTS, 2 // PARTS], [16, HEAD_DIM * PARTS // 2, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, DKV_LAYOUT, 2)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    s_zeros = gl.zeros([BLOCK_N, PART], gl.float32, S_LAYOUT)
    dq_zeros = gl.zeros([BLOCK_M, HEAD_DIM], gl.float32, DQ_LAYOUT)
    k = k_tile.reshape([BLOCK_N, HEAD_DIM])
    v = v_tile.reshape([BLOCK_N, HEAD_DIM])
    stage = 0
    phase = 0
    turn_phase = 0
    kv_phase = 0
    for turn in range(rounds):
        j, steps, row, head = chain_of(TABLE, own_role, first_head, turn)
        if j >= 0:
            z = head // HKV
            h = head % HKV
            dk = gl.zeros([BLOCK_N, HEAD_DIM], gl.float32, DKV_LAYOUT)
            dv = gl.zeros([BLOCK_N, HEAD_DIM], gl.float32, DKV_LAYOUT)
            next_entry = 0
            steps *= GROUP
            if steps > 0:
                next_entry = gl.load(TABLE + row)
                mbarrier.wait(kv_full, kv_phase)
                kv_phase ^= 1
            for step in range(steps):
                entry = next_entry
                i = entry & 0xFFFF
                mbarrier.wait(full.index(stage), phase)
                q = q_tiles.index(stage).reshape([BLOCK_M, HEAD_DIM])
                do = do_tiles.index(stage).reshape([BLOCK_M, HEAD_DIM])
                neg_lse = neg_lse_tiles.index(stage)
                delta = delta_tiles.index(stage)
                # A step is one part of 64 rows or two. S of the second is queued behind dP of the first, dV behind dP before dP is
                # waited for, and so on: the tensor cores do not idle while the warps are busy with a part.
                q_part = q.slice(0, PART)
                do_part = do.slice(0, PART)
                s_t = warpgroup_mma(k, q_part.permute([1, 0]), s_zeros, use_acc=False, is_async=True)
                dp_t = warpgroup_mma(v, do_part.permute([1, 0]), s_zeros, use_acc=False, is_async=True)
                if PARTS == 2:
                    next_s_t = warpgroup_mma(k, q.slice(PART, PART).permute([1, 0]), s_zeros, use_acc=False, is_async=True)
                shift = row_of(neg_lse, 0, ROW_LAYOUT)
                s_t = warpgroup_mma_wait(PARTS, deps=[s_t])
                p_t = probabilities(s_t, shift, j * BLOCK_N, i * BLOCK_M, KV_LEN, CAUSAL, EVEN_N, SCALE_LOG2E, S_LAYOUT)
                dv = warpgroup_mma(gl.convert_layout(p_t.to(dtype), OPERAND), do_part, dv, is_async=True)
                dp_t = warpgroup_mma_wait(PARTS, deps=[dp_t])
                # Loaded no earlier: at head dim 128 registers do not hold it beside the rest.
                delta_part = row_of(delta, 0, ROW_LAYOUT)
                ds_t = (p_t * (dp_t - delta_part)).to(dtype)
                ds_tile.slice(0, PART, dim=1).store(ds_t)
                if PARTS == 2:
                    do_part = do.slice(PART, PART)
                    dp_t = warpgroup_mma(v, do_part.permute([1, 0]), s_zeros, use_acc=False, is_async=True)
                    dk = warpgroup_mma(gl.convert_layout(ds_t, OPERAND), q_part, dk, is_async=True)
                    q_part = q.slice(PART, PART)
                    shift = row_of(neg_lse, PART, ROW_LAYOUT)
                    s_t = warpgroup_mma_wait(3, deps=[next_s_t])
                    p_t = probabilities(s_t, shift, j * BLOCK_N, i * BLOCK_M + PART, KV_LEN, CAUSAL, EVEN_N, SCALE_LOG2E, S_LAYOUT)
                    dv = warpgroup_mma(gl.convert_layout(p_t.to(dtype), OPERAND), do_part, dv, is_async=True)
                    dp_t = warpgroup_mma_wait(2, deps=[dp_t])
                    delta_part = row_of(delta, PART, ROW_LAYOUT)
                    ds_t = (p_t * (dp_t - delta_part)).to(dtype)
                    ds_tile.slice(PART, PART, dim=1).store(ds_t)
                fence_async_shared()
                barrier()
                dq = warpgroup_mma(ds_tile.permute([1, 0]), k, dq_zeros, use_acc=False, is_async=True)
                dk = warpgroup_mma(gl.convert_layout(ds_t, OPERAND), q_part, dk, is_async=True)
                # Read under these two matmuls, which are the longest wait, and never past the chain.
                next_entry = gl.load(TABLE + row + gl.minimum(step + 1, steps - 1) // GROUP)
                dq, dv = warpgroup_mma_wait(1, deps=[dq, dv])
                barrier()  # before ds_tile is written anew; here, since dK's matmul runs under it
                tile = (z * HKV * GROUP + h * GROUP + step % GROUP) * NQ + i
                mbarrier.wait(our_turn, turn_phase)
                add_in_order(DQ, tile, dq, entry >> 16)
                dk = warpgroup_mma_wait(0, deps=[dk])
                step_done()
                turn_phase ^= 1
                last = stage == STAGES - 1
                phase = gl.where(last, phase ^ 1, phase)
                stage = gl.where(last, 0, stage + 1)
            n = j * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, DKV_LAYOUT))
            store_rows(DV, dv_strides, z, h, n, dv.to(dtype), KV_LEN, DKV_LAYOUT)
            store_rows(DK, dk_strides, z, h, n, (dk * SCALE).to(dtype), KV_LEN, DKV_LAYOUT)


@gluon.jit
def sdpa_backward(
    q_source,
    k_source,
    v_source,
    do_source,
    neg_lse_source,
    delta_source,
    DQ,
    TABLE,
    WORKSPACE,
    REPORT,
    DK,
    DV,
    dk_strides,
    dv_strides,
    HEADS,
    HKV,
    NQ,
    KV_LEN,
    GROUP: gl.constexpr,
    CAUSAL: gl.constexpr,
    EVEN_N: gl.constexpr,
    SCALE: gl.constexpr,
    SCALE_LOG2E: gl.constexpr,
    STAGES: gl.constexpr,
):
    # Q, DO [Z, HQ, Q_LEN, HEAD_DIM] and K, V, DK, DV [Z, HKV, KV_LEN, HEAD_DIM]; NEG_LSE, DELTA [Z*HQ*NQ*BLOCK_M] fp32; DQ
    # [Z*HQ*NQ, BLOCK_M*HEAD_DIM] fp32 in accumulator order. WORKSPACE, int32 and zero: a ticket, a dummy, a semaphore per (head,
    # Q tile). REPORT: four int32 of the host's memory, where a wait that gave up says where it stood.
    BLOCK_M: gl.constexpr = q_source.block_shape[2]
    BLOCK_N: gl.constexpr = k_source.block_shape[2]
    HEAD_DIM: gl.constexpr = k_source.block_shape[3]
    dtype: gl.constexpr = k_source.dtype
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, HEAD_DIM], q_source.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, HEAD_DIM], do_source.layout)
    k_tile = gl.allocate_shared_memory(dtype, [1, 1, BLOCK_N, HEAD_DIM], k_source.layout)
    v_tile = gl.allocate_shared_memory(dtype, [1, 1, BLOCK_N, HEAD_DIM], v_source.layout)
    ds_tile = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_M], DS_LAYOUT)
    neg_lse_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], neg_lse_source.layout)
    delta_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], delta_source.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    our_turn = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    mbarrier.init(kv_full, count=1)
    mbarrier.init(our_turn, count=1)
    fence_async_shared()

    fault_unless_zero(gl.load(TABLE + 6))  # a round robin, whose rows the workers compute: not written here
    ticket = gl.atomic_add(WORKSPACE, 1, sem="relaxed")
    barrier()  # Triton 3.6 hands arguments to partitions where threads may still read the ticket
    roles = gl.load(TABLE)
    heads_in_flight = gl.load(TABLE + 1)
    first_head = ticket // roles
    rounds = 0
    if first_head < heads_in_flight:
        rounds = gl.cdiv(HEADS - first_head, heads_in_flight) * gl.load(TABLE + 2)
    walk = (TABLE, ticket % roles, first_head, rounds)
    loads = (q_tiles, do_tiles, k_tile, v_tile, neg_lse_tiles, delta_tiles)
    sources = (q_source, do_source, k_source, v_source, neg_lse_source, delta_source)
    barriers = (full, kv_full)
    tiles = (q_tiles, do_tiles, k_tile, v_tile, neg_lse_tiles, delta_tiles, ds_tile)
    outputs = (DQ, DK, DV, dk_strides, dv_strides)
    gl.warp_specialize(
        [
            (consume, (walk, tiles, barriers, our_turn, outputs, HKV, NQ, KV_LEN, GROUP, CAUSAL, EVEN_N, SCALE, SCALE_LOG2E)),
            (produce, (walk, sources, loads, barriers, HKV, NQ, GROUP)),
            (keep_order, (walk, our_turn, WORKSPACE + 2, REPORT, HKV, NQ, GROUP)),
        ],
        [1, 1],
        [WORKER_REGISTERS, WORKER_REGISTERS],
    )
