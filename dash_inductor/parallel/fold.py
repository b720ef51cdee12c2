"""dK and dV of context parallelism: the sums of segments of queries, added up in one order, whichever rank has which segment.

    dash::fold_segments(parts, dim, dtype, group) -> x

Each rank has queries of n segments and all keys: parts [n, ..], fp32, are what each of its segments adds to a gradient of all keys.
What comes back is the sum over the segments of all ranks, for the rank's own keys, rounded to `dtype` once: [..], whose size along
`dim` is divided by the number of ranks. It stands in the place of a reduce-scatter, whose order is the backend's.

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
    "fold_segments(Tensor parts, int dim, ScalarType dtype, str group) -> Tensor",
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


def of_all_ranks(parts: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """[n, ..] of all keys -> [ranks * n, ..] of this rank's, rank by rank: its share of the dimension `dim` behind the first."""
    ranks = group.size()
    if ranks == 1:
        return parts
    sent = parts.unflatten(dim + 1, (ranks, -1)).movedim(dim + 1, 0).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.flatten(0, 1)


def _fold(parts: Tensor, dim: int, dtype: torch.dtype, group: str) -> Tensor:
    return folded(of_all_ranks(in_pairs(parts), dim, _group(group))).to(dtype).contiguous()


def _fake(parts: Tensor, dim: int, dtype: torch.dtype, group: str) -> Tensor:
    size = list(parts.shape[1:])
    size[dim] = size[dim] // _group(group).size()
    return parts.new_empty(size, dtype=dtype)


def _group(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


_library.impl("fold_segments", _fold, "CompositeExplicitAutograd")
torch.library.register_fake("dash::fold_segments", _fake, lib=_library)
FOLD_SEGMENTS = torch.ops.dash.fold_segments.default
