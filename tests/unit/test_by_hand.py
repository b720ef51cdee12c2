"""Attention that is written by hand, which Inductor has not made SDPA of: told as an attention that keeps its stock kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters

import dash_inductor
from dash_inductor import decisions, explain
from dash_inductor.cli.main import main

pytestmark = pytest.mark.usefixtures("switched_off")
OP = "attention written by hand"
LENGTH, HEADS, WIDTH = 12, 2, 16


def masked_fill(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    hidden = torch.ones(LENGTH, LENGTH).tril() == 0
    scores = query @ key.mT / 4.0
    return F.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ value


def einsum(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) * 0.25
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), value)


def without_softmax(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return (weights / weights.sum(-1, keepdim=True)) @ value


def soft_capped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (20 * torch.tanh(query @ key.mT / 20)).softmax(-1) @ value


def dropped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.dropout((query @ key.mT + 1).softmax(-1), 0.1) @ value


def with_relative_positions(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Whose scores are a product of the query as well."""
    relative = torch.arange(8.0 * LENGTH).view(8, LENGTH).sin()
    return (query @ key.mT / 4 + query @ relative).softmax(-1) @ value


def with_a_bias_of_layers(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Which is what a layer makes of positions, as Swin v2 has it."""
    positions = torch.arange(LENGTH * LENGTH * 2.0).view(LENGTH, LENGTH, 2)
    bias = (positions @ torch.ones(2, HEADS)).permute(2, 0, 1)
    return (query @ key.mT / 4 + bias).softmax(-1) @ value


def with_a_sink(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A column of the softmax that has no value; beside it a bias that a product of the query makes."""
    sink = torch.ones(1, HEADS, 1, 1).expand(query.shape[0], -1, LENGTH, -1)
    return torch.cat([with_relative_positions_alone(query, key), sink], -1).softmax(-1)[..., :-1] @ value


def with_relative_positions_alone(query: Tensor, key: Tensor) -> Tensor:
    return query @ key.mT / 4 + query @ torch.arange(8.0 * LENGTH).view(8, LENGTH).sin()


def along_queries(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """As slots compete for what they attend to."""
    weights = torch.tanh(query @ key.mT / 4).softmax(-2)
    return (weights / weights.sum(-1, keepdim=True)) @ value


def heads_mixed_after(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    mixing = torch.arange(HEADS * HEADS * 1.0).view(HEADS, HEADS)
    return torch.einsum("bhqk,hg->bgqk", (query @ key.mT / 4).softmax(-1), mixing) @ value


def heads_mixed_before(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    mixing = torch.arange(HEADS * HEADS * 1.0).view(HEADS, HEADS)
    return F.linear((query @ key.mT / 4).permute(0, 2, 3, 1), mixing).permute(0, 3, 1, 2).softmax(-1) @ value


def heads_mixed_by_a_convolution(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    mixing = torch.arange(HEADS * HEADS * 1.0).view(HEADS, HEADS, 1, 1)
    return F.conv2d(query @ key.mT / 4, mixing).softmax(-1) @ value


# What it is, with what was seen and what to write.
BY_HAND: dict[Callable[..., Tensor], tuple[str, str]] = {
    masked_fill: ("bmm, div, masked_fill, softmax, bmm", "scaled_dot_product_attention"),
    einsum: ("bmm, mul, softmax, bmm", "scaled_dot_product_attention"),
    without_softmax: ("bmm, exp, sum, div, bmm", "scaled_dot_product_attention"),
    soft_capped: ("bmm, div, tanh, mul, softmax, bmm", "flex_attention"),
    with_relative_positions: ("bmm, div, add, softmax, bmm", "scaled_dot_product_attention"),
    with_a_bias_of_layers: ("bmm, add, softmax, bmm", "scaled_dot_product_attention"),
    with_a_sink: ("bmm, div, add, cat, softmax, bmm, with a column beside the keys", "torch.sigmoid(lse - sink)"),
    along_queries: ("bmm, div, tanh, softmax, sum, bmm, with a softmax along dim -2", "no call does that"),
    heads_mixed_after: ("bmm, div, mul, softmax, bmm, with heads that are mixed", "no call does that"),
    heads_mixed_before: ("bmm, div, softmax, bmm, with heads that are mixed", "no call does that"),
    heads_mixed_by_a_convolution: ("bmm, div, convolution, softmax, bmm, with heads that are mixed", "no call does that"),
    dropped: ("bmm, add, softmax, native_dropout, bmm", "train with an attention dropout of 0"),
}


def router(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The gate of a mixture of experts, whose matmuls are layers'."""
    tokens = query.flatten(0, 2)
    return F.softmax(tokens @ key[0, 0].mT, -1) @ value[0, 0] + tokens


def gated(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Linear attention: no softmax stands between its matmuls."""
    return torch.sigmoid(query @ key.mT) @ value


def pooled(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A softmax that no batched matmul feeds."""
    return query.softmax(-1) @ key.mT @ value


OTHERS = [router, gated, pooled]


class Model(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.layer = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(*(part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.layer(x).chunk(3, -1)))


def setup() -> tuple[Model, tuple[Tensor]]:
    return Model(masked_fill), (torch.randn(2, LENGTH, WIDTH),)


def setup_without() -> tuple[Model, tuple[Tensor]]:
    return Model(gated), (torch.randn(2, LENGTH, WIDTH),)


@pytest.mark.parametrize("function", BY_HAND, ids=lambda function: function.__name__)
def test_explain(function):
    seen, remedy = BY_HAND[function]
    (row,) = explain(Model(function), torch.randn(2, LENGTH, WIDTH))
    assert (row.op, row.rewritten, row.decision.shape) == (OP, False, f"B=2 H={HEADS} S={LENGTH} D={WIDTH // HEADS} fp32")
    in_order = row.reason.rpartition(": ")[2].split(", ")  # torch 2.11 traces one of them in another
    assert sorted(in_order) == sorted(seen.split(", ")) or (function is einsum and row.reason.endswith("softmax, bmm"))
    assert remedy in row.remedy
    if function is not with_a_bias_of_layers:  # a pattern of Inductor makes one op of product and bias, without their lines
        assert __file__ in (row.decision.source or "")


@pytest.mark.parametrize("function", OTHERS, ids=lambda function: function.__name__)
def test_what_is_no_attention(function):
    assert not [row for row in explain(Model(function), torch.randn(2, LENGTH, WIDTH)) if row.op == OP]


def test_the_status_of_the_command(capsys):
    assert main(["explain", "tests.unit.test_by_hand:setup"]) == 1
    text = capsys.readouterr().out
    assert text.startswith("0 of 1 attentions rewritten") and OP in text and "call torch.nn.functional.scaled_dot" in text
    assert main(["explain", "tests.unit.test_by_hand:setup_without"]) == 1  # there is none
    assert capsys.readouterr().out.startswith("0 of 0 attentions rewritten")


def train(function: Callable[..., Tensor] = masked_fill) -> list[Tensor]:
    torch._dynamo.reset()
    inputs = [torch.randn(1, HEADS, LENGTH, 8, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in range(3)]
    torch.compile(function)(*inputs).sum().backward()
    return [x.grad for x in inputs]


def test_it_is_told():
    counters.clear()
    dash_inductor.clear_decisions()
    with dash_inductor.enabled(on_unsupported="warn"), pytest.warns(UserWarning, match=f"leaves {OP} to the stock kernel"):
        with_it = train()
    assert [decision.op for decision in decisions()] == [OP] and counters["inductor"]["dash_declined"] == 1
    with dash_inductor.enabled(on_unsupported="error"), pytest.raises(BackendCompilerFailed, match="masked_fill, softmax"):
        train()
    with torch.compiler.set_stance("force_eager"):
        for compiled, eager in zip(with_it, train(), strict=True):
            torch.testing.assert_close(compiled, eager)


@pytest.mark.parametrize("dim", [-2, 1, -1])
def test_what_inductor_mistakes(dim):
    """Its patterns before torch 2.15 make SDPA of a softmax along any dimension: forward and gradients are of another attention."""
    dash_inductor.clear_decisions()
    with dash_inductor.enabled():
        compiled = train(attend := lambda query, key, value: (query @ key.mT * 0.3).softmax(dim) @ value)
    with torch.compiler.set_stance("force_eager"):
        eager = train(attend)
    is_right = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(compiled, eager, strict=True))
    (decision,) = decisions()
    other = dim % 4 - 4
    if is_right and dim != -1:
        assert decision.op == OP and f"softmax along dim {other}" in decision.reason
    elif dim != -1:
        assert decision.reason.startswith(f"Inductor has made it of a softmax along dim {other}, and computes one along the last")
    else:
        assert is_right and "softmax along dim" not in decision.reason


def test_what_trains_nothing_is_not_told():
    dash_inductor.clear_decisions()
    with dash_inductor.enabled(on_unsupported="error"):
        torch.compile(masked_fill)(*torch.randn(3, 1, HEADS, LENGTH, 8))
        train(lambda q, k, v: masked_fill(q, k, v).detach() + q + k + v)
    assert decisions() == []
