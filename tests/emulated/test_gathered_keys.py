"""Attentions whose graph gathers the keys of all ranks by functional collectives, in segments: equal bits for any number of ranks.

`gathered_keys_worker.py` is what a rank does. Tests of one rank are in this process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gathered_keys_worker as worker
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from attention import FP32_ERROR, compiled, error, gradients, rewritten
from flash_attn_stand_in import attend as flash_attend
from flex import INTERLEAVINGS
from processes import ranks
from tensors import qkv
from torch import Tensor
from torch.distributed._functional_collectives import (
    all_gather_into_tensor_coalesced,
    all_gather_tensor_autograd,
    reduce_scatter_tensor,
)
from torch.nn.attention.flex_attention import flex_attention
from torch.torch_version import TorchVersion

from dash_inductor import decisions, enabled, explain
from dash_inductor.emulation import emulate
from dash_inductor.rewrite import context_parallel

ERRORS = {"fp32": FP32_ERROR, "bf16": 2**-6}
RANDOM = 100


def outcomes(count: int, folder: Path, *arguments: str) -> list[Any]:
    """Of `count` ranks, which the worker is given the arguments for."""
    file = folder / "outcomes.json"
    for number, (status, output, _) in enumerate(ranks(count, [worker.__file__, str(file), *arguments], folder, timeout=7200)):
        assert status == 0, f"rank {number}: {output}"
    return json.loads(file.read_text())


def assert_right(found: Any) -> None:
    """Right, in segments on every rank, and of equal bits where the forward's, a CPU's own but for varlen_attn, are equal."""
    assert found["error"] < ERRORS[found["case"]["dtype"]] and found["reasons"] == [], found
    assert found["segments"] == [found["case"]["segments"] // int(count) for count in found["differing"]], found
    assert found["over_ranks"] == ["gathered"]
    of_cpu = found["case"]["form"] != "varlen"
    assert not any(names for names in found["differing"].values() if not (of_cpu and "out" in names)), found


@pytest.mark.parametrize("names", ["sdpa", pytest.param("varlen flex", id="others", marks=pytest.mark.nightly)])
def test_equal_bits_for_any_number_of_ranks(names: str, tmp_path: Path) -> None:
    for found in outcomes(2, tmp_path, *names.split()):
        assert_right(found)
        assert found["differing"] == {"1": [], "2": []}


def test_bits_of_a_ring_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    """In the forward already."""
    (around,) = outcomes(2, tmp_path, "ring")
    assert around["over_ranks"] == ["ring"]
    assert around["differing"] == {"1": [], "2": ["out", "dq", "dk", "dv"]}
    assert around["error"] < FP32_ERROR and around["reasons"] == []


@pytest.mark.nightly
def test_equal_bits_of_random_attentions(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    found = outcomes(4, tmp_path, *(name for name in worker.CASES if name != "ring"), "--random", str(RANDOM))
    for each in found:
        assert_right(each)
    equal = [each for each in found if not any(each["differing"].values())]
    assert len(equal) > len(found) // 2
    record_property("attentions over gathered keys", len(found))
    record_property("of equal bits on 1, 2 and 4 ranks, forward included", len(equal))


@pytest.fixture
def group() -> Iterator[Any]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def gather(x: Tensor, dim: int = 2) -> Tensor:
    return all_gather_tensor_autograd(x, dim, dist.group.WORLD)


def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, **options)


def packed_by_head(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Key and value of a head beside each other, in fp32, as one projection leaves them; kv heads are repeated."""
    both = torch.cat([key, value], -1).transpose(1, 2).float()
    key, value = (x.repeat_interleave(2, 1).to(query.dtype) for x in gather(both, 1).transpose(1, 2).chunk(2, -1))
    return attend(query, key, value)


