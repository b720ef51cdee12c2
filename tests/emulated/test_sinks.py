"""Attention sinks, and outputs that are merged by their logsumexps as rings do: gradients through the logsumexp, by name."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from attention import error, gradients, in_interleavings, rewritten
from flex import INTERLEAVINGS, Attention, wide_scores
from flex import causal as causal_mod
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensors import BF16, FP32, normal
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest

from dash_inductor.rewrite import columns, sdpa

pytestmark = pytest.mark.usefixtures("rewriting")

NAMES = ["query", "key", "value", "sink"]
ERRORS = {FP32: 2**-17, BF16: 2e-2}
Function = Callable[..., Tensor]


def inputs_of(heads: int = 2, kv_heads: int = 2, dtype: torch.dtype = FP32) -> tuple[dict[str, Tensor], Tensor]:
    """Each tensor by its name, and the gradient of the output."""
    shapes = [(2, heads, 40, 16), (2, kv_heads, 40, 16), (2, kv_heads, 40, 16), (heads,)]
    tensors = {name: normal(*shape, seed=seed).to(dtype) for seed, (name, shape) in enumerate(zip(NAMES, shapes, strict=True))}
    return tensors, normal(*shapes[0], seed=9).to(dtype)


def reference(query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None = None) -> Tensor:
    """Causal; the sink is one more score of each head, which has no value."""
    scores, values = wide_scores(query, key, value, causal_mod, None)
    beside = [] if sink is None else [sink[:, None, None].expand(*scores.shape[:3], 1)]
    return torch.cat([scores, *beside], -1).softmax(-1)[..., : key.shape[2]] @ values


def assert_right(
    function: Function,
    expected: Function,
    inputs: dict[str, Tensor],
    grad_out: Tensor,
    attentions: int = 1,
    *,
    dynamic: bool = False,
) -> None:
    """Each gradient, named where it is wrong, and the same bits in every interleaving."""
    found = in_interleavings(function, [*inputs.values()], grad_out, INTERLEAVINGS, dynamic=dynamic)
    right = gradients(expected, [x.double() for x in inputs.values()], grad_out.double())
    wrong = [name for name, a, e in zip(inputs, found, right, strict=True) if error(a, e) >= ERRORS[grad_out.dtype]]
    assert (rewritten(), wrong) == (attentions, [])


def by_mask(query: Tensor, key: Tensor, value: Tensor, sink: Tensor) -> Tensor:
    """SDPA with one more key and value, of zeros, and a learnt mask that adds the sink there."""
    length = key.shape[2]
    key, value = (F.pad(x, (0, 0, 0, 1)) for x in (key, value))
    hidden = torch.zeros(length, length).masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -math.inf)
    mask = torch.cat([hidden.expand(len(sink), -1, -1), sink[:, None, None].expand(-1, length, 1)], -1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask.to(query.dtype))


def with_batch(query: Tensor, key: Tensor, value: Tensor, sink: Tensor) -> Tensor:
    """The same with a mask for each batch element, keys beside zeros, and shared keys."""
    batch, heads, length = query.shape[:3]
    key, value = (torch.cat([x, torch.zeros_like(x[:, :, :1])], 2) for x in (key, value))
    hidden = torch.full((length, length), -math.inf, dtype=query.dtype).triu(1).expand(batch, heads, -1, -1)
    mask = torch.cat([hidden, sink.to(query.dtype).view(1, -1, 1, 1).expand(batch, -1, length, 1)], -1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


def in_front(query: Tensor, key: Tensor, value: Tensor, sink: Tensor) -> Tensor:
    """The sink is the first key, and half of what is learnt."""
    length = key.shape[2]
    key, value = (F.pad(x, (0, 0, 1, 0)) for x in (key, value))
    hidden = torch.zeros(length, length).masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -math.inf)
    mask = torch.cat([(2 * sink)[:, None, None].expand(-1, length, 1), hidden.expand(len(sink), -1, -1)], -1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask.to(query.dtype))


def with_values(query: Tensor, key: Tensor, value: Tensor, sink: Tensor) -> Tensor:
    """The last two keys are no zeros, and have a learnt bias each, the second in one row alone."""
    beside = torch.stack([sink, sink.flip(0)], -1)[:, None].expand(-1, key.shape[2], -1)
    mask = torch.cat([torch.zeros(len(sink), key.shape[2], key.shape[2] - 2), beside], -1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask.to(query.dtype))


def whole(query: Tensor, key: Tensor, value: Tensor, sink: Tensor) -> Tensor:
    """A sink beside a bias of all keys, which is learnt too."""
    distances = (torch.arange(key.shape[2])[:, None] - torch.arange(key.shape[2])).abs()
    mask = torch.cat([-sink[:, None, None] * distances / 40, sink[:, None, None].expand(-1, key.shape[2], 1)], -1)
    key, value = (F.pad(x, (0, 0, 0, 1)) for x in (key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask.to(query.dtype))


def beside_a_bias(query: Tensor, key: Tensor, value: Tensor, sink: Tensor) -> Tensor:
    """A column that trains, and a bias over it that does as well."""
    length = key.shape[2]
    mask = torch.cat([torch.zeros(len(sink), length, length - 1), sink[:, None, None].expand(-1, length, 1)], -1)
    distances = (torch.arange(length)[:, None] - torch.arange(length)).abs()
    mask = mask - sink[:, None, None] * distances / 40
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask.to(query.dtype))


WRITTEN = {
    "a row of zeros": by_mask,
    "of a batch": with_batch,
    "in front": in_front,
    "with values": with_values,
    "whole": whole,
    "beside a bias": beside_a_bias,
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("name", WRITTEN)
def test_a_sink_of_sdpa(name, dtype, dynamic, monkeypatch):
    """SDPA's logsumexp has no gradient in torch, so a sink is a learnt mask. No dS is stored but where all keys train."""
    function, found = WRITTEN[name], []
    stock = columns.ways_of
    monkeypatch.setattr(sdpa, "ways_of", lambda backward: found.append(stock(backward)) or found[-1])
    inputs, grad_out = inputs_of(heads=4 if function is with_batch and not dynamic else 2, dtype=dtype)

    def expected(query, key, value, sink):
        with sdpa_kernel(SDPBackend.MATH):
            return function(query, key, value, sink)

    assert_right(
        function,
        expected if function in (with_values, whole, beside_a_bias, in_front) else reference,
        inputs,
        grad_out,
        dynamic=dynamic,
    )
    assert [bool(ways) for ways in found] == [function not in (whole, beside_a_bias)] * len(found) and found


