"""The one op that every rewritten attention backward becomes, its fake, and its specification in plain torch.

    dash::sdpa_backward(grad_out, query, key, value, out, logsumexp, *, mask, blocks=None, scale=None) -> (dq, dk, dv)

grad_out, query, out are [B, H, S_q, D]; key, value [B, H_kv, S_k, D] with H_kv dividing H; logsumexp is the natural log, fp32
[B, H, S_q]. `mask` is full, causal_top_left, causal_bottom_right or table. dq, dk, dv have the strides of `torch.empty_like`.

`blocks` goes with mask="table" alone: bool [KV tiles, Q tiles], the same for all heads, true where all keys of the one and all
queries of the other meet. Tiles are those of the device for the dtype and head dim (templates/tiles.py): block_n keys,
block_m queries, the last ones cut off. Compiled, it must be a constant of the graph, such as `torch.tensor([[True, ...], ...])`
in the compiled function, and shapes must be static.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .schedule import MASKS, TABLE_MASK, Blocks, Plan, Schedule, Straddling
from .target import DTYPES, resolve, target_of, tiles_for
from .templates.tiles import MAX_HEAD_DIM, MIN_HEAD_DIM

LOG2E = 1.4426950408889634

_library = torch.library.Library("dash", "DEF")
_library.define(
    "sdpa_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, *, "
    "str mask, Tensor? blocks=None, float? scale=None) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def check(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    mask: str,
    blocks: Tensor | None,
) -> None:
    """Raises ValueError, naming the argument, for what the op does not take; sizes may be symbolic."""
    if mask not in (*MASKS, TABLE_MASK):
        raise ValueError(f"mask={mask!r} is not one of {', '.join((*MASKS, TABLE_MASK))}")
    if (mask == TABLE_MASK) != (blocks is not None):
        raise ValueError(f"blocks must be {'a tensor' if blocks is None else 'None'} with mask={mask!r}")
    if blocks is not None and (blocks.dtype != torch.bool or blocks.dim() != 2):
        raise ValueError(f"blocks {tuple(blocks.shape)} is {blocks.dtype}, it must be torch.bool [KV tiles, Q tiles]")
    for name, x in (("query", query), ("key", key)):
        if x.dim() != 4 or any(size == 0 for size in x.shape):
            raise ValueError(f"{name} {tuple(x.shape)} is not [B, H, S, D] with at least one element")
    batch, heads, q_len, head_dim = query.shape
    kv_heads, kv_len = key.shape[1:3]
    shapes = (
        ("key", key, (batch, kv_heads, kv_len, head_dim)),
        ("value", value, (batch, kv_heads, kv_len, head_dim)),
        ("out", out, (batch, heads, q_len, head_dim)),
        ("grad_out", grad_out, (batch, heads, q_len, head_dim)),
        ("logsumexp", logsumexp, (batch, heads, q_len)),
    )
    for name, x, shape in shapes:
        dtype = torch.float32 if name == "logsumexp" else query.dtype
        if x.dim() != len(shape) or any(has != must for has, must in zip(x.shape, shape, strict=True)):
            raise ValueError(f"{name} {tuple(x.shape)} must be {shape}, for query {tuple(query.shape)} and key {tuple(key.shape)}")
        if x.dtype != dtype or x.device != query.device:
            raise ValueError(f"{name} is {x.dtype} on {x.device}, it must be {dtype} on {query.device} like query")
    if query.dtype not in DTYPES:
        raise ValueError(f"query is {query.dtype}, not one of {', '.join(str(dtype) for dtype in DTYPES)}")
    if not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"query has head dim {head_dim}, outside {MIN_HEAD_DIM}..{MAX_HEAD_DIM}")
    if heads % kv_heads != 0:
        raise ValueError(f"key has {kv_heads} heads, which do not divide the {heads} of query")
    if mask.startswith("causal") and q_len != kv_len:
        raise ValueError(f"mask={mask!r} takes equal lengths, not S_q={q_len} and S_k={kv_len}")


def sdpa_backward_fake(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    *,
    mask: str,
    blocks: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    check(grad_out, query, key, value, out, logsumexp, mask, blocks)
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def sdpa_backward_eager(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    *,
    mask: str,
    blocks: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    check(grad_out, query, key, value, out, logsumexp, mask, blocks)
    target = target_of(query.device)
    resolved = resolve(
        target,
        tiles_for(target, query.dtype, query.shape[3], mask),
        q_len=query.shape[2],
        kv_len=key.shape[2],
        heads=key.shape[0] * key.shape[1],
        group=query.shape[1] // key.shape[1],
        mask=mask,
        blocks=None if blocks is None else rows_of(blocks),
    )
    return planned(grad_out, query, key, value, out, logsumexp, resolved.plan, scale)


def rows_of(blocks: Tensor) -> Blocks:
    """`blocks` as a geometry takes them."""
    return tuple(map(tuple, blocks.tolist()))


def planned(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    plan: Plan | Straddling,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference` under the schedule of each kv head; most plans have one for all."""
    batch, kv_heads = key.shape[:2]
    heads_of: dict[Schedule, list[int]] = {}
    for head in range(batch * kv_heads):
        heads_of.setdefault(plan.schedule_of(head), []).append(head)
    inputs = grad_out, query, key, value, out, logsumexp
    # [B, H, ...] -> [B * H_kv, group, ...]: every kv head a batch of its own
    alone = [x.reshape(batch * kv_heads, x.shape[1] // kv_heads, *x.shape[2:]) for x in inputs]
    grads = [torch.empty_like(x) for x in alone[1:4]]
    for schedule, heads in heads_of.items():
        do, q, k, v, o, lse = (x[heads] for x in alone)
        found = reference(do, q, k, v, o, lse, schedule, scale)
        for grad, part in zip(grads, found, strict=True):
            grad[heads] = part
    dq, dk, dv = (
        torch.empty_like(like).copy_(grad.view(like.shape)) for grad, like in zip(grads, (query, key, value), strict=True)
    )
    return dq, dk, dv


def reference(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    schedule: Schedule,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The specification: tile by tile, dQ summed in rank order, dK and dV along their chains, everything in fp32.

    Where the products of one tile are exact, a kernel must give these very bits. To be read, it computes S and dP twice (for dK/dV,
    then for dQ), which the kernels do not.
    """
    geometry = schedule.geometry
    scale = 1 / math.sqrt(query.shape[3]) if scale is None else scale
    group = query.shape[1] // key.shape[1]
    low = query.dtype
    q_len, kv_len = geometry.q_len, geometry.kv_len

    def grouped(x: Tensor) -> Tensor:  # [B, H, S, ...] -> [B, H_kv, group, S, ...] in fp32
        return x.float().unflatten(1, (key.shape[1], group))

    q, do = grouped(query), grouped(grad_out)
    k, v = key.float(), value.float()
    delta = (grouped(out) * do).sum(-1)
    neg_lse = torch.where(grouped(logsumexp).isneginf(), -math.inf, grouped(logsumexp) * -LOG2E)
    rows = torch.arange(q_len, device=query.device)
    keys = torch.arange(kv_len, device=query.device)

    def tile_of_step(i: int, j: int, g: int) -> tuple[slice, slice, Tensor, Tensor]:
        # P and dS of Q tile i, KV tile j, [B, H_kv, rows, keys], rounded as the matmuls take them
        m = slice(i * geometry.block_m, min((i + 1) * geometry.block_m, q_len))
        n = slice(j * geometry.block_n, min((j + 1) * geometry.block_n, kv_len))
        s = (q[:, :, g, m] @ k[:, :, n].mT) * (scale * LOG2E) + neg_lse[:, :, g, m, None]
        if geometry.is_causal:
            s = s.masked_fill(keys[n] > rows[m, None], -math.inf)
        p = torch.exp2(s)
        ds = p * (do[:, :, g, m] @ v[:, :, n].mT - delta[:, :, g, m, None])
        return m, n, p.to(low).float(), ds.to(low).float()

    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for j in range(geometry.n_kv):
        for i in schedule.order(j):
            for g in range(group):
                m, n, p, ds = tile_of_step(i, j, g)
                dv[:, :, n] += p.mT @ do[:, :, g, m]
                dk[:, :, n] += ds.mT @ q[:, :, g, m]

    dq = torch.zeros_like(q)
    for i in range(geometry.n_q):
        for j in sorted(geometry.contributors(i), key=lambda j: schedule.rank(i, j)):
            for g in range(group):
                m, n, _, ds = tile_of_step(i, j, g)
                dq[:, :, g, m] += ds @ k[:, :, n]

    grads = ((dq.flatten(1, 2) * scale, query), (dk * scale, key), (dv, value))
    dq, dk, dv = (torch.empty_like(like).copy_(grad) for grad, like in grads)
    return dq, dk, dv


_library.impl("sdpa_backward", sdpa_backward_eager, "CompositeExplicitAutograd")
torch.library.register_fake("dash::sdpa_backward", sdpa_backward_fake, lib=_library)
