"""Functions of the Gluon kernel: waits, masks and stores in one CTA, and what Triton's versions name differently."""

# Gluon compiles these functions from their source, in which an `if` on a constexpr is no condition.
# ruff: noqa: SIM102, SIM108

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # from 3.9 on; before
barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # from 3.7 on; before


# How additions of one CTA come before those of the next, in the terms of PTX's memory consistency model (PTX ISA 8.9):
#   1. A consumer thread's stores and additions come before its `step_done` in program order.
#   2. bar.arrive synchronizes with bar.sync on the same barrier: `step_done` of all 256 threads with `await_step` of the releasing
#      warp. It needs no scope and covers weak accesses.
#   3. The warp's `await_step` comes before its `release` in program order.
#   4. red.release.gpu synchronizes with the ld.acquire.gpu of `wait_for_rank` that reads its value, or what later releases made of
#      that (observation order goes through atomics): both are strong, of a scope that has both CTAs.
#   5. Lane 0 of the waiting warp arrives at an mbarrier (release.cta) after its load, and every consumer thread waits there
#      (acquire.cta) before it adds.
# Causality order is transitive over program order and synchronizes-with, whatever the scope of each: (1) comes before (5). So the
# release is cumulative: a fence of the releasing thread for the whole GPU (MEMBAR.GPU) behind bar.sync, and none in the others.
# Everything is of the generic proxy, since dQ comes from registers: no proxy fence.


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
    # For one warp, behind `await_step`: the semaphore counts one more contribution.
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


@gluon.jit
def step_done():
    # For the 8 consumer warps: arrives at the end of the step, and waits for nobody. 320 threads: theirs, and two warps that wait.
    # Barrier 8: Triton takes 0 for the CTA or a partition, 1 and those after it for partitions, of which there are three.
    gl.inline_asm_elementwise("bar.arrive 8, 320; mov.b32 $0, 0;", "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_step():
    # For one warp: waits until the consumer warps and the other one-warp partition have come to the end of the step.
    gl.inline_asm_elementwise("bar.sync 8, 320; mov.b32 $0, 0;", "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def add_in_order(DQ, tile, dq, rank):
    # dq [rows, columns] into its tile of DQ; `our_turn` has come. The first contributor stores: the scratch needs no zero fill, and
    # what stood in it cannot survive. By predicates and not by a branch: a matmul is in flight.
    # The order is that of `Fragments` in templates/tiles.py, by bits of the accumulator's index: rows are (warp, half,
    # lane / 4), columns (warpgroup, 8 columns, lane % 4, pair). So a thread adds four registers at a time.
    ROWS: gl.constexpr = dq.shape[0]
    COLUMNS: gl.constexpr = dq.shape[1]
    WARPS: gl.constexpr = ROWS // 16
    bits = dq.reshape([WARPS, 2, 8, 8 // WARPS, COLUMNS * WARPS // 64, 4, 2])
    flat = bits.permute([4, 3, 0, 2, 5, 1, 6]).reshape([ROWS * COLUMNS])
    LAYOUT: gl.constexpr = flat.type.layout
    pointers = DQ + gl.cast(tile, gl.int64) * (ROWS * COLUMNS) + gl.arange(0, ROWS * COLUMNS, layout=LAYOUT)
    gl.store(pointers, flat, mask=gl.full([ROWS * COLUMNS], rank == 0, gl.int1, layout=LAYOUT))
    gl.atomic_add(pointers, flat, mask=gl.full([ROWS * COLUMNS], rank != 0, gl.int1, layout=LAYOUT), sem="relaxed")


@gluon.jit
def fault_unless_zero(value):
    # A store to address 0: an error, where going on would give wrong gradients.
    gl.inline_asm_elementwise(
        """
        {
            .reg .pred wrong;
            .reg .b64 null;
            mov.b64 null, 0;
            setp.ne.s32 wrong, $1, 0;
            @wrong st.global.b32 [null], $1;
            mov.b32 $0, 0;
        }
        """,
        "=r,r,~{memory}",
        [value],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def mask_edge(s_t, offset, CAUSAL: gl.constexpr, LAYOUT: gl.constexpr):
    # -inf where key n of the tile is hidden from row m: causal, where n + offset > m (which hides the keys past the end as well);
    # else where n + offset >= 0. In the accumulator bit 3 of n and all bits of m but 1 and 2 number a register, the others a
    # thread: split so, one integer per thread is compared with immediates and no register survives the branch.
    n = gl.expand_dims(gl.arange(0, s_t.shape[0], layout=gl.SliceLayout(1, LAYOUT)), 1)
    m = gl.expand_dims(gl.arange(0, s_t.shape[1], layout=gl.SliceLayout(0, LAYOUT)), 0)
    if CAUSAL:
        seen = (n & ~8) - (m & 6) + offset <= (m & ~6) - (n & 8)
    else:
        seen = (n & ~8) + offset < -(n & 8)
    return gl.where(seen, s_t, float("-inf"))


@gluon.jit
def probabilities(
    s_t,
    neg_lse,
    first_key,
    first_row,
    KV_LEN,
    CAUSAL: gl.constexpr,
    EVEN_N: gl.constexpr,
    SCALE: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    # exp2(SCALE * s_t + neg_lse), 0 where a key is hidden. Only tiles that cross an edge pay for it: the branch is uniform.
    s_t = gl.fma(s_t, gl.full_like(s_t, SCALE), neg_lse.broadcast_to(s_t.shape))
    if CAUSAL:
        if first_key + s_t.shape[0] > first_row + 1:
            s_t = mask_edge(s_t, first_key - first_row, CAUSAL, LAYOUT)
    elif not EVEN_N:
        if first_key + s_t.shape[0] > KV_LEN:
            s_t = mask_edge(s_t, first_key - KV_LEN, CAUSAL, LAYOUT)
    return gl.exp2(s_t)


@gluon.jit
def row_of(rows, first, LAYOUT: gl.constexpr):
    # 64 values of `rows` from `first` on, one for each column of S^T.
    return gl.expand_dims(rows.slice(first, 64).load(LAYOUT), 0)


@gluon.jit
def store_rows(pointer, strides, z, h, n, x, KV_LEN, LAYOUT: gl.constexpr):
    # x [BLOCK_N, HEAD_DIM], rows n of which those before KV_LEN are stored.
    d = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    base = pointer + gl.cast(z, gl.int64) * strides[0] + gl.cast(h, gl.int64) * strides[1]
    rows = gl.expand_dims(n, 1)
    pointers = base + gl.cast(rows, gl.int64) * strides[2] + gl.expand_dims(d, 0) * strides[3]
    gl.store(pointers, x, mask=rows < KV_LEN)
