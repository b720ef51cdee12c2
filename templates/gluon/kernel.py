"""The one-pass kernel for Hopper, warp-specialised, in Gluon.

The gradients of softmax(SCALE*Q K^T) V, by five matmuls of each tile, transposed so that keys are rows:

    (1) S^T = K Q^T         P^T = exp2(SCALE_LOG2E*S^T + NEG_LSE)
    (2) dP^T = V DO^T       dS^T = P^T*(dP^T - DELTA); scores.py has functions of the scores, dropout.py dropout
    (3) DV += P^T DO
    (4) DQ = dS K           added to those of other KV tiles, left unscaled
    (5) DK += dS^T Q        multiplied with SCALE at the end

Sizes: Z batch entries, HQ query heads, HKV kv heads of GROUP query heads each, Q_LEN queries in NQ tiles of BLOCK_M, KV_LEN keys in
tiles of BLOCK_N, HEAD_DIM columns of a tile. `Attention` in walk.py has those that are known when the kernel runs. Tensors may have
fewer columns: TMA fills the others with zeros.

    Q, DO         [Z, HQ, Q_LEN, KEY_DIM], [Z, HQ, Q_LEN, VALUE_DIM]
    K, DK         [Z, HKV, KV_LEN, KEY_DIM]
    V, DV         [Z, HKV, KV_LEN, VALUE_DIM]
    NEG_LSE       fp32 [Z*HQ*NQ*BLOCK_M], -logsumexp*log2(e); DELTA the same, rowsum(OUT*DO)
    DQ            fp32 [Z*HQ*NQ * DQ_ROWS, DQ_COLUMNS], a Q tile after the other, each in the order of its accumulator
    TABLE         int32, the schedule's; under a mask in blocks that of `Lists` in launch.py
    ROWS          int32 [workers, PARTITIONS, NQ] for a round robin: each partition writes its worker's chains for itself
    WORKSPACE     int32, zero at first: a ticket, a dummy, a semaphore per (query head, Q tile), at head dim 256 for each half of
                  its columns, and one per chain if chains are in parts
    REPORT        int32 [4] of the host's memory, where a wait that gave up says where it stood
    SHARE         fp32 or 16 bits [Z*HQ, Q_LEN, KV_LEN], if a gradient of a captured tensor is wanted: what elements add to it

The contract is that of `one_pass.py.jinja`: the same table, ticket and semaphores, the same sums in the same order. One CTA is four
partitions, with SHARE five, which walk the table each by itself and meet at barriers.

    consume       8 warps  the five matmuls; P and dS go from registers into dV and dK, dS and dQ into shared memory. TMA stores dK
                           and dV of a chain by way of the two stages of dQ, but for those that launch.py excepts
    produce       1 warp   TMA loads: K and V once per chain; Q, -lse*log2(e), grad_out and delta once per step, Q up to three steps
                           ahead, grad_out two
    add_in_order  1 warp   dQ from shared memory into global memory, by TMA: it waits for the step's rank, stores if the rank is 0
                           and adds else, waits until that is done, and releases the step's semaphore
    add_in_order  1 warp   the same for every other step: dQ has two stages, and each of these warps one
    put_shares    1 warp   SHARE, by TMA, by way of shared memory that a stage of Q has else

At head dim 128 one warp alone takes longer for all that than a step does (measured on an H200: docs/gluon.md).

So the warps that multiply wait neither for other CTAs, nor for additions, nor at a fence for the whole GPU, but at the end of a
chain: there TMA has to have read its last dQ, which waits for ranks, and of a part of a chain they add dK and dV to those of the
parts before it.

The eight warps meet each other warp at a channel (barriers.py), whose stages have an mbarrier and a named barrier each. They wait
at the mbarrier, and arrive at the named barrier without meeting each other.

    channel  other warp    its mbarrier says                         its named barrier says
    of_q     produce       Q and -lse*log2(e) of a step are there    STEP_READ: the step's matmuls are complete
    of_do    produce       grad_out and delta of a step are there    DO_READ: the matmuls that read grad_out are complete
    of_dq    add_in_order  TMA has read the step's dQ                DQ_STORED: the step's dQ is in shared memory
    shares   put_shares    TMA has read the shares                   SHARE_STORED: shares of a step, or of half, are there

K and V have no stages and one mbarrier, kv_full: those of a chain are there. TMA arrives by bytes at what `produce` loads.

HEAD_DIM 256 has a `consume` of its own, `consume_wide` in wide.py, and two warps `add_half_in_order`, one for each half of dQ's
columns. There Q and grad_out have one stage less. The second half takes a place of the first: these warps do wait for a rank that
is half a step late. dK and dV go by way of K's and V's memory, which `produce` loads anew behind the named barrier KV_READ.

Nobody arrives a second time before the first was waited for. Of STEP_READ and DO_READ this holds since a stage is loaded again in
between; of KV_READ since K and V are, for each chain of a table has a step, and under a mask in blocks a CTA has one chain; of
DQ_STORED and SHARE_STORED since the eight wait for their mbarrier in between, and the other way round; of the other mbarriers since
`produce` waits in between. A chain ends when `produce` has seen the end of each of its steps, so no arrival is left over.

It is written for Triton 3.6 to 3.9.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .add import add_half_in_order, add_in_order
from .barriers import DO_READ, DO_STAGES, DQ_STAGES, DQ_STORED, PARTITIONS, Q_STAGES, STEP_READ, new_channel
from .consume import consume
from .functions import barrier
from .produce import produce
from .shares import new_shares, put_shares
from .walk import Walk, chain_in_lists, turns_in_table
from .wide import consume_wide

WORKER_REGISTERS = gl.constexpr(24)  # of the one-warp partitions; the eight warps get 240


@gluon.jit
def sdpa_backward(
    q_source,
    k_source,
    v_source,
    do_source,
    neg_lse_source,
    delta_source,
    dq_target,
    share_target,
    TABLE,
    ROWS,
    lists,
    sizes,
    slices,
    WORKSPACE,
    REPORT,
    DK,
    DV,
    dk_target,
    dv_target,
    attention,
):
    # sizes: of TABLE under a mask in blocks, and the last of lists.steps. slices: those of `of_slice` in walk.py.
    BLOCK_M: gl.constexpr = q_source.block_shape[2]
    BLOCK_N: gl.constexpr = k_source.block_shape[2]
    HEAD_DIM: gl.constexpr = k_source.block_shape[3]
    DQ_ROWS: gl.constexpr = dq_target.block_shape[0]
    DQ_COLUMNS: gl.constexpr = dq_target.block_shape[1]
    IS_WIDE: gl.constexpr = HEAD_DIM == 256
    HAS_SHARES: gl.constexpr = attention.SHARE is not None
    FEWER: gl.constexpr = 1 if IS_WIDE else 0  # stages
    Q_PLACES: gl.constexpr = Q_STAGES - 1 if IS_WIDE or HAS_SHARES else Q_STAGES
    dtype: gl.constexpr = k_source.dtype
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_tiles = gl.allocate_shared_memory(dtype, [Q_PLACES, 1, 1, BLOCK_M, HEAD_DIM], q_source.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [DO_STAGES - FEWER, 1, 1, BLOCK_M, HEAD_DIM], do_source.layout)
    k_tile = gl.allocate_shared_memory(dtype, [1, 1, BLOCK_N, HEAD_DIM], k_source.layout)
    v_tile = gl.allocate_shared_memory(dtype, [1, 1, BLOCK_N, HEAD_DIM], v_source.layout)
    ds_tile = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_M], DS_LAYOUT)
    p_tile = ds_tile
    if IS_WIDE:
        p_tile = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_M], DS_LAYOUT)
        first_tile = gl.allocate_shared_memory(gl.float32, [DQ_ROWS, DQ_COLUMNS], dq_target.layout)
        second_tile = gl.allocate_shared_memory(gl.float32, [DQ_ROWS, DQ_COLUMNS], dq_target.layout)
        third_tile = gl.allocate_shared_memory(gl.float32, [DQ_ROWS, DQ_COLUMNS], dq_target.layout)
        dq_tiles = (first_tile, second_tile, third_tile)
    else:
        dq_tiles = gl.allocate_shared_memory(gl.float32, [DQ_STAGES, DQ_ROWS, DQ_COLUMNS], dq_target.layout)
    neg_lse_tiles = gl.allocate_shared_memory(gl.float32, [Q_PLACES, BLOCK_M], neg_lse_source.layout)
    delta_tiles = gl.allocate_shared_memory(gl.float32, [DO_STAGES - FEWER, BLOCK_M], delta_source.layout)
    of_q = new_channel(STEP_READ, Q_PLACES)
    of_do = new_channel(DO_READ, DO_STAGES - FEWER)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    of_dq = new_channel(DQ_STORED, DQ_STAGES)
    shares = new_shares(share_target) if HAS_SHARES else ()
    of_q.init()
    if IS_WIDE:
        mbarrier.init(of_dq.mbarrier(0), count=1)
        mbarrier.init(of_dq.mbarrier(1), count=2)  # both warps that add arrive there
    else:
        of_dq.init()
    of_do.init()
    mbarrier.init(kv_full, count=1)
    fence_async_shared()

    ticket = gl.atomic_add(WORKSPACE, 1, sem="relaxed")
    if attention.BLOCKS:
        own_role, first_head, rounds = 0, 0, 1
        chain, segment, row, parts, place = chain_in_lists(TABLE, lists, sizes, slices, ticket, attention, BLOCK_N)
        first_chain = 0
        first_z = 0
        if attention.SEGMENTS > 1:  # each has gradients of its own
            first_chain = segment * attention.heads * gl.cdiv(attention.kv_len, BLOCK_N)
            first_z = segment * (attention.heads // attention.hkv)
        semaphores = WORKSPACE + 2 + (1 + IS_WIDE) * attention.heads * attention.GROUP * attention.nq
        sums = (lists.sums, semaphores, first_chain, place, parts, REPORT) if lists.bands * attention.SETS > 1 else ()
        bits = (lists.bits, row * attention.nq * (BLOCK_M * BLOCK_N // 32))
    else:
        own_role, first_head, rounds = turns_in_table(TABLE, ticket, attention)
        chain = (0, 0, 0, TABLE, 0, 0, 0)
        first_z = 0
        sums = ()
        bits = (TABLE, 0)
        ROWS += ticket * (PARTITIONS + HAS_SHARES) * attention.nq
    consumed = Walk(TABLE, ROWS, own_role, first_head, rounds, chain)
    produced = Walk(TABLE, ROWS + attention.nq, own_role, first_head, rounds, chain)
    added = Walk(TABLE, ROWS + 2 * attention.nq, own_role, first_head, rounds, chain)
    also_added = Walk(TABLE, ROWS + 3 * attention.nq, own_role, first_head, rounds, chain)
    sources = (q_source, do_source, k_source, v_source, neg_lse_source, delta_source)
    loads = (q_tiles, do_tiles, k_tile, v_tile, neg_lse_tiles, delta_tiles)
    tiles = (q_tiles, do_tiles, k_tile, v_tile, neg_lse_tiles, delta_tiles, p_tile, ds_tile, dq_tiles)
    outputs = (DK, DV, dk_target, dv_target, first_z, sums)
    loaded = (of_q, of_do, kv_full)
    channels = (of_q, of_do, kv_full, of_dq)
    adding = (dq_target, dq_tiles, of_dq, WORKSPACE + 2, REPORT)
    barrier()  # Triton 3.6 hands arguments to partitions where threads may still read the ticket, or a maximum
    if IS_WIDE:
        gl.warp_specialize(
            [
                (consume_wide, (consumed, attention, bits, tiles, channels, outputs)),
                (produce, (produced, attention, sources, loads, loaded)),
                (add_half_in_order, (added, attention, adding, 0)),
                (add_half_in_order, (also_added, attention, adding, 1)),
            ],
            [1, 1, 1],
            [WORKER_REGISTERS, WORKER_REGISTERS, WORKER_REGISTERS],
        )
    elif HAS_SHARES:
        stored = Walk(TABLE, ROWS + 4 * attention.nq, own_role, first_head, rounds, chain)
        gl.warp_specialize(
            [
                (consume, (consumed, attention, bits, tiles, channels, outputs, shares)),
                (produce, (produced, attention, sources, loads, loaded)),
                (add_in_order, (added, attention, adding, 0)),
                (add_in_order, (also_added, attention, adding, 1)),
                (put_shares, (stored, attention, share_target, shares, BLOCK_M)),
            ],
            [1, 1, 1, 1],
            [WORKER_REGISTERS, WORKER_REGISTERS, WORKER_REGISTERS, WORKER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (consumed, attention, bits, tiles, channels, outputs, shares)),
                (produce, (produced, attention, sources, loads, loaded)),
                (add_in_order, (added, attention, adding, 0)),
                (add_in_order, (also_added, attention, adding, 1)),
            ],
            [1, 1, 1],
            [WORKER_REGISTERS, WORKER_REGISTERS, WORKER_REGISTERS],
        )
