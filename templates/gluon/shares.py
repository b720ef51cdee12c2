"""What elements of the scores add to the gradient of a captured tensor: from registers by way of shared memory into global memory.

    SHARE(pre_mod, grad_scores, z, hq, m, n, captures, kept) -> shares       of a tile, as the functions of scores.py

A tile is [keys, queries] in registers and [queries, keys] in memory, where keys are side by side. The eight warps store it so to
shared memory, and one warp lets TMA store that to global memory. Nothing is added: an element has one tile, and a tile one CTA.

`shares` is (a tile of shared memory [1, queries, keys], its channel). At head dim 128 there is memory for half of the queries in
fp32: the second half is stored when TMA has read the first, behind dQ.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .barriers import SHARE_STORED, new_channel
from .functions import READ, async_store, await_in_warp
from .scores import derivative_of, share_of
from .walk import chain_of, step_of


@gluon.jit
def new_shares(target):
    channel = new_channel(SHARE_STORED, 1)
    channel.init()
    return gl.allocate_shared_memory(target.dtype, target.block_shape, target.layout), channel


@gluon.jit
def gradients_of_scores(
    p_t, factor, change, first_key, first_row, place, attention, shares, dtype: gl.constexpr, LAYOUT: gl.constexpr
):
    # dS^T of `probabilities`, and the shares if there are any. change: dP^T - DELTA.
    if attention.SHARE is None:
        ds_t = (factor * change).to(dtype)
        share_t = ds_t
    else:
        tile, _channel = shares
        grad_scores = p_t * change
        ds_t = derivative_of(factor, grad_scores, p_t, first_key, first_row, place, attention, LAYOUT).to(dtype)
        share_t = share_of(factor, grad_scores, p_t, first_key, first_row, place, attention, LAYOUT).to(tile.dtype)
    return ds_t, share_t


@gluon.jit
def store_share(share_t, shares, count, PART: gl.constexpr):
    # For the eight warps: those queries of a step's shares which the place takes at a time, the PART-th.
    tile, channel = shares
    ROWS: gl.constexpr = tile.shape[1]
    KEYS: gl.constexpr = tile.shape[2]
    if share_t.shape[1] > ROWS:
        first, second = gl.split(share_t.reshape([KEYS, 2, ROWS]).permute([0, 2, 1]))
        share_t = second if PART == 1 else first
    channel.wait_for_stage(count)
    tile.reshape([ROWS, KEYS]).permute([1, 0]).store(share_t)
    fence_async_shared()
    channel.arrive(count)


@gluon.jit
def put_shares(walk, attention, target, shares, BLOCK_M: gl.constexpr):
    # For one warp: all shares of its CTA.
    tile, channel = shares
    HEADS: gl.constexpr = attention.GROUP // attention.SETS
    ROWS: gl.constexpr = tile.shape[1]
    KEYS: gl.constexpr = tile.shape[2]
    for turn in range(walk.rounds):
        j, steps, row, rows, head, of_set, _rank = chain_of(walk, turn, attention, WARPS=1)
        for step in range(steps * HEADS):
            i, _rank = step_of(rows + row, step // HEADS, attention.BLOCKS)
            hq = head * attention.GROUP + of_set * HEADS + step % HEADS
            for first in range(0, BLOCK_M, ROWS):
                channel.meet(0)
                async_store(target, [hq, (i & 0xFFFF) * BLOCK_M + first, j * KEYS], tile)
                await_in_warp(READ)
                mbarrier.arrive(channel.mbarrier(0), count=1)
