"""Functions of the Gluon kernel: waits, masks and stores in one CTA, and what Triton's versions name differently."""

# Gluon compiles these functions from their source, in which an `if` on a constexpr is no condition.
# ruff: noqa: SIM108

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # from 3.9 on; before
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # from 3.7 on; before
if hasattr(tma, "async_atomic_add"):  # from 3.9 on; before, Gluon has no name for it
    async_add = tma.async_atomic_add
else:
    from triton._C.libtriton import ir

    @builtin
    def async_add(tensor_desc, coord, src, _semantic=None):
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


@gluon.jit
def wait_for_rank(semaphore, rank):
    # For one warp. Returns once `semaphore` equals `rank`: then the additions of all lower ranks are complete, for this warp's TMA
    # as well. Lane 0 polls with acquire, bar.warp.sync hands that on, and the proxy fence orders TMA (the async proxy) behind it.
    # Bounded, as in functions.py.jinja: after 2**25 polls it stores to address 0.
    gl.inline_asm_elementwise(
        """
        {
            .reg .pred again;
            .reg .b32 lane, value, polls;
            .reg .b64 null;
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
            mov.b64 null, 0;
            setp.ge.u32 again, polls, 33554432;
            @again st.global.b32 [null], polls;
        ARRIVED:
            bar.warp.sync 0xffffffff;
            fence.proxy.async.global;
            mov.b32 $0, 0;
        }
        """,
        "=r,l,r,~{memory}",
        [semaphore.to(gl.int64), rank],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def wait_until_read():
    # For one warp: its TMA stores and additions have read shared memory, whichever lane has issued them.
    gl.inline_asm_elementwise(
        """
        {
            cp.async.bulk.wait_group.read 0;
            bar.warp.sync 0xffffffff;
            mov.b32 $0, 0;
        }
        """,
        "=r,~{memory}",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def complete_and_release(semaphore):
    # For one warp: its TMA stores and additions are complete and visible to it, then the semaphore counts one more contribution.
    # Without .read: a wait for the reads alone releases additions that are still on their way (kernel.md rule 4).
    gl.inline_asm_elementwise(
        """
        {
            .reg .pred first;
            .reg .b32 lane;
            cp.async.bulk.wait_group 0;
            bar.warp.sync 0xffffffff;
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
def stage_of(count):
    # (stage, phase) of the count-th use of a ring of two stages. Bits and not division, which costs registers.
    return count & 1, (count >> 1) & 1


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
def store_rows(pointer, strides, z, h, n, x, KV_LEN, LAYOUT: gl.constexpr):
    # x [BLOCK_N, HEAD_DIM], rows n of which those before KV_LEN are stored.
    d = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    base = pointer + gl.cast(z, gl.int64) * strides[0] + gl.cast(h, gl.int64) * strides[1]
    rows = gl.expand_dims(n, 1)
    pointers = base + gl.cast(rows, gl.int64) * strides[2] + gl.expand_dims(d, 0) * strides[3]
    gl.store(pointers, x, mask=rows < KV_LEN)
