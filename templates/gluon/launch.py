"""The Gluon kernel's launch: TMA descriptors of its tensors, semaphores, and what is compiled in."""

import functools
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._inductor.codecache import PyCodeCache
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..operands import Operands
from ..tiles import (
    GLUON_CONSUMERS,
    GLUON_DIMS,
    dims_text,
    gluon_columns,
    gluon_partitions,
    gluon_semaphores,
    why_not_gluon_dims,
)
from .functions import LOG2E
from .kernel import sdpa_backward
from .walk import Attention

__all__ = ["arguments", "sdpa_backward"]

OPTIONS: dict[str, Any] = {"num_warps": GLUON_CONSUMERS, "enable_fp_fusion": True}
ALIGNED = 16  # bytes: addresses and pitches that TMA takes
MOST_PLANS = 1024  # that are kept
FIRST_SCALAR, BEHIND_SCALARS = map(Operands._fields.index, ("workers", "semaphores"))
DQ_COLUMNS = 32  # fp32 values of a row of DQ as TMA sees it: 128 bytes
DQ_ROWS = {64: 256, 128: 256, 256: 128}  # by a tile's columns, rows that TMA adds at a time: a Q tile, of 256 columns a quarter
SHARE_BYTES = {64: 2**15, 128: 2**14}  # by a tile's columns, of shared memory for what elements add to the gradient of a capture
SHARE_ROWS = 64  # queries of those that are in registers at a time


class Lists(NamedTuple):
    """What the kernel has beside the table under a mask in blocks, whose entries are block of Q | full << 15 | rank << 16.

    The table is int32 [MASK_Z, MASK_H, KV blocks, Q blocks]. steps: int32 [MASK_Z, MASK_H, KV blocks], the Q tiles of a row, or
    [.., .., .., bands], those up to the end of each band. bits: int32, what templates/mask_bits.py.jinja writes. Where CTAs have
    parts of chains (templates/block_mask.py.jinja), of which there are at most most_chains, sums is fp32 [chains, 2, BLOCK_N * D].
    There are bands only where the longest of a head has least_steps.
    """

    steps: Tensor | None
    bits: Tensor | None
    kv_tiles: Any
    bands: Any
    most_chains: Any
    least_steps: Any
    sums: Tensor | None


class Plan(NamedTuple):
    """What launches have in common whose tensors differ in their addresses alone, on one device.

    descriptors: of query, key, value, grad_out, neg_lse, delta and dq, each with the tensor of the first launch's shape, but on no
    device. share: the same of `Operands.share`. is_taken: of the first four descriptors, whether TMA takes the tensor as it is.
    lists: `Lists` without tensors. outputs: descriptors of dk and dv, or the strides of both where TMA does not take them.
    compiled: what Triton made for the first of them, if that was launched; it specialises on nothing that the others have not.
    """

    descriptors: tuple[TensorDescriptor, ...]
    share: TensorDescriptor | None
    is_taken: tuple[bool, ...]
    semaphores: int
    own_rows: int
    lists: Any
    sizes: tuple[int, ...]
    slices: tuple[int, ...]
    outputs: tuple[Any, ...]
    attention: Attention
    compiled: list[Any]


_plans: dict[Any, Plan] = {}