def by_flash_attn(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal, key and value in one tensor."""
    both = gather(torch.stack([key, value], 2).permute(0, 3, 2, 1, 4), 1)
    return flash_attend(query.transpose(1, 2), both, causal=True).transpose(1, 2)


def coalesced(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """By one collective of two tensors, [S, B, H, D]."""
    of_places = [x.permute(2, 0, 1, 3).contiguous() for x in (key, value)]
    key, value = (x.permute(1, 2, 0, 3) for x in all_gather_into_tensor_coalesced(of_places, dist.group.WORLD))
    return attend(query, key, value, is_causal=True)


WRITTEN: dict[str, Callable[..., Tensor]] = {
    "causal": lambda q, k, v: attend(q, gather(k), gather(v), is_causal=True),
    "packed by head": packed_by_head,
    "flash_attn": by_flash_attn,
    "only some keys": lambda q, k, v: attend(q, gather(k)[:, :, 32:], gather(v)[:, :, 32:]),
}


if TorchVersion(torch.__version__) >= "2.13":  # which gives it a gradient
    WRITTEN["coalesced"] = coalesced
IN_CI = ("packed by head",)


@pytest.mark.usefixtures("rewriting", "group")
@pytest.mark.every_case
@pytest.mark.parametrize("name", [pytest.param(x, marks=[] if x in IN_CI else pytest.mark.nightly) for x in WRITTEN])
def test_right_however_keys_are_gathered(name: str) -> None:
    function, heads = WRITTEN[name], {"packed by head": 2}.get(name, 4)
    *inputs, grad_out = qkv(2, 4, 128, 128, 16, kv_heads=heads)
    expected = gradients(function, inputs, grad_out)
    with enabled(segment=32):
        run, found = compiled(function), []
        for seed, resident in INTERLEAVINGS:
            with emulate(seed, resident=resident):
                found.append(gradients(run, inputs, grad_out))
    assert rewritten() == 1 and (decisions()[-1].segments, decisions()[-1].over_ranks) == (4, "gathered")
    assert max(error(a, e) for a, e in zip(found[0], expected, strict=True)) < FP32_ERROR
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other, strict=True))


class Averaged(torch.autograd.Function):
    """Gathers, and averages the gradient over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return gather(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return reduce_scatter_tensor(grad, "avg", 2, dist.group.WORLD)


class PlusOne(torch.autograd.Function):
    """Adds 1 to the gradient, which the gradients of segments would each get."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad + 1


def shared(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    key, value = gather(key), gather(value)
    return attend(query, key, value) + attend(query + 1, key, value)


BETWEEN = "segment: aten.{} stands between dK or dV and their sum over ranks"
DECLINED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "rotated behind the gather": (lambda q, k, v: attend(q, gather(k) * 2, gather(v)), BETWEEN.format("mul.Tensor")),
    "a number is added": (lambda q, k, v: attend(q, PlusOne.apply(gather(k)), gather(v)), BETWEEN.format("add.Tensor")),
    "keys of two attentions": (shared, BETWEEN.format("add.Tensor")),
    "used elsewhere": (
        lambda q, k, v: attend(q, k, gather(v)),
        "segment: dK or dV are not only summed over ranks",
    ),
    "averaged": (lambda q, k, v: attend(q, Averaged.apply(k), gather(v)), "segment: dK and dV are reduced over ranks by 'avg'"),
    "no whole segments": (
        lambda q, k, v: attend(q[:, :, :72], gather(k), gather(v)),
        "segment=32 does not divide the 72 queries of this rank",
    ),
}


@pytest.mark.usefixtures("rewriting", "group")
@pytest.mark.every_case
@pytest.mark.parametrize("name", DECLINED)
def test_what_is_declined(name: str) -> None:
    """It keeps stock's kernel and torch's sum over ranks, and gradients are right."""
    function, reason = DECLINED[name]
    inputs = qkv(1, 2, 128, 128, 16)[:3]
    expected = gradients(function, inputs)
    with enabled(segment=32), emulate():
        actual = gradients(compiled(function), inputs)
    assert any(decision.reason == reason and decision.remedy for decision in decisions())
    assert max(error(a, e) for a, e in zip(actual, expected, strict=True)) < FP32_ERROR


@pytest.mark.usefixtures("rewriting", "group")
def test_dynamic_shapes_and_packed_sequences_at_the_level_batch_are_declined() -> None:
    *inputs, grad_out = qkv(1, 2, 128, 128, 16)
    with enabled(segment=32), emulate():
        gradients(compiled(WRITTEN["causal"], dynamic=True), inputs, grad_out)
        assert decisions()[-1].reason == "segment=32 under dynamic shapes"
    case = worker.Case("varlen")
    *inputs, grad_out = case.tensors()
    with enabled(segment=32, guarantee="batch"), emulate():
        gradients(compiled(case.function(0, 1, dist.group.WORLD)), inputs, grad_out)
    assert str(decisions()[-1].reason).startswith("segment with guarantee='batch': which segment a query is in")


@pytest.mark.usefixtures("rewriting", "group")
def test_a_gathered_weight_is_no_key(caplog: pytest.LogCaptureFixture) -> None:
    """As FSDP gathers the weight of a norm: its gradient, a sum over all places, is summed over ranks too."""

    def function(query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
        return attend(query, key * gather(weight, 0), value)

    inputs = [*qkv(1, 2, 128, 128, 16)[:3], torch.rand(16)]
    expected = gradients(function, inputs)
    context_parallel.warn_of_none.cache_clear()
    with enabled(segment=32), emulate():
        actual = gradients(compiled(function), inputs)
    assert rewritten() == 1 and (decisions()[-1].segments, decisions()[-1].over_ranks) == (None, None)
    assert "has no keys that its own graph gathers from all ranks" in caplog.text
    assert max(error(a, e) for a, e in zip(actual, expected, strict=True)) < FP32_ERROR


@pytest.mark.nightly
@pytest.mark.usefixtures("rewriting", "group")
def test_what_is_declined_says_whether_stock_differs() -> None:
    """Whose gradients of captured tensors are sums by atomics."""
    slope = torch.rand(2)

    def function(query: Tensor, key: Tensor, value: Tensor, slope: Tensor) -> Tensor:
        return flex_attention(query, gather(key) * 2, gather(value), score_mod=lambda s, b, h, m, n: s + slope[h])

    with enabled(segment=128), emulate():
        gradients(compiled(function), [*qkv(1, 2, 128, 128, 16)[:3], slope])
    assert decisions()[-1].reason == BETWEEN.format("mul.Tensor") and decisions()[-1].stock_differs


@pytest.mark.usefixtures("rewriting", "group")
def test_explain_says_where_keys_come_from() -> None:
    class Model(torch.nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return WRITTEN["causal"](query, key, value)

    inputs = [x.requires_grad_() for x in qkv(1, 2, 128, 128, 16)[:3]]
    said = {}
    for segment in (0, 128):
        with enabled(segment=segment), emulate():
            said[segment] = str(explain(Model(), *inputs))
    assert "bits of dK and dV depend on the number of ranks, unless segment is set" in " ".join(said[0].split())
    assert "dK and dV summed by segments: equal bits for any number of ranks" in " ".join(said[128].split())
