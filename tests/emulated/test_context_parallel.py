"""FlexAttention under torch's context parallelism, in segments: equal bits for any number of ranks.

`context_parallel_worker.py` is what a rank does. Tests of one rank are in this process.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import context_parallel_worker as worker
import pytest
import torch
import torch.distributed as dist
from attention import FP32_ERROR, compiled, differing, error, rewritten
from flex import Attention, alibi, backward_of, causal, documents, window_by_head, with_blind_rows
from processes import ranks
from tensors import BF16
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _cp_custom_ops
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import dash_inductor
from dash_inductor import decisions, emulation, enabled
from dash_inductor.parallel.fold import folded, in_pairs
from dash_inductor.rewrite import context_parallel

WORKER = str(Path(worker.__file__))
SEEDS = (1, 2)
RANKS = (1, 2, 4)
EACH = pytest.mark.parametrize("case", worker.CASES)
BITS_OF = ("out", "logsumexp", "dq", "dk", "dv")

Runs = list[dict[str, Tensor]]


def start(folder: Path, count: int, *names: str, options: tuple[str, ...] = (), seeds: tuple[int, ...] = SEEDS) -> list[Any]:
    """By rank, what each case left."""
    (folder / "ranks").unlink(missing_ok=True)
    command = [WORKER, str(folder), *names, "--seeds", *map(str, seeds), *options]
    for number, (status, output, _) in enumerate(ranks(count, command, folder)):
        assert status == 0, f"rank {number}: {output}"
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(count)]


def whole(reports: list[Any], case: str) -> Runs:
    """The tensors of a run, of the whole sequence, its parts in the order of ranks."""
    by_rank = [report[case]["runs"] for report in reports]
    return [{name: torch.cat([part[name] for part in parts], 2) for name in BITS_OF} for parts in zip(*by_rank, strict=True)]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[Any]]:
    """For a number of ranks, those of all cases."""
    return functools.cache(lambda count: start(tmp_path_factory.mktemp("ranks"), count, *worker.CASES))


def unequal(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    return [name for name in BITS_OF if not torch.equal(one[name], other[name])]


@pytest.mark.nightly
@EACH
def test_equal_bits_for_any_number_of_ranks(case: str, reports: Callable[[int], list[Any]]) -> None:
    """The forward's, which is torch's, too; in other interleavings on each rank."""
    first, *others = [run for count in RANKS for run in whole(reports(count), case)]
    assert len(others) == len(RANKS) * len(SEEDS) - 1
    assert [unequal(first, other) for other in others] == [[]] * len(others)
    for count in RANKS:
        for report in reports(count):
            decisions = report[case]["decisions"]
            assert {decision.segments for decision in decisions} == {worker.SEGMENTS // count}
            one, another = report[case]["orders"]
            assert one and one != another


@pytest.mark.nightly
@EACH
def test_gradients_are_those_of_the_whole_attention(case: str, reports: Callable[[int], list[Any]]) -> None:
    of_case, order = worker.CASES[case], reports(1)[0][case]["order"]
    expected = Attention(of_case.mask).reference(of_case.tensors())
    bound = 2**-6 if of_case.dtype == BF16 else FP32_ERROR
    for run in whole(reports(max(RANKS)), case):
        for name, gradient in zip(("dq", "dk", "dv"), expected, strict=True):
            assert error(run[name], gradient[:, :, order]) < bound, name


@pytest.mark.nightly
@pytest.mark.parametrize(("mutant", "counts"), [("each rank's own first", (1, 2)), ("the first rank last", (1, 4))])
def test_another_order_of_the_fold_is_seen(mutant: str, counts: tuple[int, int], tmp_path: Path) -> None:
    """dK and dV differ then between numbers of ranks, and nothing else."""
    starts = [start(tmp_path, count, "documents", options=("--mutant", mutant), seeds=(1,)) for count in counts]
    (one,), (other,) = (whole(reports, "documents") for reports in starts)
    assert unequal(one, other) == ["dk", "dv"]


@pytest.mark.nightly
def test_without_segments_the_number_of_ranks_decides(tmp_path: Path) -> None:
    """torch's reduce-scatter: equal bits in every run of one number of ranks, others for another number."""
    found = {count: whole(start(tmp_path, count, "documents", options=("--segment", "0")), "documents") for count in (1, 2)}
    for one, other in found.values():
        assert unequal(one, other) == []
    assert unequal(found[1][0], found[2][0]) == ["dk", "dv"]