def arguments(x: Operands, *, report: Tensor, most_chains: int) -> tuple[Plan, tuple[Any, ...]]:
    """The arguments of `sdpa_backward`, which is launched with OPTIONS, and the plan of them.

    x: in 16 bits, of rows that TMA takes; dq is written where a KV tile sees the Q tile. report: int32 [4] in memory of the host
    that the device can write to, for a wait that gives up. most_chains: as in `Lists`.

    Raises:
        ValueError: for another head dim or dtype, for more rows than TMA counts, and for neg_lse, delta or dq of another size.
    """
    shaped = x.query, x.key, x.value, x.grad_out, x.neg_lse, x.delta, x.dq, x.dk, x.dv
    pointers = x.table, x.steps, x.bits, x.sums, x.semaphores, x.drop_bits, x.share, *x.captures
    key = (
        *(x.query.device, x.query.dtype, x.dk.dtype, x.dv.dtype),
        *[(each.shape, each.stride(), each.data_ptr() % ALIGNED) for each in shaped],
        *[each is not None and (each.dtype, each.shape, each.data_ptr() % ALIGNED) for each in pointers],
        *(most_chains, *x.sizes, *x[FIRST_SCALAR:BEHIND_SCALARS]),
    )
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = _plan(x, most_chains)
    loaded: tuple[Tensor, ...] = shaped[:7]
    if not all(plan.is_taken):
        copied = [each if fits else each.clone().contiguous() for each, fits in zip(shaped[:4], plan.is_taken, strict=True)]
        loaded = (*copied, *shaped[4:7])
    return (
        plan,
        (
            *map(_with, plan.descriptors, loaded),
            _with(plan.share, x.share) if plan.share and x.share is not None else None,
            x.table,
            x.table.new_empty(plan.own_rows) if plan.own_rows else x.table,  # which then nobody reads
            plan.lists._replace(steps=x.steps, bits=x.bits, sums=x.sums) if plan.lists else plan.lists,
            plan.sizes,
            plan.slices,
            x.table.new_zeros(plan.semaphores) if x.semaphores is None else x.semaphores,
            report,
            x.dk,
            x.dv,
            *(map(_with, plan.outputs, shaped[7:]) if plan.attention.BY_TMA.value else plan.outputs),
            _with_tensors(plan.attention, x),
        ),
    )


