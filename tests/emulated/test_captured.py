"""Gradients of tensors that a score_mod captures: right in every shape and at every index, and each sum in one order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from attention import FP32_ERROR, compiled, error, mutate, rewritten
from flex import HIDDEN, INTERLEAVINGS, Attention, Mod, backward_of, causal, documents, wide_scores, window, with_blind_rows
from ordered_sums import Sum, large
from tensors import BF16, FP16, FP32, normal
from torch import Tensor
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.nn.attention.flex_attention import flex_attention

from dash_inductor import decisions, emulation, enabled
from dash_inductor.lowering import sums
from dash_inductor.lowering.buffers import zeros

pytestmark = pytest.mark.usefixtures("rewriting")

BATCH, HEADS, KV_HEADS, Q_LEN, KV_LEN = 3, 2, 1, 20, 50
SIZES = BATCH, HEADS, Q_LEN, KV_LEN
FAR = Q_LEN + KV_LEN  # more than any distance
IDS = torch.arange(KV_LEN) // 7 % 3
BUCKETS = (torch.arange(KV_LEN) - torch.arange(Q_LEN)[:, None]).clamp(-4, 3) + 4
PLAIN = Attention(None, None, Q_LEN, KV_LEN, BATCH, HEADS, KV_HEADS)


@dataclass(frozen=True)
class Tables:
    """What a score_mod captures: tensors of `shapes`, of which `mod` makes it. error: the most that a gradient may be off, which is
    more where it is a sum of products that nearly cancel out."""

    mod: Callable[..., Mod]
    shapes: tuple[tuple[int, ...], ...]
    error: float = FP32_ERROR

    def tensors(self, dtype: torch.dtype = FP32) -> list[Tensor]:
        return [(0.3 * normal(*shape, seed=7 + number)).to(dtype) for number, shape in enumerate(self.shapes)]


def table(*shape: int, at: Callable[..., tuple[Any, ...]]) -> Tables:
    """A bias, read at an index of b, h, m, n."""
    return Tables(lambda bias: lambda score, b, h, m, n: score + bias[at(b, h, m, n)], (shape,))


def slopes(of_heads: Tensor) -> Mod:
    return lambda score, b, h, m, n: score + of_heads[h] * (n - m)


def of_everything(bucket: Callable[[Any, Any], Any]) -> Callable[..., Mod]:
    """A gain of each head, a row of T5's table, a bias of each key, one of each pair below the diagonal."""

    def made(gain: Tensor, buckets: Tensor, of_keys: Tensor, of_pairs: Tensor) -> Mod:
        def mod(score: Tensor, b: Any, h: Any, m: Any, n: Any) -> Tensor:
            score = score * (1 + gain[h]) + buckets[bucket(m, n), h] + of_keys[b, n]
            return torch.where(n <= m, score + of_pairs[b, h, m, n], score)

        return mod

    return made


