"""A bug of ours, planted in each part of the pass: a visible internal error, a right gradient, and the graph that was found."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention import attention, gradients
from tensors import qkv
from test_faults import compiled
from test_varlen import Packed
from torch import Tensor, fx
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn.attention.flex_attention import flex_attention

import dash_inductor
from dash_inductor import UnsupportedAttentionError, decisions
from dash_inductor.rewrite import declined
from dash_inductor.rewrite import graph as rewriting

PLANTED = "zip() argument 2 is shorter than argument 1"  # a ValueError, as what was raised on purpose is
*INPUTS, GRAD_OUT = qkv(1, 4, 40, 40, 16)
GROUPED = [INPUTS[0], *(x[:, :2] for x in INPUTS[1:]), GRAD_OUT]
PACKED = Packed((20, 40, 9))
BIAS = torch.zeros(40, 40)


def window(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    m = torch.arange(40)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=(m <= m[:, None]) & (m > m[:, None] - 9))


def repeated(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    key, value = (x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(query.shape) for x in (key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def of_three_dimensions(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*(x.flatten(0, 1) for x in (query, key, value)), is_causal=True).view(query.shape)


CAUSAL = attention(causal=True), [*INPUTS, GRAD_OUT]
WINDOW = window, [*INPUTS, GRAD_OUT]
BIASED = (lambda *qkv: F.scaled_dot_product_attention(*qkv, attn_mask=BIAS)), [*INPUTS, GRAD_OUT]
WIDE = attention(causal=True), qkv(1, 4, 40, 40, 264)
FLEX = (lambda *qkv: flex_attention(*qkv, score_mod=lambda score, b, h, m, n: score + (n - m) * 0.1)), [*INPUTS, GRAD_OUT]
# Which function of ours raises: before the graph is changed, after it was changed in part, and when it is lowered.
PLACES = {
    "matching": (CAUSAL, "rewrite.sdpa.sdpa_backward_of"),
    "reading the node": (CAUSAL, "rewrite.stock_ops.arguments"),
    "saying what is declined": (WIDE, "rewrite.declined.arguments"),
    "a bias that is added to scores": (BIASED, "rewrite.function_builder.adding"),
    "reading a mask": (WINDOW, "rewrite.sdpa.read"),
    "proving a mask": (FLEX, "rewrite.flex.mask_of"),
    "resolving": (CAUSAL, "rewrite.resolved.resolve"),
    "a mask's node": (WINDOW, "rewrite.flex_node.say_rewritten"),
    "repeated keys": ((repeated, GROUPED), "rewrite.sdpa.return_unrepeated"),
    "packed sequences": ((PACKED.function(), PACKED.tensors()), "rewrite.varlen.flex_backward"),
    "lowering": (CAUSAL, "lowering.lower.preprocessed"),
    "lowering FlexAttention": (FLEX, "lowering.flex.mods_of"),
    "the math path": ((of_three_dimensions, [*INPUTS, GRAD_OUT]), "rewrite.math_path._softmaxes"),
}


@pytest.fixture(autouse=True)
def on(as_installed: None) -> Iterator[None]:
    with dash_inductor.enabled(guarantee="device"):
        yield


@pytest.fixture
def graphs_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph is, after an internal error in the pass, what it was before, node by node."""
    stock = rewriting._rewrite

    def compared(node: fx.Node, *others: Any) -> Any:
        module: Any = node.graph.owning_module
        before = [(x, x.args, x.kwargs, {**x.meta}) for x in node.graph.nodes], dict(module.named_children())
        found = stock(node, *others)
        if isinstance(found, declined.InternalError):
            after = [(x, x.args, x.kwargs, {**x.meta}) for x in node.graph.nodes], dict(module.named_children())
            assert after == before
        return found

    monkeypatch.setattr(rewriting, "_rewrite", compared)


def plant(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    def planted(*args: Any, **kwargs: Any) -> Any:
        raise ValueError(PLANTED)

    monkeypatch.setattr(f"dash_inductor.{place}", planted)


@pytest.mark.parametrize(("case", "place"), PLACES.values(), ids=PLACES)
def test_a_bug_is_told(case, place, graphs_found, monkeypatch, caplog):
    """One warning, the traceback in the log, a decision that says so; the attention keeps its stock kernel and is right."""
    function, (*inputs, grad_out) = case
    expected = gradients(function, inputs, grad_out)
    plant(monkeypatch, place)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        actual = gradients(compiled(function), inputs, grad_out)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    (warning,) = [x for x in caught if "dash_inductor" in str(x.message)]
    assert warning.category is declined.InternalErrorWarning
    assert "internal error, please report: " in str(warning.message) and f"ValueError: {PLANTED}" in str(warning.message)
    (logged,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert logged.exc_info and PLANTED in str(logged.exc_info[1]) and logged.exc_info[2]
    told = [(decision.rewritten, decision.reason.startswith("internal error"), decision.remedy) for decision in decisions()]
    assert told == ([(False, True, declined.REPORT)] if place != "rewrite.math_path._softmaxes" else [])


@pytest.mark.parametrize("name", ["matching", "a mask's node", "lowering"])
def test_a_bug_is_an_error(name, monkeypatch):
    """Under on_unsupported="error", and in the tests of this project, which make errors of such warnings."""
    (function, (*inputs, grad_out)), place = PLACES[name]
    plant(monkeypatch, place)
    for action, error in (("fallback", declined.InternalErrorWarning), ("error", UnsupportedAttentionError)):
        with dash_inductor.enabled(on_unsupported=action), pytest.raises(BackendCompilerFailed, match="zip") as caught:
            gradients(compiled(function), inputs, grad_out)
        compiler = name == "lowering" and action == "error"  # whose own error stays
        assert isinstance(caught.value.inner_exception, error) != compiler
