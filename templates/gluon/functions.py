"""Functions of the Gluon kernel: waits, masks and stores in one CTA, and what Triton's versions name differently."""

# Gluon compiles these functions from their source, in which an `if` on a constexpr is no condition.
# ruff: noqa: SIM102, SIM108, SIM114

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from .barriers import WARPS
from .scores import derivative_of, scores

LOG2E = gl.constexpr(1.4426950408889634)

barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # from 3.7 on; before
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # from 3.8 on; before
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
# From 3.9 on; before.
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret


@builtin
def _async_add(descriptor, corner, tile, _semantic=None):
    place = _semantic._convert_to_ir_values(corner, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, place, tile.handle)


async_add = getattr(tma, "async_atomic_add", None) or _async_add


@builtin
def await_matmuls(in_flight, deps, _semantic=None):
    # Like warpgroup_mma_wait: waits until all matmuls of the own warpgroup but the last `in_flight` are complete. Triton 3.9
    # would add a barrier of all warps behind it; here they meet at `barrier` before they write what another's matmul may read.
    results = warpgroup_mma_wait(in_flight, deps, _semantic=_semantic)
    first = results[0] if isinstance(results, tuple) else results
    first.handle.set_attr("warpGroupLocal", _semantic.builder.get_unit_attr())
    return results


@gluon.jit
def product(a, b, LAYOUT: gl.constexpr):
    # a b, asynchronously
    ROWS: gl.constexpr = a.shape[0]
    COLUMNS: gl.constexpr = b.shape[1]
    zeros = gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)
    return warpgroup_mma(a, b, zeros, use_acc=False, is_async=True)


# Why additions of one CTA come before those of the next, in the terms of PTX's memory consistency model (PTX ISA 8.9):
#   1. The warp `add_in_order` issues a bulk addition, of the async proxy, and waits until it is complete, not just read from shared
#      memory: `await_in_warp(COMPLETE)`. Completion makes it visible to the thread that waited (9.7.9.25.3).
#   2. bar.warp.sync orders that before lane 0's `release`.
#   3. red.release.gpu synchronizes with the ld.acquire.gpu of `wait_for_rank` that reads its value, or what later releases made of
#      that (observation order goes through atomics): both are strong, of a scope that has both CTAs.
#   4. Behind its load, lane 0 of the warp that waits has a fence between the generic proxy and the async one, and bar.warp.sync
#      orders both before the bulk addition of whichever lane issues it.
# Causality order is transitive over program order and synchronizes-with, whatever the scope of each: (1) comes before (4).


