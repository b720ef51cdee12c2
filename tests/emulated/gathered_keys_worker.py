"""One rank of tests/emulated/test_gathered_keys.py: attentions whose graph gathers the keys of all ranks by functional collectives.

The first 1, 2 and 4 of the ranks run each attention. Rank 0 writes what it finds into a file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from tensors import normal
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

import dash_inductor
from dash_inductor import emulation

aten = torch.ops.aten
RANKS = (1, 2, 4)
NAMES = ("out", "dq", "dk", "dv")
WEIGHTS = (1e3, 1.0, -1e3, 1.0)  # of the segments' gradients, so that another order of their sum has other bits
WINDOW = 40
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TIMEOUT = 300  # seconds, of a collective


def forward(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """The attention of a part of a ring."""
    return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal)


def backward(is_causal: bool, **tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Its gradients."""
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(**tensors, dropout_p=0.0, is_causal=is_causal)


@dataclass(frozen=True)
class Case:
    """An attention of `segment` times `segments` queries and as many keys.

    Attributes:
        form: "sdpa", "flex", "varlen", which is causal, or "ring", torch's, which gathers nothing and is causal too.
        mask: "full", "causal", "window" or "documents".
        gather: key and value by head; by place, as projections leave them; or both together.
        repeats: whether the graph repeats kv heads.
        documents: how many there are.
    """

    form: str = "sdpa"
    mask: str = "causal"
    gather: str = "heads"
    guarantee: str = "device"
    dtype: str = "fp32"
    batch: int = 1
    kv_heads: int = 1
    group: int = 2
    head_dim: int = 16
    segment: int = 32
    segments: int = 4
    documents: int = 3
    repeats: bool = False

    @property
    def length(self) -> int:
        """Queries of all ranks."""
        return self.segment * self.segments

    def tensors(self) -> list[Tensor]:
        """query, key, value and grad_out of all ranks, [B, H, S, D]."""
        heads = self.kv_heads * self.group
        shapes = [(self.batch, count, self.length, self.head_dim) for count in (heads, self.kv_heads, self.kv_heads, heads)]
        *inputs, grad_out = (normal(*shape, seed=number) for number, shape in enumerate(shapes))
        weights = torch.tensor(WEIGHTS)[torch.arange(self.length) // self.segment % len(WEIGHTS)]
        return [x.to(DTYPES[self.dtype]) for x in (*inputs, grad_out * weights[:, None])]

    def document(self) -> Tensor:
        """The number of each place's document."""
        return torch.bucketize(torch.arange(self.length), self.ends(), right=True)

    def ends(self) -> Tensor:
        """Where documents end, none of them with a segment, but the last one."""
        return torch.tensor([self.length * n // self.documents + 5 * (n < self.documents) for n in range(1, self.documents + 1)])

    def visible(self, m: Any, n: Any, document: Tensor) -> Any:
        """Whether query m sees key n. document: of each place."""
        if self.mask == "documents":
            return (m >= n) & (document[m] == document[n])
        return {"full": m == m, "causal": m >= n, "window": (m >= n) & (m - n < WINDOW)}[self.mask]

    def reference(self) -> list[Tensor]:
        """out, dq, dk, dv in float64."""
        *leaves, grad_out = (x.double() for x in self.tensors())
        leaves = [x.requires_grad_() for x in leaves]
        place = torch.arange(self.length)
        seen = self.visible(place[:, None], place[None], self.document())
        query, key, value = leaves[0], *(x.repeat_interleave(self.group, 1) for x in leaves[1:])
        scores = (query @ key.mT / math.sqrt(self.head_dim)).masked_fill(~seen, -math.inf)
        out = scores.softmax(-1) @ value
        return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]

    def function(self, rank: int, ranks: int, group: dist.ProcessGroup) -> Callable[..., Any]:
        """The attention of a rank's query, key and value; a ring is of grad_out too, and returns all NAMES."""
        own, length, document = self.length // ranks, self.length, self.document()
        start = rank * own
        if self.form == "varlen":
            ends = self.ends().tolist() if self.mask == "documents" else [length]
            edges = [0, *ends]
            # Of documents that this rank has queries of: its queries, and the keys from the first one to the last that they see.
            met = [(a, b) for a, b in itertools.pairwise(edges) if b > start and a < start + own]
            cu_q = torch.tensor([max(a, start) - start for a, _ in met] + [own], dtype=torch.int32)
            cu_k = torch.tensor([a for a, _ in met] + [start + own], dtype=torch.int32)

            def packed(*tensors: Tensor) -> Tensor:
                query, key, value = (x[0].transpose(0, 1) for x in tensors)
                key, value = (all_gather_tensor_autograd(x.contiguous(), 0, group) for x in (key, value))
                out = varlen_attn(query, key, value, cu_q, cu_k, own, length, window_size=(-1, 0), enable_gqa=self.group > 1)
                return out.transpose(0, 1)[None]

            return packed
        if self.form == "ring":

            def around(query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
                out, logsumexp = ring._templated_ring_attention(group, 2, forward, query, key, value, is_causal=True)
                tensors = grad_out, "grad_out", query, key, value, out, logsumexp
                return out, *ring._templated_ring_attention_backward(group, 2, backward, *tensors, True)[:3]

            return around
        if self.form == "flex":
            mask = create_block_mask(
                lambda b, h, m, n: self.visible(m + start, n, document), None, None, own, length, "cpu", BLOCK_SIZE=(32, 32)
            )
            return lambda query, key, value: flex_attention(
                query, *self.gathered(key, value, group), block_mask=mask, enable_gqa=self.group > 1
            )

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            key, value = self.gathered(key, value, group)
            if self.repeats:
                key, value = (x.repeat_interleave(self.group, 1) for x in (key, value))
            m, n = torch.arange(start, start + own)[:, None], torch.arange(length)
            seen = None if self.mask == "full" else self.visible(m, n, document)
            return F.scaled_dot_product_attention(query, key, value, seen, enable_gqa=key.shape[1] < query.shape[1])

        return attend

    def gathered(self, key: Tensor, value: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        """Those of all ranks, [B, H_kv, S, D]."""
        if self.gather == "together":
            both = all_gather_tensor_autograd(torch.stack([key, value]), 3, group)
            return both[0], both[1]
        if self.gather == "heads":
            return all_gather_tensor_autograd(key, 2, group), all_gather_tensor_autograd(value, 2, group)
        by_place = (x.transpose(1, 2).flatten(2) for x in (key, value))
        key, value = (all_gather_tensor_autograd(x, 1, group).unflatten(2, (self.kv_heads, -1)).transpose(1, 2) for x in by_place)
        return key, value


CASES = {
    "sdpa": Case(mask="window", repeats=True),
    "varlen": Case("varlen", "documents"),
    "flex": Case("flex", "documents", "places", batch=2),
    "ring": Case("ring", group=1),
    "sdpa, full, at once": Case(mask="full", gather="together", guarantee="batch", batch=2, segment=64),
    "sdpa, bf16": Case(gather="places", dtype="bf16", segment=64),
}


@st.composite
def cases(draw: Any) -> Case:
    """Any that are not declined."""
    form = draw(st.sampled_from(["sdpa", "sdpa", "varlen", "flex"]))
    is_packed = form == "varlen"
    segment, segments = draw(st.sampled_from([(32, 4), (64, 4), (32, 8), (32, 12)]))
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (1, 3)]))
    return Case(
        form=form,
        mask=draw(st.sampled_from(["causal", "documents"] if is_packed else ["full", "causal", "window", "documents"])),
        gather="heads" if is_packed else draw(st.sampled_from(["heads", "places", "together"])),
        guarantee=draw(st.sampled_from(["run", "device"] if is_packed else ["run", "device", "batch"])),
        dtype=draw(st.sampled_from([*DTYPES])),
        batch=1 if is_packed else draw(st.integers(1, 2)),
        kv_heads=kv_heads,
        group=group,
        head_dim=draw(st.sampled_from([16, 24])),
        segment=segment,
        segments=segments,
        documents=draw(st.integers(1, 5)),
        repeats=form == "sdpa" and group > 1 and draw(st.booleans()),
    )


def random_cases(count: int) -> list[Case]:
    """The same in every process."""
    found: list[Case] = []

    @seed(0)
    @settings(max_examples=count, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck])
    @given(cases())
    def add(case: Case) -> None:
        found.append(case)

    add()
    return found


