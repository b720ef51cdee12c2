"""Context parallel on GPUs that are not there: torch's ring, as each rank traces it, and what becomes of its attentions; and
FlexAttention of gathered keys, in segments."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
import triton
from kernels import MAIN, assert_expected, broken_gates, text
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.distributed.tensor.experimental._context_parallel import _cp_custom_ops  # noqa: F401 (registers its ops)
from torch.fx.experimental.proxy_tensor import decompose
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.machine_code.flex import flex_backward
from benchmarks.machine_code.generate import Generated, generate
from dash_inductor import enabled
from dash_inductor.codegen.flex import FlexAttention
from dash_inductor.codegen.mode import deterministic
from dash_inductor.explanation.report import _over_ranks
from dash_inductor.rewrite import context_parallel

RANKS, LENGTH = 4, 1024
aten = torch.ops.aten


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """One of RANKS, whose collectives are traced and go nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=RANKS)
    yield request.param
    dist.destroy_process_group()


class ByOps(TorchFunctionMode):
    """Slices and copies by their ops: Python's own way to them asks for the GPU of a fake tensor, which a CPU build refuses."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is Tensor.__getitem__ and isinstance(args[1], slice):
            return aten.slice.Tensor(args[0], 0, args[1].start, args[1].stop)
        if function is Tensor.contiguous:
            return aten.clone(args[0], memory_format=torch.contiguous_format)
        return function(*args, **kwargs or {})


def by_flash(query, key, value, grad_out):
    options, group = {"is_causal": True, "dropout_p": 0.0}, dist.group.WORLD
    tensors = {"query": query, "key": key, "value": value}
    out, logsumexp, *saved, seed, offset, _ = ring._templated_ring_attention(
        group, 2, aten._scaled_dot_product_flash_attention, **tensors, **options
    )
    names = ("cum_seq_q", "cum_seq_k", "max_q", "max_k")
    options |= dict(zip(names, saved, strict=True)) | {"philox_seed": seed, "philox_offset": offset}
    backward = partial(ring._templated_ring_attention_backward, group, 2)
    op = aten._scaled_dot_product_flash_attention_backward.default
    return backward(op, grad_out, "grad_out", **tensors, out=out, logsumexp=logsumexp, **options)[:3]


def by_efficient(query, key, value, grad_out):
    options, group = {"is_causal": True, "dropout_p": 0.0, "attn_bias": None}, dist.group.WORLD
    tensors = {"query": query, "key": key, "value": value}
    out, logsumexp, seed, offset = ring._templated_ring_attention(
        group, 2, aten._scaled_dot_product_efficient_attention, **tensors, **options, compute_log_sumexp=True
    )
    options |= {"philox_seed": seed, "philox_offset": offset, "grad_input_mask": (True, True, True, False)}
    backward = partial(ring._templated_ring_attention_backward, group, 2)
    op = aten._scaled_dot_product_efficient_attention_backward.default
    return backward(op, grad_out, "grad_out_", **tensors, out=out, logsumexp=logsumexp, **options)[:3]


def by_ops(function):
    def traced(*inputs):
        with ByOps(), decompose(select_decomp_table()):
            return function(*inputs)

    return traced


def arguments():
    return [torch.empty(1, LENGTH, 8, 128, dtype=torch.bfloat16, device="cuda").transpose(1, 2) for _ in range(4)]


IN_CI = (1, by_flash, True)  # half the keys of rank 0, half the queries against ranks 2 and 3
CASES = list(product(range(RANKS), (by_flash, by_efficient), (False, True)))


@pytest.mark.parametrize(
    ("rank", "function", "balanced"),
    [pytest.param(*case, marks=[] if case == IN_CI else pytest.mark.nightly) for case in CASES],
    indirect=["rank"],
)
def test_every_attention_of_the_ring_is_rewritten(rank, function, balanced, monkeypatch, caplog):
    """A rank's own block is causal. A plain ring takes the blocks before it, a balanced one half the keys or half the queries."""
    monkeypatch.setattr(ring._cp_options, "enable_load_balance", balanced)
    context_parallel.warn_of_none.cache_clear()
    with enabled(segment=128), deterministic():
        generated = generate(by_ops(function), arguments, "h100")
    assert [decision.reason for decision in generated.decisions if not decision.rewritten] == []
    others = [("full", LENGTH, LENGTH)] * rank
    if balanced:
        others = [("full", LENGTH, LENGTH // 2)] * rank + [("full", LENGTH // 2, LENGTH)] * (RANKS - 1 - rank)
    found = [(decision.mask, decision.q_len, decision.kv_len) for decision in generated.decisions]
    assert sorted(found) == sorted([("causal", LENGTH, LENGTH), *others])
    assert "attention_backward.default(" not in generated.source
    assert {decision.over_ranks for decision in generated.decisions} == {"ring"}
    assert "takes keys that go around a ring of ranks" in caplog.text
    (said,) = {_over_ranks(decision) for decision in generated.decisions}
    assert said.startswith("keys go around a ring: bits depend on the number of ranks")


SEGMENT = 1024
IN_SEGMENTS = {"length": 4 * SEGMENT, "batch": 2, "heads": 16, "kv_heads": 4, "mask_mod": "documents"}


def in_segments(key: str, head_dim: int, kernel: str = "triton") -> Generated:
    with enabled(segment=SEGMENT, kernel=kernel):
        return flex_backward(key, FlexAttention(**IN_SEGMENTS, head_dim=head_dim), group=dist.group.WORLD.group_name)


@pytest.mark.parametrize("rank", [0], indirect=True)
def test_segments_are_folded_in_the_place_of_a_reduce_scatter(rank):
    code = in_segments("h100", 64)
    (decision,) = code.decisions
    assert decision.rewritten and decision.segments == 4
    assert "dash.fold_segments.default(" in code.source and "flex_cp_allgather_backward" not in code.graph + code.source
    assert_expected(text(code, MAIN), "flex_gqa_in_segments_64", "functions", base="flex_documents_alibi_64")
    ((line,),) = (code.launches[name] for name, source in code.kernels.items() if MAIN in source)
    assert f", {4 * 2 * 4 * 4 * SEGMENT // 128}, 1, 1" in line  # a chain for each segment, kv head and KV tile


CELLS = [("h100", 64), ("h100", 128), ("a100", 128), ("b200", 128)]


@pytest.mark.parametrize(
    ("rank", "key", "head_dim"),
    [pytest.param(0, *cell, marks=[] if cell == CELLS[0] else pytest.mark.nightly) for cell in CELLS],
    indirect=["rank"],
)
def test_compiled_kernels_pass_the_gates(rank, key, head_dim):
    """But for what the larger tile of an H100 spills, by Triton."""
    spilled = {"3.6": 13, "3.7": 7, "3.9": 0}.get(triton.__version__[:3], 13) if (key, head_dim) == ("h100", 64) else 0
    code = in_segments(key, head_dim)
    (name,) = [name for name, source in code.kernels.items() if MAIN in source]
    row, violated = broken_gates(code, key, name, head_dim, most_local=spilled)
    assert violated == [], row
