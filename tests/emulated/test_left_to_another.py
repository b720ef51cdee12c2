"""Attentions that are left to an implementation of flash attention in torch's registry: graphs see whether it is active."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention import compiled
from tensors import normal
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.codecache import PyCodeCache
from torch.nn.attention import _registry, activate_flash_attention_impl, restore_flash_attention_impl

from dash_inductor import clear_decisions, decisions, enabled
from dash_inductor.decision import LeftToStock
from dash_inductor.rewrite import resolved

REASON, REMEDY = "FA4 is active", "none needed"


@pytest.fixture(autouse=True)
def fa4(as_installed: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Is active, and computes what the CPU's does; the pass leaves everything to it."""

    def leave(*asked: Any) -> None:
        raise LeftToStock(REASON, REMEDY, implementation="FA4")

    monkeypatch.setattr(resolved, "resolve", leave)
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA4", lambda: SimpleNamespace(remove=lambda: None))
    activate_flash_attention_impl("FA4")
    with enabled(on_unsupported="fallback"):
        yield
    restore_flash_attention_impl(_raise_warn=False)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def step() -> tuple[Any, list[Tensor]]:
    """A compiled attention, in another process if caches are warm, and its inputs."""
    PyCodeCache.cache_clear()
    return compiled(attend), [normal(1, 1, 20, 16, seed=seed).requires_grad_() for seed in range(3)]


def train(function: Any, inputs: list[Tensor]) -> None:
    torch.autograd.grad(function(*inputs).sum(), inputs)


def test_a_graph_sees_that_it_is_gone():
    """Cold and warm, in the backward too."""
    for warm in (False, True):
        counters.clear()
        clear_decisions()
        function, inputs = step()
        train(function, inputs)
        assert bool(counters["aot_autograd"]["autograd_cache_hit"]) == warm
        (decision,) = decisions()
        assert (decision.reason, decision.remedy, decision.left_to, decision.stock_differs) == (REASON, REMEDY, "FA4", False)
        out = function(*inputs)
        restore_flash_attention_impl()
        with pytest.raises(RuntimeError, match=r"to FA4, which was active .* Call torch._dynamo.reset\(\)"):
            torch.autograd.grad(out.sum(), inputs, retain_graph=True)
        activate_flash_attention_impl("FA4")
        torch.autograd.grad(out.sum(), inputs)
        train(function, inputs)


def test_nobody_is_told():
    """Nothing falls back: it has the same bits in every run."""
    with enabled(on_unsupported="error"):
        train(*step())
    assert decisions()[-1].left_to == "FA4"


def test_without_deterministic_mode_a_graph_asks_nothing():
    function, inputs = step()
    out = function(*inputs)
    restore_flash_attention_impl()
    torch.use_deterministic_algorithms(False)
    torch.autograd.grad(out.sum(), inputs)