def test_every_sum_of_a_sink_is_in_one_order(monkeypatch):
    """Over the batch and over the rows: torch's sums of both are gone."""
    stock, gone = columns.put_in_order, []
    monkeypatch.setattr(columns, "put_in_order", lambda *args, **options: gone.extend(stock(*args, **options)) or gone)
    inputs, grad_out = inputs_of()
    assert_right(by_mask, reference, inputs, grad_out)
    assert [node.args[1] for node in gone] == [[0], [1]]


def in_second_half(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
    """Causal, of keys from the twentieth on. The first queries see none of them."""
    return m >= n + 20


def merging() -> Function:
    """Of two halves of the keys, each attended to alone, as ranks of a ring do, merged by their logsumexps; perhaps with a sink."""
    halves = [Attention(mask, None, 40, 20, heads=4, kv_heads=2) for mask in (causal_mod, in_second_half)]
    first, second = (half.function(return_aux=AuxRequest(lse=True)) for half in halves)

    def merged(query: Tensor, key: Tensor, value: Tensor, *sink: Tensor) -> Tensor:
        parts = first(query, key[:, :, :20], value[:, :, :20]), second(query, key[:, :, 20:], value[:, :, 20:])
        beside = [x[:, None].expand_as(parts[0][1].lse) for x in sink]
        total = torch.stack([*(aux.lse for _, aux in parts), *beside]).logsumexp(0)
        return sum(out * (aux.lse - total).exp()[..., None] for out, aux in parts)

    return merged


@pytest.mark.parametrize("names", [NAMES[:3], NAMES], ids=["without a sink", "with a sink"])
def test_parts_that_are_merged(names):
    inputs, grad_out = inputs_of(heads=4)
    assert_right(merging(), reference, {name: inputs[name] for name in names}, grad_out, attentions=2)


@st.composite
def masks(draw: st.DrawFn) -> tuple[int, int, int, int, torch.dtype, bool]:
    """Queries, keys, columns that train, where they begin, dtype, and whether each batch element has a mask of its own."""
    q_len, kv_len = draw(st.integers(1, 70)), draw(st.integers(9, 90))
    columns = draw(st.integers(1, 8))
    return q_len, kv_len, columns, draw(st.integers(0, kv_len - columns)), draw(st.sampled_from([FP32, BF16])), draw(st.booleans())


@pytest.mark.nightly
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(masks())
def test_random_columns(drawn) -> None:
    """At any place of a mask that hides a third of the rest, of keys that are no zeros."""
    q_len, kv_len, width, start, dtype, by_batch = drawn
    shapes = {"query": (2, 2, q_len, 16), "key": (2, 2, kv_len, 16), "value": (2, 2, kv_len, 16), "sink": (2, width)}
    inputs = {name: normal(*shape, seed=seed).to(dtype) for seed, (name, shape) in enumerate(shapes.items())}
    hidden = normal(q_len, kv_len, seed=7) < -0.4

    def attend(query: Tensor, key: Tensor, value: Tensor, sink: Tensor) -> Tensor:
        batch = 2 if by_batch else 1
        rest = torch.zeros(q_len, kv_len, dtype=query.dtype).masked_fill(hidden, -math.inf).expand(batch, 2, -1, -1)
        beside = sink[None, :, None].expand(batch, -1, q_len, -1)
        mask = torch.cat([rest[..., :start], beside, rest[..., start + width :]], -1)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    def expected(*tensors: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return attend(*tensors)

    counters.clear()
    assert_right(attend, expected, inputs, normal(2, 2, q_len, 16, seed=9).to(dtype))