EVERYTHING = Tables(of_everything(lambda m, n: BUCKETS[m, n]), ((HEADS,), (8, HEADS), (BATCH, KV_LEN), SIZES), 2**-16)
CASES = {
    "[B, H, S, S]": table(*SIZES, at=lambda b, h, m, n: (b, h, m, n)),
    "[B, H, S, S], larger": table(*(size + 3 for size in SIZES), at=lambda b, h, m, n: (b, h, m, n)),
    "[H, S, B, S]": table(HEADS, KV_LEN, BATCH, Q_LEN, at=lambda b, h, m, n: (h, n, b, m)),
    "[1, H, S, S]": table(1, HEADS, Q_LEN, KV_LEN, at=lambda b, h, m, n: (0, h, m, n)),
    "the second of [3, H, S, S]": table(3, HEADS, Q_LEN, KV_LEN, at=lambda b, h, m, n: (1, h, m, n)),
    "[H, S, S]": table(HEADS, Q_LEN, KV_LEN, at=lambda b, h, m, n: (h, m, n)),
    "[S, S]": table(Q_LEN, KV_LEN, at=lambda b, h, m, n: (m, n)),
    "token [B, S]": table(BATCH, KV_LEN, at=lambda b, h, m, n: (b, n)),
    "query [B, S]": table(BATCH, Q_LEN, at=lambda b, h, m, n: (b, m)),
    "T5 [buckets, H]": table(8, HEADS, at=lambda b, h, m, n: ((n - m).clamp(-4, 3) + 4, h)),
    "T5 [buckets, H], captured buckets": table(8, HEADS, at=lambda b, h, m, n: (BUCKETS[m, n], h)),
    "relative [H, S + S]": table(HEADS, FAR, at=lambda b, h, m, n: (h, n - m + Q_LEN)),
    "kv head [H_kv, S, S]": table(KV_HEADS, Q_LEN, KV_LEN, at=lambda b, h, m, n: (h // 2, m, n)),
    "kinds [H, 3, 3]": table(HEADS, 3, 3, at=lambda b, h, m, n: (h, IDS[m], IDS[n])),
    "an axis twice [H, H, S]": table(HEADS, HEADS, KV_LEN, at=lambda b, h, m, n: (h, h, n)),
    "by all [B, H, 10]": table(BATCH, HEADS, 10, at=lambda b, h, m, n: (b, h, (m + n * b + h) % 10)),
    "slopes [H]": Tables(slopes, ((HEADS,),), 1e-5),
    "gain [H]": Tables(lambda gain: lambda score, b, h, m, n: score * gain[h], ((HEADS,),), 1e-5),
    "gain []": Tables(lambda gain: lambda score, b, h, m, n: score * gain, ((),), 1e-5),
    "sink [H]": Tables(lambda sink: lambda score, b, h, m, n: torch.where(n == 0, score + sink[h], score), ((HEADS,),)),
    "through a tanh [H]": Tables(lambda x: lambda score, b, h, m, n: 2 * torch.tanh((score + x[h]) / 2), ((HEADS,),)),
    "twice [S]": Tables(lambda bias: lambda score, b, h, m, n: score + bias[n] + bias[m], ((KV_LEN,),)),
    "everything": EVERYTHING,
}


def function_of(tables: Tables, attention: Attention = PLAIN) -> Callable[..., Tensor]:
    """FlexAttention of query, key, value and what the score_mod captures."""
    block_mask = attention.block_mask()

    def attend(query: Tensor, key: Tensor, value: Tensor, *learnt: Tensor) -> Any:
        gqa = query.shape[1] != key.shape[1]
        return flex_attention(query, key, value, score_mod=tables.mod(*learnt), block_mask=block_mask, enable_gqa=gqa)

    return attend


def reference(tables: Tables, attention: Attention, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """In float64, of query, key, value, what is captured, and the gradient of the output."""
    query, key, value, *learnt, grad_out = (x.detach().double() for x in tensors)
    leaves = [x.requires_grad_() for x in (query, key, value, *learnt)]
    scores, values = wide_scores(*leaves[:3], attention.mask, tables.mod(*leaves[3:]))
    out = scores.softmax(-1).where(scores > HIDDEN, 0.0) @ values
    return torch.autograd.grad(out, leaves, grad_out, materialize_grads=True)


def run(tables: Tables, attention: Attention = PLAIN, **settings: Any) -> tuple[Callable[..., tuple[Tensor, ...]], list[Tensor]]:
    """The compiled backward, rewritten; and query, key, value, what is captured, and the gradient of the output."""
    *inputs, grad_out = attention.tensors()
    inputs += tables.tensors(attention.dtype)
    with enabled(**settings):
        backward = backward_of(function_of(tables, attention), [*inputs, grad_out])
    assert rewritten() == 1 and decisions()[-1].reason is None
    return backward, [*inputs, grad_out]


def assert_right(actual: Sequence[Tensor], tables: Tables, attention: Attention, tensors: Sequence[Tensor]) -> None:
    allowed = {FP32: tables.error, BF16: 2**-5, FP16: 2**-8}[attention.dtype]
    errors = [error(a, e) for a, e in zip(actual, reference(tables, attention, tensors), strict=True)]
    assert all(each < allowed for each in errors), errors  # NaN is not; the largest of several may hide one
    assert [x.dtype for x in actual] == [attention.dtype] * len(actual)


UNREAD: dict[str, tuple[Tables, dict[str, Any]]] = {
    "a bias alone": (Tables(lambda x: lambda score, b, h, m, n: x[h, n], ((HEADS, KV_LEN),)), {}),
    "one number": (Tables(lambda x: lambda score, b, h, m, n: x, ((),)), {}),
    "a constant": (Tables(lambda: lambda score, b, h, m, n: torch.zeros_like(score), ()), {}),
    "a position": (Tables(lambda: lambda score, b, h, m, n: n, ()), {}),
    "a detached score": (Tables(lambda x: lambda score, b, h, m, n: score.detach() + x[h, n], ((HEADS, KV_LEN),)), {}),
    "in one branch": (Tables(lambda x: lambda score, b, h, m, n: torch.where(m < n + 9, score, x[h, n]), ((HEADS, KV_LEN),)), {}),
    "of queries alone": (Tables(lambda x: lambda score, b, h, m, n: x[m], ((KV_LEN,),)), {"template": "two_pass"}),
}


@pytest.mark.parametrize(("name", "mask"), [(name, (causal, None)[at % 2]) for at, name in enumerate(UNREAD)])
def test_a_score_that_is_not_read(name, mask):
    """Query and key get zeros; value, and what is captured, their gradients."""
    tables, settings = UNREAD[name]
    attention = replace(PLAIN, q_len=KV_LEN, mask=mask, batch=1, block=(32, 64) if settings else 32)
    backward, tensors = run(tables, attention, **settings)
    actual, expected = backward(), reference(tables, attention, tensors)
    assert_right(actual, tables, attention, tensors)
    assert all(bool(a.any()) == bool(e.any()) for a, e in zip(actual[:2], expected[:2], strict=True))


RARE = {"[B, H, S, S], larger", "the second of [3, H, S, S]", "[S, S]", "an axis twice [H, H, S]", "sink [H]", "query [B, S]"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in RARE)) for name in CASES])
def test_what_is_captured(name):
    backward, tensors = run(CASES[name])
    assert_right(backward(), CASES[name], PLAIN, tensors)


