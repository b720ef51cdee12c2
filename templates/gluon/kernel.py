"""The one-pass kernel for Hopper, warp-specialised, in Gluon. It has never run on a GPU.

The gradients of softmax(SCALE*Q K^T) V, by the matmuls of each tile, transposed so that keys are rows:

    P^T = exp2(SCALE_LOG2E*K Q^T + NEG_LSE)    dS^T = P^T*(V DO^T - DELTA)    DV = P^T DO    DK = SCALE*dS^T Q    DQ = dS K

DQ is left unscaled. Shapes stand at `sdpa_backward`. The contract is that of `one_pass.py.jinja`: the same table, ticket and
semaphores, the same sums in the same order. One CTA is three partitions, which walk the table each by itself and meet at barriers.
Under a round robin each of them writes the rows of its worker's chains for itself.

    consume       8 warps  the five matmuls; P and dS go from registers into dV and dK, dS and dQ into shared memory
    produce       1 warp   TMA loads: K and V once per chain; Q, grad_out, -lse*log2(e) and delta once per step, two steps ahead
    add_in_order  1 warp   dQ from shared memory into global memory, by TMA: it waits for the step's rank, stores if the rank is 0
                           and adds else, waits until that is done, and releases the step's semaphore

So the warps that multiply wait neither for other CTAs, nor for additions, nor at a fence for the whole GPU.

    barrier    arrives                     waits         says
    kv_full    TMA, by bytes               consume       K and V of a chain are there
    q_full     TMA, by bytes, a stage      consume       Q and -lse*log2(e) of a step are there
    do_full    TMA, by bytes, a stage      consume       grad_out and delta of a step are there
    step_read  every thread, a stage       produce       the step's matmuls are complete
    dq_stored  every thread of consume     add_in_order  the step's dQ is in shared memory
    dq_taken   add_in_order                consume       the step's dQ was seen, and that of the step before is in global memory

`step_read` and `dq_stored` are named barriers, at which the eight warps arrive without meeting each other; the others are
mbarriers. Nobody arrives a second time before the first was waited for: step_read since a stage is loaded again in between,
dq_stored since dq_taken is waited for in between, dq_taken the other way round, and the others since `produce` waits in between. A
chain ends when `produce` has seen the end of each of its steps, so no arrival is left over.

It is written for Triton 3.6 to 3.9.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from ..positions import straddling_chain, straddling_step
from .functions import (
    async_add,
    async_load,
    async_store,
    await_additions,
    await_dq,
    await_matmuls,
    await_read,
    barrier,
    dq_stored,
    in_accumulator_order,
    load_bits,
    probabilities,
    product,
    release,
    row_of,
    step_read,
    store_rows,
    thread,
    wait_for_rank,
)

PART = gl.constexpr(64)  # rows of Q whose S and dP stand in registers
STAGES = gl.constexpr(2)  # of what a step reads, and of its dQ
WORKER_REGISTERS = gl.constexpr(24)  # of the one-warp partitions; the eight warps get 240


@gluon.jit
def chain_of(
    walk,
    turn,
    CAUSAL: gl.constexpr,
    ROUND_ROBIN: gl.constexpr,
    BLOCKS: gl.constexpr,
    WARPS: gl.constexpr,
):
    # Of a worker's turn: KV tile or -1, its steps, its row's place behind a pointer, the pointer, its kv head, and the rank from
    # which its ranks are counted. The table: dash_inductor/schedule/packing.py. ROUND_ROBIN: 0 if the table has the rows, else Q
    # tiles of a KV tile; then it may have none. WARPS: of the partition.
    rank = 0
    if BLOCKS:
        _TABLE, _own_row, _own_role, _first_head, _rounds, chain = walk
        j, steps, row, rows, head, rank = chain
    elif ROUND_ROBIN:
        if gl.load(walk[0] + 6) > 0:
            j, steps, row, rows, head = chain_in_queue(walk, turn, CAUSAL, ROUND_ROBIN, WARPS)
        else:
            j, steps, row, rows, head = chain_in_table(walk, turn)
    else:
        j, steps, row, rows, head = chain_in_table(walk, turn)
    return j, steps, row, rows, head, rank


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
def chain_in_lists(ROWS, STEPS, sizes, ticket, HKV, NKV, KV_TILES: gl.constexpr):
    # Under a mask in blocks, the chain of a CTA, and the mask's number. As in block_mask.py.jinja the last KV tile of a head has
    # the lowest ticket, and of the KV tiles of a block those after j add first.
    MASK_Z, MASK_H, KV_BLOCKS, Q_BLOCKS = sizes
    head = ticket // NKV
    j = NKV - 1 - ticket % NKV
    block = j // KV_TILES
    mask = head // HKV % MASK_Z * MASK_H + head % HKV % MASK_H
    row = mask * KV_BLOCKS + block
    rank = gl.minimum(KV_TILES, NKV - block * KV_TILES) - 1 - j % KV_TILES
    steps = 0
    if block < KV_BLOCKS:
        steps = gl.load(STEPS + row)
    return (j, steps, row * Q_BLOCKS, ROWS, head, rank), mask


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
def produce(
    walk,
    sources,
    tiles,
    barriers,
    HKV,
    NQ,
    GROUP: gl.constexpr,
    CAUSAL: gl.constexpr,
    ROUND_ROBIN: gl.constexpr,
    BLOCKS: gl.constexpr,
):
    rounds = walk[4]
    q_source, do_source, k_source, v_source, neg_lse_source, delta_source = sources
    q_tiles, do_tiles, k_tile, v_tile, neg_lse_tiles, delta_tiles = tiles
    q_full, do_full, kv_full = barriers
    BLOCK_M: gl.constexpr = q_tiles.shape[3]
    BLOCK_N: gl.constexpr = k_tile.shape[2]
    HEAD_DIM: gl.constexpr = k_tile.shape[3]
    count = 0  # of the steps of all chains
    for turn in range(rounds):
        j, steps, row, rows, head, _rank = chain_of(walk, turn, CAUSAL, ROUND_ROBIN, BLOCKS, WARPS=1)
        steps *= GROUP
        if steps > 0:
            z = head // HKV
            h = head % HKV
            mbarrier.expect(kv_full, 2 * BLOCK_N * HEAD_DIM * 2)
            async_load(k_source, [z, h, j * BLOCK_N, 0], kv_full, k_tile)
            async_load(v_source, [z, h, j * BLOCK_N, 0], kv_full, v_tile)
            for step in range(steps):
                i, _rank = step_of(rows + row, step // GROUP, BLOCKS)
                i &= 0xFFFF
                hq = h * GROUP + step % GROUP
                first_row = ((z * HKV * GROUP + hq) * NQ + i) * BLOCK_M
                stage = count % STAGES
                if step >= STAGES:
                    await_read(stage)
                arrived = q_full.index(stage)
                mbarrier.expect(arrived, BLOCK_M * HEAD_DIM * 2 + BLOCK_M * 4)
                async_load(q_source, [z, hq, i * BLOCK_M, 0], arrived, q_tiles.index(stage))
                async_load(neg_lse_source, [first_row], arrived, neg_lse_tiles.index(stage))
                arrived = do_full.index(stage)
                mbarrier.expect(arrived, BLOCK_M * HEAD_DIM * 2 + BLOCK_M * 4)
                async_load(do_source, [z, hq, i * BLOCK_M, 0], arrived, do_tiles.index(stage))
                async_load(delta_source, [first_row], arrived, delta_tiles.index(stage))
                count += 1
            # The end of the steps that were not waited for: then K and V are free, and every stage.
            left = gl.minimum(steps, STAGES)
            for step in range(left):
                await_read((count + left + step) % STAGES)


@gluon.jit
def add_in_order(
    walk,
    dq_target,
    dq_tiles,
    dq_taken,
    SEMAPHORES,
    REPORT,
    NQ,
    GROUP: gl.constexpr,
    CAUSAL: gl.constexpr,
    ROUND_ROBIN: gl.constexpr,
    BLOCKS: gl.constexpr,
):
    rounds = walk[4]
    ROWS: gl.constexpr = dq_tiles.shape[1]
    count = 0
    for turn in range(rounds):
        _j, steps, row, rows, head, first_rank = chain_of(walk, turn, CAUSAL, ROUND_ROBIN, BLOCKS, WARPS=1)
        for step in range(steps * GROUP):
            i, rank = step_of(rows + row, step // GROUP, BLOCKS)
            rank += first_rank
            index = (head * GROUP + step % GROUP) * NQ + (i & 0xFFFF)
            dq = dq_tiles.index(count % STAGES)
            await_dq()
            mbarrier.arrive(dq_taken, count=1)
            wait_for_rank(SEMAPHORES, index, rank, NQ, REPORT)
            # The first contributor stores: the scratch needs no zero fill, and what stood in it cannot survive.
            if rank == 0:
                async_store(dq_target, [index * ROWS, 0], dq)
            else:
                async_add(dq_target, [index * ROWS, 0], dq)
            await_additions()
            release(SEMAPHORES + index)
            count += 1


@gluon.jit
def consume(
    walk,
    bits,
    tiles,
    barriers,
    outputs,
    HKV,
    KV_LEN,
    GROUP: gl.constexpr,
    CAUSAL: gl.constexpr,
    ROUND_ROBIN: gl.constexpr,
    BLOCKS: gl.constexpr,
    EVEN_N: gl.constexpr,
    SCALE: gl.constexpr,
    SCALE_LOG2E: gl.constexpr,
):
    rounds = walk[4]
    BITS, first_word = bits
    if BLOCKS:
        first_word += thread()
    DK, DV, dk_strides, dv_strides = outputs
    q_tiles, do_tiles, k_tile, v_tile, neg_lse_tiles, delta_tiles, ds_tile, dq_tiles = tiles
    q_full, do_full, kv_full, dq_taken = barriers
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
    k = k_tile.reshape([BLOCK_N, HEAD_DIM])
    v = v_tile.reshape([BLOCK_N, HEAD_DIM])
    count = 0  # of the steps of all chains
    kv_phase = 0
    for turn in range(rounds):
        j, steps, row, rows, head, _rank = chain_of(walk, turn, CAUSAL, ROUND_ROBIN, BLOCKS, WARPS=8)
        if j >= 0:
            dk = gl.zeros([BLOCK_N, HEAD_DIM], gl.float32, DKV_LAYOUT)
            dv = gl.zeros([BLOCK_N, HEAD_DIM], gl.float32, DKV_LAYOUT)
            steps *= GROUP
            if steps > 0:
                mbarrier.wait(kv_full, kv_phase)
                kv_phase ^= 1
                v_operand = v
                if HEAD_DIM == 64:  # registers hold it: then dP's matmul reads half as much from shared memory
                    v_operand = v.load(gl.DotOperandLayout(0, S_LAYOUT, 2))
                next_i, _ = step_of(rows + row, 0, BLOCKS)
                for step in range(steps):
                    i = next_i & 0xFFFF
                    stage = count % STAGES
                    mbarrier.wait(q_full.index(stage), (count // STAGES) % 2)
                    q = q_tiles.index(stage).reshape([BLOCK_M, HEAD_DIM])
                    do = do_tiles.index(stage).reshape([BLOCK_M, HEAD_DIM])
                    neg_lse = neg_lse_tiles.index(stage)
                    delta = delta_tiles.index(stage)
                    # A step is one part of 64 rows or two. S of the second is queued behind dP of the first, dV behind dP before
                    # dP is waited for, and so on: the tensor cores do not idle while the warps are busy with a part.
                    s_t = product(k, q.slice(0, PART).permute([1, 0]), S_LAYOUT)
                    mbarrier.wait(do_full.index(stage), (count // STAGES) % 2)
                    dp_t = product(v_operand, do.slice(0, PART).permute([1, 0]), S_LAYOUT)
                    if PARTS == 2:
                        next_s_t = product(k, q.slice(PART, PART).permute([1, 0]), S_LAYOUT)
                    shift = row_of(neg_lse, 0, ROW_LAYOUT)
                    has_hidden = False
                    word = 0
                    next_word = 0
                    if BLOCKS:
                        has_hidden = (next_i & 0x10000) != 0
                        if not EVEN_N:
                            has_hidden = has_hidden | ((j + 1) * BLOCK_N > KV_LEN)
                        if has_hidden:
                            word = load_bits(BITS + (first_word + i * (256 * PARTS)))
                            if PARTS == 2:
                                next_word = load_bits(BITS + (first_word + i * 512 + 256))
                    s_t = await_matmuls(PARTS, deps=[s_t])
                    p_t = probabilities(
                        s_t,
                        shift,
                        word,
                        has_hidden,
                        j * BLOCK_N,
                        i * BLOCK_M,
                        KV_LEN,
                        CAUSAL,
                        BLOCKS,
                        EVEN_N,
                        SCALE_LOG2E,
                        S_LAYOUT,
                    )
                    dv = warpgroup_mma(gl.convert_layout(p_t.to(dtype), OPERAND), do.slice(0, PART), dv, is_async=True)
                    dp_t = await_matmuls(PARTS, deps=[dp_t])
                    # Loaded no earlier: at head dim 128 registers do not hold it beside the rest.
                    ds_t = (p_t * (dp_t - row_of(delta, 0, ROW_LAYOUT))).to(dtype)
                    barrier()  # all warps have waited for the matmul that reads the last step's
                    ds_tile.slice(0, PART, dim=1).store(ds_t)
                    if PARTS == 2:
                        dp_t = product(v_operand, do.slice(PART, PART).permute([1, 0]), S_LAYOUT)
                        dk = warpgroup_mma(gl.convert_layout(ds_t, OPERAND), q.slice(0, PART), dk, is_async=True)
                        shift = row_of(neg_lse, PART, ROW_LAYOUT)
                        s_t = await_matmuls(3, deps=[next_s_t])
                        p_t = probabilities(
                            s_t,
                            shift,
                            next_word,
                            has_hidden,
                            j * BLOCK_N,
                            i * BLOCK_M + PART,
                            KV_LEN,
                            CAUSAL,
                            BLOCKS,
                            EVEN_N,
                            SCALE_LOG2E,
                            S_LAYOUT,
                        )
                        dv = warpgroup_mma(gl.convert_layout(p_t.to(dtype), OPERAND), do.slice(PART, PART), dv, is_async=True)
                        dp_t = await_matmuls(2, deps=[dp_t])
                        ds_t = (p_t * (dp_t - row_of(delta, PART, ROW_LAYOUT))).to(dtype)
                        ds_tile.slice(PART, PART, dim=1).store(ds_t)
                    fence_async_shared()
                    barrier()
                    dq = product(ds_tile.permute([1, 0]), k, DQ_LAYOUT)
                    dk = warpgroup_mma(gl.convert_layout(ds_t, OPERAND), q.slice((PARTS - 1) * PART, PART), dk, is_async=True)
                    # Read under these two matmuls, which are the longest wait, and never past the chain.
                    next_i, _ = step_of(rows + row, gl.minimum(step + 1, steps - 1) // GROUP, BLOCKS)
                    # Of the step before; it returns at once where there is none.
                    mbarrier.wait(dq_taken, (count + 1) % 2)
                    dq, dv = await_matmuls(1, deps=[dq, dv])
                    dq_tiles.index(stage).store(in_accumulator_order(dq, dq_tiles.shape[2]))
                    fence_async_shared()
                    dq_stored()
                    dk = await_matmuls(0, deps=[dk])
                    step_read(stage)
                    count += 1
            z = head // HKV
            h = head % HKV
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
    dq_target,
    TABLE,
    ROWS,
    lists,
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
    ROUND_ROBIN: gl.constexpr,
    BLOCKS: gl.constexpr,
    KV_TILES: gl.constexpr,
    EVEN_N: gl.constexpr,
    SCALE: gl.constexpr,
    SCALE_LOG2E: gl.constexpr,
):
    # Q, DO [Z, HQ, Q_LEN, HEAD_DIM] and K, V, DK, DV [Z, HKV, KV_LEN, HEAD_DIM]; NEG_LSE, DELTA [Z*HQ*NQ*BLOCK_M] fp32; DQ
    # [Z*HQ*NQ * DQ_ROWS, DQ_COLUMNS] fp32, a Q tile after the other, each in accumulator order. ROWS int32 [workers, 3, NQ] if
    # ROUND_ROBIN is not 0: a row for each partition of a worker. WORKSPACE, int32 and zero: a ticket, a dummy, a semaphore per
    # (head, Q tile). REPORT: four int32 of the host's memory, where a wait that gave up says
    # where it stood.
    BLOCK_M: gl.constexpr = q_source.block_shape[2]
    BLOCK_N: gl.constexpr = k_source.block_shape[2]
    HEAD_DIM: gl.constexpr = k_source.block_shape[3]
    DQ_ROWS: gl.constexpr = dq_target.block_shape[0]
    DQ_COLUMNS: gl.constexpr = dq_target.block_shape[1]
    dtype: gl.constexpr = k_source.dtype
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, HEAD_DIM], q_source.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, HEAD_DIM], do_source.layout)
    k_tile = gl.allocate_shared_memory(dtype, [1, 1, BLOCK_N, HEAD_DIM], k_source.layout)
    v_tile = gl.allocate_shared_memory(dtype, [1, 1, BLOCK_N, HEAD_DIM], v_source.layout)
    ds_tile = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_M], DS_LAYOUT)
    dq_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, DQ_ROWS, DQ_COLUMNS], dq_target.layout)
    neg_lse_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], neg_lse_source.layout)
    delta_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], delta_source.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    dq_taken = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(q_full.index(stage), count=1)
        mbarrier.init(do_full.index(stage), count=1)
    mbarrier.init(kv_full, count=1)
    mbarrier.init(dq_taken, count=1)
    fence_async_shared()

    ticket = gl.atomic_add(WORKSPACE, 1, sem="relaxed")
    barrier()  # Triton 3.6 hands arguments to partitions where threads may still read the ticket
    bits = (TABLE, 0)
    if BLOCKS:
        STEPS, BITS, sizes = lists
        NKV = gl.cdiv(KV_LEN, BLOCK_N)
        chain, mask = chain_in_lists(TABLE, STEPS, sizes, ticket, HKV, NKV, KV_TILES)
        bits = (BITS, (mask * NKV + chain[0]) * NQ * (BLOCK_M // PART * 256))
        own_role = 0
        first_head = 0
        rounds = 1
    else:
        chain = (0, 0, 0, TABLE, 0, 0)
        ROWS += ticket * 3 * NQ
        roles = gl.load(TABLE)
        heads_in_flight = gl.load(TABLE + 1)
        slots = gl.load(TABLE + 2)
        own_role = ticket % roles
        first_head = ticket // roles
        rounds = 0
        if first_head < heads_in_flight:
            rounds = gl.cdiv(HEADS - first_head, heads_in_flight) * slots
        if ROUND_ROBIN:
            queue = gl.load(TABLE + 6)
            if queue > 0:
                rounds = gl.cdiv(HEADS * queue - own_role, roles) * slots
    consumed = (TABLE, ROWS, own_role, first_head, rounds, chain)
    produced = (TABLE, ROWS + NQ, own_role, first_head, rounds, chain)
    added = (TABLE, ROWS + 2 * NQ, own_role, first_head, rounds, chain)
    sources = (q_source, do_source, k_source, v_source, neg_lse_source, delta_source)
    loads = (q_tiles, do_tiles, k_tile, v_tile, neg_lse_tiles, delta_tiles)
    tiles = (q_tiles, do_tiles, k_tile, v_tile, neg_lse_tiles, delta_tiles, ds_tile, dq_tiles)
    barriers = (q_full, do_full, kv_full, dq_taken)
    outputs = (DK, DV, dk_strides, dv_strides)
    gl.warp_specialize(
        [
            (
                consume,
                (
                    consumed,
                    bits,
                    tiles,
                    barriers,
                    outputs,
                    HKV,
                    KV_LEN,
                    GROUP,
                    CAUSAL,
                    ROUND_ROBIN,
                    BLOCKS,
                    EVEN_N,
                    SCALE,
                    SCALE_LOG2E,
                ),
            ),
            (produce, (produced, sources, loads, (q_full, do_full, kv_full), HKV, NQ, GROUP, CAUSAL, ROUND_ROBIN, BLOCKS)),
            (add_in_order, (added, dq_target, dq_tiles, dq_taken, WORKSPACE + 2, REPORT, NQ, GROUP, CAUSAL, ROUND_ROBIN, BLOCKS)),
        ],
        [1, 1],
        [WORKER_REGISTERS, WORKER_REGISTERS],
    )