@pytest.mark.nightly
def test_a_segment_that_ranks_do_not_divide(tmp_path: Path) -> None:
    """Stock's kernels and torch's reduce-scatter stay, with the reason."""
    for report in start(tmp_path, 4, "causal", options=("--segment", "256"), seeds=(1,)):
        decision, *_ = report["causal"]["decisions"]
        assert decision.reason == "segment=256 does not divide the 128 queries of this rank"
        assert "a divisor of 128" in decision.remedy


@pytest.fixture
def group() -> Iterator[str]:
    """The name of a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def gathering(attention: Attention, group: str) -> Callable[..., Tensor]:
    """The attention of keys that are gathered from the ranks of the group, as torch's hook does it."""
    mask = attention.block_mask()

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = _cp_custom_ops.flex_cp_allgather(key, value, 2, group)
        gqa = query.shape[1] != key.shape[1]
        return flex_attention(query, key, value, score_mod=attention.mod, block_mask=mask, scale=attention.scale, enable_gqa=gqa)

    return attend


ALONE = {
    "causal": (Attention(causal, None, 256, heads=2, kv_heads=1), 64),
    "one segment": (Attention(causal, None, 128, heads=2, kv_heads=1), 128),
    "six segments": (Attention(documents(70, 90, 32), alibi(1), 192, heads=1, batch=2), 32),
    "masks of heads": (Attention(window_by_head, None, 96, heads=4, kv_heads=2, mask_sizes=(None, 4)), 32),
    "more keys": (Attention(causal, None, 128, kv_len=200, heads=2, kv_heads=1), 64),
    "blind rows": (Attention(with_blind_rows, None, 128, heads=2), 64),
    "blocks of several tiles": (Attention(causal, None, 256, heads=2, kv_heads=1, block=(64, 64)), 64),
    "value's head dim": (Attention(causal, None, 128, heads=2, head_dim=32, value_dim=16), 64),
}


def gradients_of(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """dq, dk, dv of the compiled function, for a grad_out and an interleaving."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    with emulation.emulate():
        out = compiled(function)(*leaves)

    def gradients(grad_out: Tensor, seed: int = 0, resident: int | None = None) -> tuple[Tensor, ...]:
        with emulation.emulate(seed, resident=resident):
            return torch.autograd.grad(out, leaves, grad_out, retain_graph=True)

    return gradients


@pytest.mark.usefixtures("rewriting")
@pytest.mark.parametrize("name", ALONE)
def test_bits_are_those_of_segments_folded(name: str, group: str) -> None:
    """Of each segment, what a whole attention gives whose other queries have no gradient; neighbours are added first."""
    attention, segment = ALONE[name]
    *inputs, grad_out = attention.tensors()
    own = torch.arange(attention.q_len) // segment
    segments = int(own[-1]) + 1
    weighted = grad_out * torch.tensor([1e8, 1.0, -1e8])[own % 3, None]
    with enabled(guarantee="batch"):
        unsegmented = gradients_of(attention.function(), inputs)
        dq, *_ = unsegmented(weighted)
        alone = [unsegmented(weighted.where((own == index)[:, None], 0.0))[1:] for index in range(segments)]
    with enabled(segment=segment):
        gradients = gradients_of(gathering(attention, group), inputs)
        actual = [gradients(weighted, *interleaving) for interleaving in [(0, None), (1, 1), (2, 3)]]
        plain = gradients(grad_out)
    assert rewritten() == 2 and decisions()[-1].segments == segments
    dk, dv = (folded(torch.stack(parts)) for parts in zip(*alone, strict=True))
    assert [differing(found, (dq, dk, dv)) for found in actual] == [[]] * 3
    if segments > 2:  # sharp: another order has other bits
        assert "dv" in differing((dq, *(folded(torch.stack(parts).roll(1, 0)) for parts in zip(*alone, strict=True))), (dq, dk, dv))
    expected = attention.reference([*inputs, grad_out])
    assert max(error(a, e) for a, e in zip(plain, expected, strict=True)) < FP32_ERROR


def test_order_of_the_fold() -> None:
    """Neighbours, then neighbouring sums; an odd number in order. A rank's own pairs are pairs of all."""
    a, b, c, d = parts = torch.tensor([1e8, 1.0, -1e8, 1.0])
    assert folded(parts) == (a + b) + (c + d) == 0 != ((a + b) + c) + d
    assert folded(parts[:3]) == (a + b) + c
    numbers = torch.randn(24, 5, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e8, 1.0, -1e8]).repeat(8)[:, None]
    for count in (1, 2, 3, 4, 6, 8, 12, 24):
        assert torch.equal(folded(torch.cat([in_pairs(own) for own in numbers.chunk(count)])), folded(numbers)), count