DOCUMENTS = documents(25, 18, 7)
MASKED = {
    "causal": replace(PLAIN, mask=causal, q_len=KV_LEN),
    "documents": replace(PLAIN, mask=DOCUMENTS, q_len=KV_LEN),
    "window": replace(PLAIN, mask=window, q_len=KV_LEN),
    "rows that see nothing": replace(PLAIN, mask=with_blind_rows, q_len=KV_LEN),
    "a mask of each head": replace(
        PLAIN, mask=lambda b, h, m, n: (m >= n) & (m - n < 8 + 24 * h), q_len=KV_LEN, mask_sizes=(None, HEADS)
    ),
}


def longer(tables: Tables) -> Tables:
    """Of as many queries as keys."""
    return replace(tables, shapes=tuple(tuple({Q_LEN: KV_LEN}.get(size, size) for size in shape) for shape in tables.shapes))


SQUARE = replace(longer(EVERYTHING), mod=of_everything(lambda m, n: (n - m).clamp(-4, 3) + 4))


WAYS: dict[str, dict[str, Any]] = {"one pass": {}, "two passes": {"template": "two_pass"}}
IN_CI = ("documents-two passes", "a mask of each head-one pass")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param(name, WAYS[way], id=f"{name}-{way}", marks=[pytest.mark.nightly] * (f"{name}-{way}" not in IN_CI))
        for name in MASKED
        for way in WAYS
    ],
)
def test_masks(name, settings):
    """Tiles that nobody visits add nothing, nor do hidden elements of the others."""
    attention = replace(MASKED[name], block=(32, 64) if settings else 32)
    backward, tensors = run(SQUARE, attention, **settings)
    first, *others = [backward(*interleaving) for interleaving in INTERLEAVINGS]
    assert_right(first, SQUARE, attention, tensors)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_causal_in_closed_form():
    attention = MASKED["causal"]

    def attend(query: Tensor, key: Tensor, value: Tensor, *learnt: Tensor) -> Any:
        mask = attention.block_mask()
        return flex_attention(query, key, value, score_mod=SQUARE.mod(*learnt), block_mask=mask, enable_gqa=True)

    *inputs, grad_out = attention.tensors()
    inputs += SQUARE.tensors()
    actual = backward_of(attend, [*inputs, grad_out])()
    assert rewritten() == 1 and decisions()[-1].mask == "causal"
    assert_right(actual, SQUARE, attention, [*inputs, grad_out])


@pytest.mark.parametrize(
    ("dtype", "warn_only"),
    [
        pytest.param(BF16, False, id="bf16-strict"),
        pytest.param(FP16, True, id="fp16-warn_only"),
        pytest.param(BF16, True, id="bf16-warn_only", marks=pytest.mark.nightly),
        pytest.param(FP16, False, id="fp16-strict", marks=pytest.mark.nightly),
    ],
)
def test_half_precision(dtype, warn_only):
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    attention = replace(MASKED["documents"], dtype=dtype)
    backward, tensors = run(SQUARE, attention)
    first, *others = [backward(*interleaving) for interleaving in INTERLEAVINGS]
    assert_right(first, SQUARE, attention, tensors)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_fp32_tables_of_bf16():
    """Slopes of fp32: their sum has fp32's errors, though what is summed is made of bf16."""
    attention = replace(PLAIN, dtype=BF16)
    tables = CASES["slopes [H]"]
    *inputs, grad_out = attention.tensors()
    inputs += tables.tensors()
    *_, actual = backward_of(function_of(tables), [*inputs, grad_out])()
    *_, expected = reference(tables, attention, [*inputs, grad_out])
    assert actual.dtype == FP32 and rewritten() == 1 and error(actual, expected) < 2**-6