def _plan(x: Operands, most_chains: int) -> Plan:
    batch, heads, q_len, key_dim = x.query.shape
    value_dim = x.value.shape[3]
    kv_heads, kv_len = x.key.shape[1:3]
    if x.query.element_size() != 2 or why_not_gluon_dims(key_dim, value_dim):
        asked = f"{x.query.dtype} at {dims_text(key_dim, value_dim)}"
        raise ValueError(f"the Gluon kernel takes bf16 and fp16 at head dims of {GLUON_DIMS}, not {asked}")
    columns = gluon_columns(key_dim, value_dim)
    n_q = -(-q_len // x.block_m)
    rows = batch * heads * n_q * x.block_m
    if rows * columns // DQ_COLUMNS >= 2**31:
        raise ValueError(f"the Gluon kernel takes fewer than 2**36 elements of query in whole tiles, not {rows * columns}")
    of_rows = (x.neg_lse, 1), (x.delta, 1), (x.dq, columns)
    if not all(each.is_contiguous() and each.numel() == rows * width for each, width in of_rows):
        raise ValueError(f"neg_lse, delta and dq must be contiguous, with {rows} rows")
    q_block, kv_block = [1, 1, x.block_m, columns], [1, 1, x.block_n, columns]
    loaded = (x.query, q_block), (x.key, kv_block), (x.value, kv_block), (x.grad_out, q_block)
    is_taken = tuple(_fits_tma(each) for each, _ in loaded)
    viewed = [
        *((each if fits else _as_copied(each), block) for (each, block), fits in zip(loaded, is_taken, strict=True)),
        *((each.view(rows), [x.block_m]) for each in (x.neg_lse, x.delta)),
        (x.dq.view(-1, DQ_COLUMNS), [DQ_ROWS[columns], DQ_COLUMNS]),
    ]
    segments = x.dk.shape[0] // batch
    chains = segments * batch * kv_heads * -(-kv_len // x.block_n)
    lists: Any = ()
    if x.steps is not None:
        assert x.bits is not None
        kv_tiles, bands, most, least = map(gl.constexpr, (x.kv_tiles, x.bands, most_chains, x.least_steps))
        lists = Lists(None, None, kv_tiles, bands, most, least, None)
    # In fp32 a tile has no place. With functions of the scores registers are few: a step would take 5 to 9 % more cycles, by the
    # replay.
    by_tma = not x.functions and all(each.element_size() == 2 and _fits_tma(each) for each in (x.dk, x.dv))
    functions = _functions(x.functions)
    slices = (x.bits.shape[2], x.number) if x.bits is not None and x.semaphores is not None else ()
    attention = Attention(
        heads=batch * kv_heads,
        hkv=kv_heads,
        nq=n_q,
        kv_len=kv_len,
        GROUP=gl.constexpr(heads // kv_heads),
        SETS=gl.constexpr(x.sets),
        CAUSAL=gl.constexpr(x.causal),
        SHARED_ROW=gl.constexpr(x.shared_row),
        ROUND_ROBIN=gl.constexpr(x.block_n // x.block_m if x.round_robin else 0),
        BLOCKS=gl.constexpr(x.q_tiles),
        EVEN_N=gl.constexpr(kv_len % x.block_n == 0),
        SCALE=gl.constexpr(x.scale),
        SCALE_LOG2E=gl.constexpr(x.scale * LOG2E.value),
        KEY_DIM=gl.constexpr(key_dim),
        VALUE_DIM=gl.constexpr(value_dim),
        q_len=q_len,
        EVEN_M=gl.constexpr(q_len % x.block_m == 0),
        FUNCTIONS=gl.constexpr(functions is not None),
        BEFORE=gl.constexpr(functions and functions.before),
        SCORES=gl.constexpr(functions and functions.scores_of),
        DERIVATIVE=gl.constexpr(getattr(functions, "derivative_of", None)),
        SEGMENTS=gl.constexpr(segments),
        SLICED=gl.constexpr(bool(slices)),
        DROP_SCALE=gl.constexpr(x.drop_scale),
        SHARE=gl.constexpr(getattr(functions, "share_0_of", None) if x.share is not None else None),
        BY_TMA=gl.constexpr(by_tma),
    )
    return Plan(
        tuple(_descriptor(each, block) for each, block in viewed),
        None if x.share is None else _of_share(x.share, columns, x.block_n),
        is_taken,
        semaphores=2 + gluon_semaphores(columns) * batch * heads * n_q + (chains if x.bands * x.sets > 1 else 0),
        own_rows=gluon_partitions(stores_values=x.share is not None) * x.workers * n_q if x.round_robin else 0,
        lists=lists,
        sizes=(*x.table.shape, x.steps.shape[3] if x.steps is not None and x.steps.dim() == 4 else 1),
        slices=slices,
        outputs=tuple(_descriptor(each, kv_block) if by_tma else tuple(each.stride()) for each in (x.dk, x.dv)),
        attention=attention,
        compiled=[],
    )


def _with_tensors(attention: Attention, x: Operands) -> Attention:
    if x.captures or x.sizes:
        attention = attention._replace(captures=(*x.captures, *x.sizes))
    return attention if x.drop_bits is None else attention._replace(drop_bits=x.drop_bits)


@functools.cache
def _functions(source: str) -> ModuleType | None:
    """The module of this source: BEFORE, SCORES, DERIVATIVE and SHARE are its before, scores_of, derivative_of and share_0_of."""
    return PyCodeCache.load(source) if source else None


def _of_share(share: Tensor, columns: int, block_n: int) -> TensorDescriptor:
    if columns not in SHARE_BYTES:
        raise ValueError(f"the Gluon kernel has no shared memory for gradients of captured tensors in {columns} columns")
    rows = min(SHARE_ROWS, SHARE_BYTES[columns] // (block_n * share.element_size()))
    return _descriptor(share.flatten(0, 1), [1, rows, block_n])


def _fits_tma(x: Tensor) -> bool:
    *outer, last = x.stride()
    pitches = [stride * x.element_size() for size, stride in zip(x.shape[:-1], outer, strict=True) if size > 1]
    return last == 1 and x.data_ptr() % ALIGNED == 0 and all(pitch > 0 and pitch % ALIGNED == 0 for pitch in pitches)


def _as_copied(x: Tensor) -> Tensor:
    """What the contiguous copy of x is like, without memory."""
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def _descriptor(x: Tensor, block: list[int]) -> TensorDescriptor:
    """TMA's view, in boxes of `block`, of tensors like x, which it does not hold; what lies outside reads as 0."""
    # The stride of a dimension of one element may be anything, and TMA checks it.
    strides = [stride if size > 1 else block[-1] for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)]
    like = torch.empty(0, dtype=x.dtype, device="meta")
    return TensorDescriptor(like, list(x.shape), [*strides, 1], block, _layout(len(block), 8 * x.element_size()))


def _with(descriptor: TensorDescriptor, base: Tensor) -> TensorDescriptor:
    """The descriptor of a tensor; what Triton checks was checked of the first."""
    made: TensorDescriptor = object.__new__(TensorDescriptor)
    made.__dict__.update(descriptor.__dict__)
    made.base = base
    return made


@functools.cache
def _layout(rank: int, bits: int) -> gl.NVMMASharedLayout:
    """How a box lies in shared memory, its elements `bits` wide: rows in swizzled chunks of 128 bytes, or one row as it is."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128 if rank > 1 else 0, element_bitwidth=bits, rank=rank)
