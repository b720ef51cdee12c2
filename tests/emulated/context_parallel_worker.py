"""One rank of tests/emulated/test_context_parallel.py: FlexAttention under torch's context parallelism, by its module hook.

Each rank saves, of each case and interleaving, its own part of the tensors. Ranks find each other by a file.
"""

from __future__ import annotations

import argparse
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from flex import Mod, causal, documents_per_batch
from tensors import BF16, FP32, qkv
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental._context_parallel import _attention as stock
from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import dash_inductor
from dash_inductor import emulation
from dash_inductor.parallel import fold

SEGMENT, SEGMENTS = 128, 4  # torch's masks have blocks of 128 queries
LENGTH = SEGMENT * SEGMENTS
MOST_RANKS = 4
# Of the segments' gradients, so that another order of their sum has other bits: large ones round small ones away, or in part.
FAR, NEAR = (1e8, 1.0, -1e8, 1.0), (1e3, 1.0, -1e3, 1.0)
NAMES = ("out", "logsumexp", "dq", "dk", "dv")
TIMEOUT = 120  # seconds, of a collective


def causal_documents(*batch: tuple[int, ...]) -> Mod:
    """Of each batch element its own."""
    together = documents_per_batch(*batch)
    return lambda b, h, m, n: (m >= n) & together(b, h, m, n)


@dataclass(frozen=True)
class Case:
    """balanced: by torch's load balancer, for MOST_RANKS, however many there are."""

    mask: Mod
    guarantee: str = "batch"
    batch: int = 1
    weights: tuple[float, ...] = (1.0,) * SEGMENTS
    balanced: bool = False
    dtype: torch.dtype = FP32

    def tensors(self) -> list[Tensor]:
        """query, key, value, grad_out of the whole sequence, as it was before anybody rearranged it."""
        *inputs, grad_out = qkv(self.batch, 2, LENGTH, LENGTH, 16, kv_heads=1, dtype=self.dtype)
        return [*inputs, grad_out * torch.tensor(self.weights).repeat_interleave(SEGMENT)[:, None].to(self.dtype)]

    def balancer(self) -> _HeadTailLoadBalancer | None:
        """torch's, where there is one."""
        return _HeadTailLoadBalancer(LENGTH, MOST_RANKS, "cpu") if self.balanced else None


CASES = {
    "causal": Case(causal),
    "documents": Case(causal_documents((LENGTH,), (90, 170, 252)), batch=2, weights=NEAR),
    "balanced": Case(causal, "device", weights=FAR, balanced=True, dtype=BF16),
}


def own_first(parts: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """A sum that depends on who has which segment: each rank adds up its own."""
    total = parts[:1]
    for part in parts[1:]:
        total = total + part
    return fold_of_all_ranks(total, dim, group)


def from_the_second_rank_on(parts: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Another order of the ranks: the first one is last."""
    return fold_of_all_ranks(parts, dim, group).unflatten(0, (group.size(), -1)).roll(-1, 0).flatten(0, 1)


fold_of_all_ranks = fold.of_all_ranks
MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "each rank's own first": lambda patch: (
        patch.setattr(fold, "in_pairs", lambda parts: parts),
        patch.setattr(fold, "of_all_ranks", own_first),
    ),
    "the first rank last": lambda patch: patch.setattr(fold, "of_all_ranks", from_the_second_rank_on),
}


class Attention(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask) -> tuple[Tensor, Tensor]:
        return flex_attention(query, key, value, block_mask=block_mask, enable_gqa=True, return_lse=True)


class Model(nn.Module):
    """What torch's context parallelism hooks into is a part of it."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.attention = Attention()
        stock._ContextParallel(2, stock._ContextParallel.AttentionType.FLEX)._apply(self.attention, mesh)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask) -> tuple[Tensor, Tensor]:
        return self.attention(query, key, value, block_mask)


def run(case: Case, mesh: DeviceMesh, seeds: list[int]) -> dict:
    """This rank's part of NAMES, once for each interleaving, and what became of the attention."""
    torch._dynamo.reset()
    dash_inductor.clear_decisions()
    rank, ranks, balancer = dist.get_rank(), dist.get_world_size(), case.balancer()
    stock._cp_options.enable_load_balance = case.balanced  # as torch's _context_parallel_shard does
    makes_mask = stock._create_cp_block_mask
    size = {"BLOCK_SIZE": (128, 128)} if "BLOCK_SIZE" in inspect.signature(makes_mask).parameters else {}  # by torch 2.15
    mask = makes_mask(case.mask, case.batch, 1, LENGTH, LENGTH, device_mesh=mesh, load_balancer=balancer, **size)
    order = torch.arange(LENGTH) if balancer is None else balancer._generate_indices()[0]
    query, key, value, grad_out = (x[:, :, order].chunk(ranks, 2)[rank].contiguous() for x in case.tensors())
    runs, launched = [], []
    with dash_inductor.enabled(guarantee=case.guarantee):
        model = torch.compile(Model(mesh), backend="dash", fullgraph=True, dynamic=False)
        for seed in seeds:
            emulation.clear_launches()
            with emulation.emulate(seed, sms=8):
                leaves = [x.clone().requires_grad_() for x in (query, key, value)]
                out, logsumexp = model(*leaves, mask)
                gradients = torch.autograd.grad(out, leaves, grad_out)
            runs.append(dict(zip(NAMES, (out.detach(), logsumexp.detach(), *gradients), strict=True)))
            launched.append([launch.schedule for launch in emulation.launches()])
    return {"runs": runs, "decisions": dash_inductor.decisions(), "orders": launched, "order": order}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--segment", type=int, default=SEGMENT)
    parser.add_argument("--mutant", choices=MUTANTS)
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meeting = f"file://{args.folder}/ranks"
    dist.init_process_group("gloo", meeting, timedelta(seconds=TIMEOUT), rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    dash_inductor.configure(segment=args.segment)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stock, "_compiled_create_block_mask", create_block_mask)  # compiled, it takes seconds
        if args.mutant:
            MUTANTS[args.mutant](patch)
        done = {name: run(CASES[name], mesh, [seed * ranks + rank for seed in args.seeds]) for name in args.cases}
    torch.save(done, args.folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