def run(case: Case, rank: int, ranks: int, group: dist.ProcessGroup) -> tuple[list[Tensor], list[Any]]:
    """NAMES of the whole sequence, and what became of this rank's attention."""
    torch._dynamo.reset()
    dash_inductor.clear_decisions()
    *inputs, grad_out = (x.chunk(ranks, 2)[rank].contiguous() for x in case.tensors())
    with dash_inductor.enabled(guarantee=case.guarantee, segment=case.segment):
        function = torch.compile(case.function(rank, ranks, group), backend="dash", fullgraph=True, dynamic=False)
        with emulation.emulate(seed=rank, sms=8):
            if case.form == "ring":
                mine = function(*inputs, grad_out)
            else:
                leaves = [x.requires_grad_() for x in inputs]
                out = function(*leaves)
                mine = [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]
    parts: list[Any] = [None] * ranks
    dist.all_gather_object(parts, [x.contiguous() for x in mine], group=group)
    return [torch.cat(tensors, 2) for tensors in zip(*parts, strict=True)], dash_inductor.decisions()


def outcome(case: Case, groups: dict[int, dist.ProcessGroup]) -> dict[str, Any]:
    """Of a case: what differs in a bit from the run of one rank, errors, and what became of it; {} on other ranks than 0."""
    rank = dist.get_rank()
    found = {ranks: run(case, rank, ranks, group) for ranks, group in groups.items() if rank < ranks}
    if rank:
        return {}
    whole, _ = found[1]
    expected = case.reference()
    differing = {
        ranks: [name for name, one, other in zip(NAMES, whole, tensors, strict=True) if not torch.equal(one, other)]
        for ranks, (tensors, _) in found.items()
    }
    errors = [float((x.double() - y).norm() / y.norm()) for x, y in zip(whole, expected, strict=True)]
    decisions = [decision for _, each in found.values() for decision in each]
    return {
        "case": asdict(case),
        "differing": differing,
        "error": max(errors),
        "segments": [decision.segments for decision in decisions],
        "reasons": [decision.reason for decision in decisions if decision.reason],
        "over_ranks": sorted({str(decision.over_ranks) for decision in decisions}),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--random", type=int, default=0)
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    ring._cp_options.enable_load_balance = False
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", f"file://{args.file}.ranks", timedelta(seconds=TIMEOUT), rank=rank, world_size=world)
    groups: Any = {ranks: dist.new_group([*range(ranks)]) for ranks in RANKS if ranks <= world}
    chosen = [CASES[name] for name in args.cases] + (random_cases(args.random) if args.random else [])
    outcomes = [outcome(case, groups) for case in chosen]
    if rank == 0:
        args.file.write_text(json.dumps(outcomes))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