CAUSAL = Attention(causal, None, 128, heads=2)
REASONS = {
    "no divisor": (CAUSAL, {"segment": 96}, "segment=96 does not divide the 128 queries of this rank"),
    "no whole blocks": (
        Attention(causal, None, 96, heads=2),
        {"segment": 48},
        "segment=48 is no multiple of the mask's block of 32 queries",
    ),
    "two passes": (CAUSAL, {"segment": 64, "template": "two_pass"}, "segment=64 takes one pass, template='two_pass' two"),
    "a large head dim": (
        Attention(causal, None, 128, head_dim=160, block=64),
        {"segment": 64},
        "segment=64 takes one pass, head dim 160 two",
    ),
    "no BlockMask": (Attention(None, None, 128, heads=2), {"segment": 64}, "segment=64 is no multiple of the mask's block of"),
}


@pytest.mark.usefixtures("rewriting")
@pytest.mark.parametrize("name", REASONS)
def test_what_is_declined(name: str, group: str) -> None:
    """It keeps stock's kernel and torch's reduce-scatter, and gradients are right; or it raises."""
    attention, settings, reason = REASONS[name]
    tensors = attention.tensors()
    with enabled(**settings):
        actual = backward_of(gathering(attention, group), tensors)()
    assert rewritten() == 0 and decisions()[-1].reason.startswith(reason) and decisions()[-1].remedy
    assert max(error(a, e) for a, e in zip(actual, attention.reference(tensors), strict=True)) < FP32_ERROR
    with (
        enabled(**settings, on_unsupported="error"),
        pytest.raises(Exception, match=r"UnsupportedAttentionError: dash_inductor leaves flex_attention_backward .*segment="),
    ):
        backward_of(gathering(attention, group), tensors)()


@pytest.mark.usefixtures("rewriting")
def test_dynamic_shapes_are_declined(group: str) -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = _cp_custom_ops.flex_cp_allgather(key, value, 2, group)
        mask = create_block_mask(causal, None, None, query.shape[2], key.shape[2], device="cpu", BLOCK_SIZE=32)
        return flex_attention(query, key, value, block_mask=mask)

    *inputs, grad_out = CAUSAL.tensors()
    leaves = [x.requires_grad_() for x in inputs]
    with enabled(segment=64), emulation.emulate():
        compiled(attend, dynamic=True)(*leaves).backward(grad_out)
    assert decisions()[-1].reason == "segment=64 under dynamic shapes"


@pytest.mark.usefixtures("rewriting")
def test_an_attention_that_gathers_nothing_is_as_before(caplog: pytest.LogCaptureFixture) -> None:
    """And a warning says so, for keys may be gathered outside of its graph."""
    gradients = backward_of(CAUSAL.function(), CAUSAL.tensors())()
    context_parallel.warn_of_none.cache_clear()
    with enabled(segment=64), caplog.at_level(logging.WARNING, "dash_inductor"):
        assert differing(backward_of(CAUSAL.function(), CAUSAL.tensors())(), gradients) == []
    assert decisions()[-1].rewritten and decisions()[-1].segments is None
    assert "segment=64 is set, but an attention has no keys that its own graph gathers" in caplog.text


@pytest.mark.usefixtures("rewriting")
def test_without_the_setting_nothing_changes(group: str) -> None:
    alone = backward_of(CAUSAL.function(), CAUSAL.tensors())()
    actual = backward_of(gathering(CAUSAL, group), CAUSAL.tensors())()
    assert differing(actual, alone) == [] and decisions()[-1].segments is None
    assert dash_inductor.config.current().segment == 0
