"""dK and dV of context parallelism: the sums of segments of queries, added up in one order, whichever rank has which segment.

    dash::fold_segments(dk, dv, segments, dtype, group) -> (dk, dv)

Each rank has queries of `segments` segments and all keys: dk [segments * B, H_kv, S_k, D] and dv [.., D_v], fp32, are what each of
its segments adds to the gradients of all keys. What comes back, [B, H_kv, S_k / ranks, D] and [.., D_v], is the sum over the
segments of all ranks, for the rank's own keys, rounded to `dtype` once. It stands in the place of torch's
cplib::flex_cp_allgather_backward, a reduce-scatter, whose order is the backend's.

The order: neighbours are added in pairs while their number is even, then pairs of pairs, and so on; an odd number is added up in
order. A rank does so with its own segments first. As every rank has the same number, its pairs are pairs of the whole sequence too.
So the sum is the same for any number of ranks, and where a rank has 2^n segments it sends no more than one sum.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

_library = torch.library.Library("dash", "FRAGMENT")
_library.define(
    "fold_segments(Tensor dk, Tensor dv, int segments, ScalarType dtype, str group) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def in_pairs(parts: Tensor) -> Tensor:
    """[n, ..] -> [n / 2^k, ..]: sums of neighbours, then of neighbouring sums, while their number is even."""
    while len(parts) % 2 == 0:
        parts = parts[0::2] + parts[1::2]
    return parts


def folded(parts: Tensor) -> Tensor:
    """[n, ..] -> [..]: in pairs, then in order."""
    total, *others = in_pairs(parts)
    for part in others:
        total = total + part
    return total


def of_all_ranks(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[n, B, H, S, D] of all keys -> [ranks * n, B, H, S / ranks, D] of this rank's keys, rank by rank."""
    ranks = group.size()
    if ranks == 1:
        return parts
    sent = parts.unflatten(3, (ranks, -1)).movedim(3, 0).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.flatten(0, 1)


def _fold(dk: Tensor, dv: Tensor, segments: int, dtype: torch.dtype, group: str) -> tuple[Tensor, Tensor]:
    process_group = _group(group)
    own = (in_pairs(parts.unflatten(0, (segments, -1))) for parts in (dk, dv))
    dk, dv = (folded(of_all_ranks(parts, process_group)).to(dtype).contiguous() for parts in own)
    return dk, dv


def _fake(dk: Tensor, dv: Tensor, segments: int, dtype: torch.dtype, group: str) -> tuple[Tensor, Tensor]:
    ranks = _group(group).size()
    dk, dv = (x.new_empty([x.shape[0] // segments, x.shape[1], x.shape[2] // ranks, x.shape[3]], dtype=dtype) for x in (dk, dv))
    return dk, dv


def _group(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


_library.impl("fold_segments", _fold, "CompositeExplicitAutograd")
torch.library.register_fake("dash::fold_segments", _fake, lib=_library)
FOLD_SEGMENTS = torch.ops.dash.fold_segments.default
