"""An attention that is not rewritten: on a CPU, without emulation, each one. What is recorded, with cold and warm caches."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.codecache import PyCodeCache

import dash_inductor
from dash_inductor import decision

REASON = "the stock op is already deterministic on the CPU (emulation is off)"
REMEDY = "none needed: on a GPU it is rewritten; DASH_INDUCTOR_EMULATE=1 tries that on the CPU"
OP = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"


@pytest.fixture(autouse=True)
def enabled(switched_off: None, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    dash_inductor.clear_decisions()
    caplog.set_level(logging.INFO, "dash_inductor")
    with caplog.filtering(logging.Filter("dash_inductor")), dash_inductor.enabled():
        yield


def inputs() -> list[torch.Tensor]:
    # One head: for more, the stock lowering copies logsumexp, by a C++ kernel that takes seconds to compile.
    return [torch.randn(1, 1, 6, 8, generator=torch.Generator().manual_seed(seed)).requires_grad_() for seed in range(3)]


def attend(query, key, value):
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


LINE = inspect.getsource(attend).splitlines()[1].strip()
SOURCE = f"{__file__}:{inspect.getsourcelines(attend)[1] + 1}"


def compiled_gradients() -> tuple[torch.Tensor, ...]:
    torch._dynamo.reset()
    counters.clear()
    leaves = inputs()
    return torch.autograd.grad(torch.compile(attend)(*leaves).sum(), leaves)


def test_gradients_are_the_stock_ops():
    leaves = inputs()
    expected = torch.autograd.grad(attend(*leaves).sum(), leaves)
    assert all(map(torch.equal, compiled_gradients(), expected))


def test_recorded_once_cold_and_warm(caplog):
    """Warm in one process, and as in one that starts: it has loaded no graph yet. The details are for those who ask for them."""
    expected = decision.Decision(OP, "cpu", "fp32", "causal", 1, 1, 1, 6, 6, 8, REASON, REMEDY, source=SOURCE)
    for run in ("cold", "warm", "another process"):
        dash_inductor.clear_decisions()
        caplog.clear()
        if run == "another process":
            PyCodeCache.cache_clear()
        compiled_gradients()
        assert (counters["inductor"]["dash_declined"], counters["inductor"]["dash_rewritten"]) == (1, 0)
        assert counters["aot_autograd"]["autograd_cache_hit"] == (run != "cold")
        assert (counters["inductor"]["fxgraph_cache_miss"] > 0) == (run == "cold")
        (entry,) = dash_inductor.decisions()
        assert replace(entry, graph=None, joint="") == expected and not entry.rewritten
        assert caplog.messages == ["graph 0/0 of attend (backward): 0 attentions rewritten, 1 declined"]
        assert (
            str(entry) == f"{OP} at {SOURCE} (B=1 H=1 S=6 D=8 fp32, mask causal) keeps the stock kernel: {REASON}. Remedy: {REMEDY}"
        )


def test_mask_of_the_users():
    mask = torch.zeros(6, 6)
    torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask))(*inputs()).sum().backward()
    (entry,) = dash_inductor.decisions()
    assert (entry.mask, entry.reason) == ("given", REASON)


def test_warn():
    """Also where a cache could answer."""
    dash_inductor.configure(on_unsupported="warn")
    for _ in range(2):
        with pytest.warns(UserWarning, match="dash_inductor leaves") as caught:
            compiled_gradients()
        assert [str(w.message) for w in caught if "dash" in str(w.message)] == [
            f"dash_inductor leaves {OP} to the stock kernel: {REASON} (at {SOURCE}). Remedy: {REMEDY}"
        ]
        assert counters["inductor"]["dash_declined"] == 1
        assert counters["aot_autograd"]["autograd_cache_hit"] == 0


def test_error():
    """Users catch BackendCompilerFailed, as for each error in a backend; what is inside says where the attention is."""
    expected = compiled_gradients()
    dash_inductor.configure(on_unsupported="error")
    for _ in range(2):
        with pytest.raises(BackendCompilerFailed) as caught:
            compiled_gradients()
        inner = caught.value.inner_exception
        assert isinstance(inner, dash_inductor.UnsupportedAttentionError)
        for message in (str(inner), str(caught.value)):
            assert f"leaves {OP} to the stock kernel: {REASON}" in message
            assert f'File "{__file__}"' in message
            assert LINE in message
    dash_inductor.configure(on_unsupported="fallback")
    assert all(map(torch.equal, compiled_gradients(), expected))


def test_silent_by_default():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled_gradients()


@pytest.mark.nightly  # C++ is compiled for half a minute
def test_inductors_wrapper_in_cpp():
    """It has the decisions too, and out of a cache."""
    for run in ("cold", "warm"):
        dash_inductor.clear_decisions()
        with inductor_config.patch(cpp_wrapper=True):
            compiled_gradients()
        assert (counters["inductor"]["fxgraph_cache_hit"] > 0) == (run == "warm")
        (entry,) = dash_inductor.decisions()
        assert entry.reason == "torch._inductor.config.cpp_wrapper is on"