@pytest.mark.parametrize("guarantee", ["device", "batch"])
def test_levels(guarantee):
    backward, tensors = run(SQUARE, MASKED["documents"], guarantee=guarantee)
    assert_right(backward(), SQUARE, MASKED["documents"], tensors)


def test_an_index_out_of_range_where_a_key_is_hidden():
    """A captured index as long as the blocks that are visible: of others nobody reads it in the forward, nor in the backward."""
    halves = torch.arange(63) // 2
    attention = replace(PLAIN, mask=lambda b, h, m, n: m // 32 == n // 32, q_len=64, kv_len=64)
    tables = table(HEADS, 32, at=lambda b, h, m, n: (h, halves[n - m + 31]))
    backward, tensors = run(tables, attention)
    inside = table(HEADS, 32, at=lambda b, h, m, n: (h, halves[(n - m + 31).clamp(0, 62)]))
    assert_right(backward(), inside, attention, tensors)


def test_hidden_elements_add_nothing():
    """Even where the derivative is NaN for them."""
    tables = Tables(lambda gain: lambda score, b, h, m, n: score + gain[h] * torch.sqrt(0.1 * (m - n)), ((HEADS,),), 1e-5)
    attention = MASKED["causal"]
    backward, tensors = run(tables, attention)
    *_, actual = backward()
    near = replace(tables, mod=lambda gain: lambda score, b, h, m, n: score + gain[h] * torch.sqrt(0.1 * (m - n).clamp(min=0)))
    *_, expected = reference(near, attention, tensors)
    assert error(actual, expected) < tables.error


def test_dynamic_lengths():
    """A slope, a table by distance, and a bias of each key, of which there are as many as the length.

    What a slope's gradient sums nearly cancels at one of the lengths: its error is a part of the sizes of what is summed.
    """

    def mod(of_heads: Tensor, by_distance: Tensor, of_keys: Tensor) -> Mod:
        return lambda score, b, h, m, n: score + of_heads[h] * (n - m) + by_distance[h, (n - m).clamp(-4, 3) + 4] + of_keys[b, n]

    def of_elements(of_each: Tensor, by_distance: Tensor, of_keys: Tensor) -> Mod:
        return lambda score, b, h, m, n: (
            score + of_each[b, h, m, n] * (n - m) + by_distance[h, (n - m).clamp(-4, 3) + 4] + of_keys[b, n]
        )

    def attend(*inputs: Tensor) -> Any:
        return flex_attention(*inputs[:3], score_mod=mod(*inputs[3:]))

    function = None
    for length in (40, 33, 70):
        tables = Tables(mod, ((2,), (2, 8), (2, length)))
        attention = Attention(None, None, length, batch=2)
        *inputs, grad_out = attention.tensors()
        inputs += tables.tensors()
        leaves = [x.detach().requires_grad_() for x in inputs]
        with emulation.emulate():
            function = function or compiled(attend, dynamic=True)
            actual = torch.autograd.grad(function(*leaves), leaves, grad_out)
        of_each = inputs[3][:, None, None].expand(2, 2, length, length)
        terms = reference(replace(tables, mod=of_elements), attention, [*inputs[:3], of_each, *inputs[4:], grad_out])[3]
        right = reference(tables, attention, [*inputs, grad_out])
        off_slope = float((actual[3].double() - right[3]).abs().max() / terms.abs().sum((0, 2, 3)).max())
        assert off_slope < 1e-7  # rounding to fp32 is 6e-8 of each
        assert all(error(a, e) < tables.error for at, (a, e) in enumerate(zip(actual, right, strict=True)) if at != 3)
    assert (counters["stats"]["unique_graphs"], rewritten()) == (1, 1)


SUMS = {
    "[1, H, S, S]": Sum.of(1, HEADS, Q_LEN, KV_LEN, at=lambda b, h, m, n: (0 * b, h, m, n), kept=(1, 2, 3), mixed=(0,)),
    "[H, S, S]": Sum.of(HEADS, Q_LEN, KV_LEN, at=lambda b, h, m, n: (h, m, n), kept=(1, 2, 3)),
    "[S, S]": Sum.of(Q_LEN, KV_LEN, at=lambda b, h, m, n: (m, n), kept=(2, 3)),
    "token [B, S]": Sum.of(BATCH, KV_LEN, at=lambda b, h, m, n: (b, n), kept=(0, 3)),
    "query [B, S]": Sum.of(BATCH, Q_LEN, at=lambda b, h, m, n: (b, m), kept=(0, 2)),
    "slopes [H]": Sum.of(HEADS, at=lambda b, h, m, n: (h,), kept=(1,)),
    "T5 [buckets, H]": Sum.of(8, HEADS, at=lambda b, h, m, n: ((n - m).clamp(-4, 3) + 4, h), kept=(1,), mixed=(2, 3)),
    "relative [H, S + S]": Sum.of(HEADS, FAR, at=lambda b, h, m, n: (h, n - m + Q_LEN), kept=(1,), mixed=(2, 3)),
}
LARGE = large(SIZES)


def of_large_numbers(shape: Sum) -> Tables:
    """A tensor of every element, and the one at hand: each is multiplied by 1e8, 1 or -1e8, and is 0. The gradient of the first is
    what the second's is the sum of."""

    def mod(of_all: Tensor, bias: Tensor) -> Mod:
        def add(score: Tensor, b: Any, h: Any, m: Any, n: Any) -> Tensor:
            return score + of_all[b, h, m, n] * LARGE[b, h, m, n] + bias[shape.at(b, h, m, n)] * LARGE[b, h, m, n]

        return add

    return Tables(mod, (SIZES, shape.shape))


def sums_of_large_numbers(shape: Sum, interleavings: Sequence[tuple[int, int | None]]) -> list[tuple[Tensor, ...]]:
    """The two gradients, in each interleaving."""
    tables = of_large_numbers(shape)
    *inputs, grad_out = PLAIN.tensors()
    inputs += [torch.zeros(size) for size in tables.shapes]
    backward = backward_of(function_of(tables), [*inputs, grad_out])
    assert rewritten() == 1
    return [backward(*interleaving)[3:] for interleaving in interleavings]


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.nightly] * x.startswith("relative")) for x in SUMS])
def test_the_order_of_a_sum(name):
    """1e8, 1 and -1e8: another order is another sum, bit by bit."""
    (values, actual), *others = sums_of_large_numbers(SUMS[name], INTERLEAVINGS)
    assert all(torch.equal(actual, other) for _, other in others)
    assert SUMS[name].is_expected(values, actual)


