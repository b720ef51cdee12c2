"""The Gluon kernel's launch: TMA descriptors of its tensors, semaphores, and what is compiled in."""

import functools
from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..tiles import GLUON_CONSUMERS, GLUON_PARTITIONS
from .kernel import sdpa_backward
from .walk import Attention

__all__ = ["arguments", "sdpa_backward"]

OPTIONS: dict[str, Any] = {"num_warps": GLUON_CONSUMERS, "enable_fp_fusion": True}
LOG2E = 1.4426950408889634
ALIGNED = 16  # bytes: addresses and pitches that TMA takes
DQ_COLUMNS = 32  # fp32 values of a row of DQ as TMA sees it: 128 bytes
DQ_ROWS = {64: 256, 128: 256, 256: 128}  # by head dim, rows that TMA adds at a time: a Q tile, of 256 columns a quarter of it


class Lists(NamedTuple):
    """What a launch under a mask in blocks has beside the table, which is int32 [MASK_Z, MASK_H, KV blocks, Q blocks].

    An entry of the table is a block of Q | full << 15 | rank << 16. A block is q_tiles x kv_tiles tiles.

    steps: int32 [MASK_Z, MASK_H, KV blocks], the Q tiles of a row, or [.., .., .., bands], those up to the end of each band. bits:
    int32, what templates/mask_bits.py.jinja writes.

    A CTA has a chain. With several bands or sets it has a part of one (templates/block_mask.py.jinja), and sums is fp32 [chains, 2,
    BLOCK_N * D]. There are at most most_chains, and bands only where the longest of a head has least_steps.
    """

    steps: Tensor
    bits: Tensor
    q_tiles: int
    kv_tiles: int
    bands: int = 1
    sets: int = 1
    most_chains: int = 1
    least_steps: int = 0
    sums: Tensor | None = None


def arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor,
    neg_lse: Tensor,
    delta: Tensor,
    table: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    *,
    report: Tensor,
    block_m: int,
    block_n: int,
    causal: bool,
    workers: int,
    shared_row: bool,
    round_robin: bool,
    scale: float,
    lists: Lists | None = None,
) -> tuple[Any, ...]:
    """The arguments of `sdpa_backward`, which is launched with OPTIONS.

    query, grad_out [Z, HQ, S_q, D]; key, value, dk, dv [Z, HKV, S_k, D], 16 bits, D 64, 128 or 256; neg_lse and delta fp32, as the
    preprocess writes them; dq fp32, a Q tile after the other, each in the order of its accumulator, written where a KV tile sees
    the Q tile; table int32. `block_m` and `block_n` are those of the table, `workers` are launched; shared_row: whether the table
    has one row for all chains, round_robin: whether it may be that of a round robin. report: int32 [4] in memory of the host that
    the device can write to, for a wait that gives up.

    Raises:
        ValueError: for another head dim or dtype, for more rows than TMA counts, and for neg_lse, delta or dq of another size.
    """
    batch, heads, q_len, head_dim = query.shape
    kv_heads, kv_len = key.shape[1:3]
    if head_dim not in DQ_ROWS or query.element_size() != 2:
        dims = ", ".join(map(str, DQ_ROWS))
        raise ValueError(f"the Gluon kernel takes bf16 and fp16 at head dims {dims}, not {query.dtype} at {head_dim}")
    n_q = -(-q_len // block_m)
    rows = batch * heads * n_q * block_m
    if rows * head_dim // DQ_COLUMNS >= 2**31:
        raise ValueError(
            f"the Gluon kernel takes fewer than 2**36 elements of query, rounded up to whole tiles, not {rows * head_dim}"
        )
    if not all(x.is_contiguous() and x.numel() == rows * width for x, width in ((neg_lse, 1), (delta, 1), (dq, head_dim))):
        raise ValueError(f"neg_lse, delta and dq must be contiguous, with {rows} rows")
    q_block, kv_block = [1, 1, block_m, head_dim], [1, 1, block_n, head_dim]
    chains = batch * kv_heads * -(-kv_len // block_n)
    in_parts = lists is not None and lists.bands * lists.sets > 1
    semaphores = table.new_zeros(2 + batch * heads * n_q + (chains if in_parts else 0))
    query, key, value, grad_out = (x if _fits_tma(x) else x.clone().contiguous() for x in (query, key, value, grad_out))
    sizes = (*table.shape, lists.steps.shape[3] if lists and lists.steps.dim() == 4 else 1)
    attention = Attention(
        heads=batch * kv_heads,
        hkv=kv_heads,
        nq=n_q,
        kv_len=kv_len,
        GROUP=gl.constexpr(heads // kv_heads),
        SETS=gl.constexpr(lists.sets if lists else 1),
        CAUSAL=gl.constexpr(causal),
        SHARED_ROW=gl.constexpr(shared_row),
        ROUND_ROBIN=gl.constexpr(block_n // block_m if round_robin else 0),
        BLOCKS=gl.constexpr(lists.q_tiles if lists else 0),
        EVEN_N=gl.constexpr(kv_len % block_n == 0),
        SCALE=gl.constexpr(scale),
        SCALE_LOG2E=gl.constexpr(scale * LOG2E),
    )
    if lists:  # its numbers are compiled in
        lists = lists._replace(**{name: gl.constexpr(x) for name, x in lists._asdict().items() if isinstance(x, int)})
    return (
        _descriptor(query, q_block),
        _descriptor(key, kv_block),
        _descriptor(value, kv_block),
        _descriptor(grad_out, q_block),
        _descriptor(neg_lse.view(rows), [block_m]),
        _descriptor(delta.view(rows), [block_m]),
        _descriptor(dq.view(-1, DQ_COLUMNS), [DQ_ROWS[head_dim], DQ_COLUMNS]),
        table,
        table.new_empty(GLUON_PARTITIONS * workers * n_q if round_robin else 0),
        lists or (),
        sizes,
        semaphores,
        report,
        dk,
        dv,
        tuple(dk.stride()),
        tuple(dv.stride()),
        attention,
    )


def _fits_tma(x: Tensor) -> bool:
    *outer, last = x.stride()
    pitches = [stride * x.element_size() for size, stride in zip(x.shape[:-1], outer, strict=True) if size > 1]
    return last == 1 and x.data_ptr() % ALIGNED == 0 and all(pitch > 0 and pitch % ALIGNED == 0 for pitch in pitches)


def _descriptor(x: Tensor, block: list[int]) -> TensorDescriptor:
    """TMA's view of x in boxes of `block`; what lies outside of x reads as 0."""
    # The stride of a dimension of one element may be anything, and TMA checks it.
    strides = [stride if size > 1 else block[-1] for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], block, _layout(len(block), 8 * x.element_size()))


@functools.cache
def _layout(rank: int, bits: int) -> gl.NVMMASharedLayout:
    """How a box lies in shared memory, its elements `bits` wide: rows in swizzled chunks of 128 bytes, or one row as it is."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128 if rank > 1 else 0, element_bitwidth=bits, rank=rank)