@gluon.jit
def wait_for_rank(SEMAPHORES, index, rank, NQ, REPORT):
    # For one warp. Returns once the semaphore of (query head, Q tile) = `index` equals `rank`: then the additions of all lower
    # ranks are complete. Lane 0 polls. Bounded, as in functions.py.jinja: after 2**25 polls it reports, and stores to address 0.
    gl.inline_asm_elementwise(
        """
        {
            .reg .pred again;
            .reg .b32 lane, value, polls;
            .reg .b64 address;
            mov.u32 lane, %laneid;
            setp.ne.u32 again, lane, 0;
            @again bra ARRIVED;
            mov.b32 polls, 0;
        POLL:
            ld.global.acquire.gpu.b32 value, [$1];
            add.u32 polls, polls, 1;
            setp.lt.u32 again, polls, 33554432;
            setp.ne.and.s32 again, value, $2, again;
            @again bra POLL;
            setp.lt.u32 again, polls, 33554432;
            @again bra ARRIVED;
            st.relaxed.sys.global.v4.b32 [$5], {$3, $4, $2, value};
            ld.relaxed.sys.global.b32 value, [$5];
            shr.u32 value, value, 31;
            cvt.u64.u32 address, value;
            st.global.b32 [address], polls;
        ARRIVED:
            fence.proxy.async.global;
            bar.warp.sync 0xffffffff;
            mov.b32 $0, 0;
        }
        """,
        "=r,l,r,r,r,l,~{memory}",
        [(SEMAPHORES + index).to(gl.int64), rank, index, NQ, REPORT.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def release(semaphore):
    # The semaphore counts each warp that calls this, behind what orders its lanes' writes: `await_in_warp`.
    gl.inline_asm_elementwise(
        """
        {
            .reg .pred first;
            .reg .b32 lane;
            mov.u32 lane, %laneid;
            setp.eq.u32 first, lane, 0;
            @first red.release.gpu.global.add.s32 [$1], 1;
            mov.b32 $0, 0;
        }
        """,
        "=r,l,~{memory}",
        [semaphore.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


# What a warp may wait for: that its lanes have met, and that of the bulk stores and additions which they have issued all are
# complete, or that TMA has read all from shared memory, or all but the last.
_MET = "bar.warp.sync 0xffffffff; mov.b32 $0, 0;"
MET, COMPLETE = gl.constexpr(_MET), gl.constexpr(f"cp.async.bulk.wait_group 0; {_MET}")
READ, READ_BUT_LAST = (gl.constexpr(f"cp.async.bulk.wait_group.read {left}; {_MET}") for left in (0, 1))


@gluon.jit
def await_in_warp(WHAT: gl.constexpr):
    gl.inline_asm_elementwise(WHAT, "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def in_accumulator_order(dq, WIDTH: gl.constexpr):
    # dq [rows, columns], or one of its parts, as rows of WIDTH in the order of `Fragments` in templates/tiles.py, by bits of the
    # accumulator's index: rows are (warp, half, lane / 4), columns (warpgroup, 8 columns, lane % 4, pair). So a thread stores four
    # registers at a time, and neighbours side by side. Of 64 columns they are of two rows, which a block of dQ's epilogue has both.
    ROWS: gl.constexpr = dq.shape[0]
    COLUMNS: gl.constexpr = dq.shape[1]
    BY_ROWS: gl.constexpr = ROWS // 16  # warps
    bits = dq.reshape([BY_ROWS, 2, 8, WARPS // BY_ROWS, COLUMNS * BY_ROWS // (16 * WARPS), 2, 4, 2])
    if COLUMNS == 64:
        bits = bits.permute([4, 5, 3, 0, 2, 6, 1, 7])
    else:
        bits = bits.permute([4, 1, 3, 0, 2, 6, 5, 7])
    return bits.reshape([ROWS * COLUMNS // WIDTH, WIDTH])


@gluon.jit
def mask_edge(s_t, offset, CAUSAL: gl.constexpr, LAYOUT: gl.constexpr):
    # -inf where key n of the tile is hidden from row m: causal, where n + offset > m (which hides the keys past the end as well);
    # else where n + offset >= 0. In the accumulator bit 3 of n and all bits of m but 1 and 2, of 64 keys also 5, number a register,
    # the others a thread: split so, one integer per thread is compared with immediates and no register survives the branch.
    n = gl.expand_dims(gl.arange(0, s_t.shape[0], layout=gl.SliceLayout(1, LAYOUT)), 1)
    m = gl.expand_dims(gl.arange(0, s_t.shape[1], layout=gl.SliceLayout(0, LAYOUT)), 0)
    THREADS: gl.constexpr = 38 if s_t.shape[0] == 64 else 6
    if CAUSAL:
        seen = (n & ~8) - (m & THREADS) + offset <= (m & ~THREADS) - (n & 8)
    else:
        seen = (n & ~8) + offset < -(n & 8)
    return gl.where(seen, s_t, float("-inf"))


def _selecting(count, other):
    # PTX, and its operands: `count` elements of a thread, in the order of its registers, each with a bit of a word.
    each = "and.b32 bit, ${word}, {bit}; setp.ne.u32 seen, bit, 0; selp.f32 ${k}, ${of}, {other}, seen;"
    lines = "".join(each.format(word=2 * count, bit=1 << k, k=k, of=count + k, other=other) for k in range(count))
    return "{ .reg .pred seen; .reg .b32 bit;" + lines + "}", ",".join(["=f"] * count + ["f"] * count + ["r"] * count)


# PTX for a thread's elements in a part of S^T: 64 queries by 128 keys, or by 64. Where a word has no bit, there is -inf or 0.
HIDE, SELECT_OPERANDS = map(gl.constexpr, _selecting(32, "0fFF800000"))
HIDE_OF_64, SELECT_OPERANDS_OF_64 = map(gl.constexpr, _selecting(16, "0fFF800000"))
DROP, DROP_OF_64 = (gl.constexpr(_selecting(count, "0f00000000")[0]) for count in (32, 16))


@gluon.jit
def thread():
    # The thread's number. Where a loop reads it, ptxas takes its warps for diverged.
    return gl.inline_asm_elementwise("mov.u32 $0, %tid.x;", "=r,r", [0], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def of_first_lane(value):
    # `value`, which all lanes of a warp have. So ptxas knows that they do; of a maximum it does not, by Triton 3.8, and where the
    # steps of a chain hang on one it takes the warps for diverged.
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def load_bits(bits):
    # The word at an address of the thread's own.
    return gl.inline_asm_elementwise("ld.global.b32 $0, [$1];", "=r,l", [bits.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_16_bits(bits):
    return gl.inline_asm_elementwise(
        "{ .reg .b16 half; ld.global.b16 half, [$1]; cvt.u32.u16 $0, half; }",
        "=r,l",
        [bits.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def select(x, word, WAY: gl.constexpr, WAY_OF_64: gl.constexpr, LAYOUT: gl.constexpr):
    # x where the thread's word has a bit.
    words = gl.full(x.shape, word, gl.int32, LAYOUT)
    if x.shape[0] == 64:
        x = gl.inline_asm_elementwise(WAY_OF_64, SELECT_OPERANDS_OF_64, [x, words], dtype=gl.float32, is_pure=True, pack=16)
    else:
        x = gl.inline_asm_elementwise(WAY, SELECT_OPERANDS, [x, words], dtype=gl.float32, is_pure=True, pack=32)
    return x


@gluon.jit
def probabilities(
    s_t,
    neg_lse,
    word,
    has_hidden,
    first_key,
    first_row,
    place,
    attention,
    LAYOUT: gl.constexpr,
):
    # P^T = exp2(SCALE_LOG2E * s_t + neg_lse), 0 where a key is hidden, and what dP^T - DELTA is multiplied with: P^T, times the
    # derivative of the scores' function where there is one. With shares, pre_mod in its place (shares.py). Only tiles that cross an
    # edge pay for it: the branch is uniform. For 128 queries at once there is none, since it parts what computes from exp2.
    IS_WHOLE: gl.constexpr = s_t.shape[1] == 128
    pre_mod = s_t
    if attention.FUNCTIONS:
        pre_mod = s_t * attention.SCALE
        s_t = scores(pre_mod, first_key, first_row, place, attention, LAYOUT)
        s_t = gl.fma(s_t, gl.full_like(s_t, LOG2E), neg_lse.broadcast_to(s_t.shape))
        if not attention.EVEN_M:
            if first_row + s_t.shape[1] > attention.q_len:  # where there is no query, the score need not be a number
                s_t = gl.where(neg_lse.broadcast_to(s_t.shape) == float("-inf"), float("-inf"), s_t)
    else:
        s_t = gl.fma(s_t, gl.full_like(s_t, attention.SCALE_LOG2E), neg_lse.broadcast_to(s_t.shape))
    if attention.BLOCKS:
        if has_hidden:
            s_t = select(s_t, word, HIDE, HIDE_OF_64, LAYOUT)
    elif attention.CAUSAL:
        if IS_WHOLE:
            s_t = mask_edge(s_t, first_key - first_row, attention.CAUSAL, LAYOUT)
        elif first_key + s_t.shape[0] > first_row + 1:
            s_t = mask_edge(s_t, first_key - first_row, attention.CAUSAL, LAYOUT)
    elif not attention.EVEN_N:
        if IS_WHOLE:
            s_t = mask_edge(s_t, first_key - attention.kv_len, attention.CAUSAL, LAYOUT)
        elif first_key + s_t.shape[0] > attention.kv_len:
            s_t = mask_edge(s_t, first_key - attention.kv_len, attention.CAUSAL, LAYOUT)
    p_t = gl.exp2(s_t)
    factor = p_t
    if attention.FUNCTIONS:
        factor = pre_mod
        if attention.SHARE is None:
            factor = derivative_of(pre_mod, p_t, p_t, first_key, first_row, place, attention, LAYOUT)
    return p_t, factor


@gluon.jit
def row_of(rows, first, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    # Values of `rows` from `first` on, one for each column of S^T.
    return gl.expand_dims(rows.slice(first, COLUMNS).load(LAYOUT), 0)


@gluon.jit
def end_chain(outputs, head, j, dk, dv, places, attention, LAYOUT: gl.constexpr):
    # Writes dk and dv, if TMA does so by way of `places`: those of dQ, which are free, or at head dim 256 of K and V. A part of a
    # chain adds them to those of the parts before it, and the last part writes the outputs. Each warp waits until all eight of the
    # part before have released what they wrote: bar.warp.sync orders the loads of its lanes behind lane 0's acquire, and their
    # stores before lane 0's release.
    DK, DV, dk_target, dv_target, first_z, sums = outputs
    dtype: gl.constexpr = DK.dtype.element_ty
    BLOCK_N: gl.constexpr = dk.shape[0]
    HEAD_DIM: gl.constexpr = dk.shape[1]
    is_last = True
    if len(sums) > 0:
        SUMS, SEMAPHORES, first_chain, place, parts, REPORT = sums
        if parts > 1:
            chain = head * gl.cdiv(attention.kv_len, BLOCK_N) + j + first_chain
            wait_for_rank(SEMAPHORES, chain, place * WARPS, -attention.nq, REPORT)
            n = gl.expand_dims(gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, LAYOUT)), 1)
            d = gl.expand_dims(gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, LAYOUT)), 0)
            dk_sums = SUMS + gl.cast(chain, gl.int64) * (2 * BLOCK_N * HEAD_DIM) + (n * HEAD_DIM + d)
            dv_sums = dk_sums + BLOCK_N * HEAD_DIM
            if place > 0:
                dk += gl.load(dk_sums, cache_modifier=".cg")
                dv += gl.load(dv_sums, cache_modifier=".cg")
            if place < parts - 1:
                gl.store(dk_sums, dk, cache_modifier=".cg")
                gl.store(dv_sums, dv, cache_modifier=".cg")
            await_in_warp(MET)
            release(SEMAPHORES + chain)  # it counts each of the eight warps, whose threads have written
        is_last = place == parts - 1
    if is_last:
        z = first_z + head // attention.hkv
        h = head % attention.hkv
        if attention.DROP_SCALE is not None:
            dv = dv * attention.DROP_SCALE
        short_dv = dv.to(dtype)
        short_dk = (dk * attention.SCALE).to(dtype)
        if attention.BY_TMA:
            if HEAD_DIM == 256:
                dk_tile, dv_tile = places
            else:
                # Triton 3.8 takes a place as a whole, at head dim 64 for two such tiles.
                SHAPE: gl.constexpr = [2 * places.index(0).numel // (BLOCK_N * HEAD_DIM), 1, 1, BLOCK_N, HEAD_DIM]
                dv_tile = reinterpret(places.index(0), dtype, SHAPE, dv_target.layout).index(0)
                dk_tile = reinterpret(places.index(1), dtype, SHAPE, dk_target.layout).index(0)
            # Matmuls have read K and V, and TMA what the chain before it, which may have had no step, left there.
            barrier()
            dv_tile.reshape([BLOCK_N, HEAD_DIM]).store(short_dv)
            dk_tile.reshape([BLOCK_N, HEAD_DIM]).store(short_dk)
            fence_async_shared()  # Triton 3.6 puts none there itself, newer ones do
            barrier()
            z = of_first_lane(z)
            h = of_first_lane(h)
            n = of_first_lane(j * BLOCK_N)
            async_store(dv_target, [z, h, n, 0], dv_tile)
            async_store(dk_target, [z, h, n, 0], dk_tile)
            await_in_warp(READ)
        else:
            n = j * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, LAYOUT))
            store_rows(DV, dv_target, z, h, n, short_dv, attention.kv_len, attention.VALUE_DIM, LAYOUT)
            store_rows(DK, dk_target, z, h, n, short_dk, attention.kv_len, attention.KEY_DIM, LAYOUT)


@gluon.jit
def store_rows(pointer, strides, z, h, n, x, KV_LEN, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    # x [BLOCK_N, HEAD_DIM], rows n of which those before KV_LEN are stored, and of each the first COLUMNS.
    d = gl.expand_dims(gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, LAYOUT)), 0)
    base = pointer + gl.cast(z, gl.int64) * strides[0] + gl.cast(h, gl.int64) * strides[1]
    rows = gl.expand_dims(n, 1)
    pointers = base + gl.cast(rows, gl.int64) * strides[2] + d * strides[3]
    if x.shape[1] == COLUMNS:
        gl.store(pointers, x, mask=rows < KV_LEN)
    else:
        gl.store(pointers, x, mask=(rows < KV_LEN) & (d < COLUMNS))
