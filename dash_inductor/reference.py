"""The specification of `dash::sdpa_backward` in plain torch: every sum in the order of the schedule."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .schedule import Order, Plan

LOG2E = 1.4426950408889634


def planned(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    plan: Plan,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference` under the order of each kv head; most plans have one for all."""
    batch, kv_heads = key.shape[:2]
    heads_of: dict[Order, list[int]] = {}
    for head in range(batch * kv_heads):
        heads_of.setdefault(plan.order_of(head), []).append(head)
    inputs = grad_out, query, key, value, out, logsumexp
    # [B, H, ...] -> [B * H_kv, group, ...]: every kv head a batch of its own
    alone = [x.reshape(batch * kv_heads, x.shape[1] // kv_heads, *x.shape[2:]) for x in inputs]
    grads = [torch.empty_like(x) for x in alone[1:4]]
    for order, heads in heads_of.items():
        do, q, k, v, o, lse = (x[heads] for x in alone)
        for grad, part in zip(grads, reference(do, q, k, v, o, lse, order, scale), strict=True):
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
    order: Order,
    scale: float | None = None,
    part_of: Callable[[int, int, int], int] = lambda i, j, g: 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The specification: tile by tile, dQ summed in rank order, dK and dV along their chains, everything in fp32.

    part_of: the part of the chain that a (Q tile, KV tile, query head of the group) is of. A chain's parts are summed one by one,
    and then added up in order.

    Where the products of one tile are exact, a kernel must give these very bits. To be read, it computes S and dP twice (for dK/dV,
    then for dQ), which the kernels do not.
    """
    geometry = order.geometry
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
        steps = [(part_of(i, j, g), i, g) for i in order.visits(j) for g in range(group)]
        for part in sorted({part for part, *_ in steps}):
            part_dk, part_dv = torch.zeros(()), torch.zeros(())
            for _, i, g in filter(lambda step: step[0] == part, steps):
                m, n, p, ds = tile_of_step(i, j, g)
                part_dv = part_dv + p.mT @ do[:, :, g, m]
                part_dk = part_dk + ds.mT @ q[:, :, g, m]
            dv[:, :, n] += part_dv
            dk[:, :, n] += part_dk

    dq = torch.zeros_like(q)
    for i in range(geometry.n_q):
        for j in sorted(geometry.contributors(i), key=lambda j: order.rank(i, j)):
            for g in range(group):
                m, n, _, ds = tile_of_step(i, j, g)
                dq[:, :, g, m] += ds @ k[:, :, n]

    grads = ((dq.flatten(1, 2) * scale, query), (dk * scale, key), (dv, value))
    dq, dk, dv = (torch.empty_like(like).copy_(grad) for grad, like in grads)
    return dq, dk, dv