STORE = "tl.store(sums, tl.sum(total, 1), mask=is_kept)"
BLOCKS = "range(split*of_split, tl.minimum((split + 1)*of_split, length), BLOCK_SUMMED)"
MUTANTS = {
    "two splits swapped": {"SUMS + (split*": "SUMS + (tl.where((split == 1) | (split == 2), 3 - split, split)*"},
    "a block left out": {BLOCKS: BLOCKS.replace("range(split*of_split", "range(split*of_split + BLOCK_SUMMED*(split == 1)")},
    "a place beside": {"total += x.to(tl.float32)": "total += tl.where(place[None, :] == 1, 0.0, x.to(tl.float32))"},
}


@pytest.mark.parametrize("name", MUTANTS)
def test_another_order_is_seen(name, monkeypatch):
    mutate(monkeypatch, "SHARES", name.replace(" ", "_"), MUTANTS[name])
    ((values, actual),) = sums_of_large_numbers(SUMS["token [B, S]"], INTERLEAVINGS[:1])
    assert not torch.equal(actual, torch.from_numpy(SUMS["token [B, S]"].expected(values.numpy())))


def test_atomics_are_seen(monkeypatch):
    """Their order is that in which programs run: it gives other bits in other interleavings."""
    add = "tl.atomic_add(SUMS + kept*ENTRIES + entry, tl.sum(total, 1), mask=is_kept)"
    mutate(monkeypatch, "SHARES", "atomics", {STORE: add})
    monkeypatch.setattr(sums, "empty", zeros)
    found = [each[1] for each in sums_of_large_numbers(SUMS["token [B, S]"], INTERLEAVINGS)]
    assert not all(torch.equal(found[0], other) for other in found)


def test_a_warm_cache():
    """The same code for the same functions, and not that of another index."""
    misses, found = [], []
    for name in ("token [B, S]", "query [B, S]", "token [B, S]"):
        counters.clear()
        with inductor_config.patch(fx_graph_cache=True), functorch_config.patch(enable_autograd_cache=True):
            backward, tensors = run(CASES[name])
        found.append(backward())
        assert_right(found[-1], CASES[name], PLAIN, tensors)
        misses.append(counters["inductor"]["fxgraph_cache_miss"])
    assert misses == [2, 2, 0]
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[2], strict=True))
