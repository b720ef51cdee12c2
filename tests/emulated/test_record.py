"""Every graph that is compiled, or comes out of a cache, has entries of its own in decisions(), and they say whose they are."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest
import torch
import torch.nn.functional as F
from tensors import normal
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.codecache import PyCodeCache

import dash_inductor
from dash_inductor import Decision, decisions
from dash_inductor.decision import Graph


class First(nn.Module):
    """One attention is rewritten, one declined, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.zeros(40, 40).double())

    def forward(self, x: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        return F.scaled_dot_product_attention(*(y.double() for y in (out, x, x)), attn_mask=self.bias).to(x.dtype)


class Second(First):
    """The same graph."""


def attend(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


@pytest.fixture(autouse=True)
def on(as_installed: None) -> Iterator[None]:
    dash_inductor.enable()
    yield
    dash_inductor.disable()


def train(function: object) -> list[Decision]:
    """What a first step adds to the record."""
    before = len(decisions())
    torch.compile(function)(normal(1, 1, 40, 16).requires_grad_()).sum().backward()
    return decisions()[before:]


def of_graph(entries: list[Decision]) -> tuple[Graph, list[Decision]]:
    """The one graph of the entries, and what they say beside it."""
    (graph,) = {entry.graph for entry in entries}
    assert graph is not None
    return graph, [replace(entry, graph=None) for entry in entries]


@pytest.mark.parametrize("caches", [pytest.param("none", marks=pytest.mark.nightly), "graphs", "graphs and autograd"])
def test_two_models_with_one_graph(caches):
    """In a process that compiles them, in the same after torch forgot them, and as in another one, which has loaded no code yet."""
    with (
        inductor_config.patch(fx_graph_cache=caches != "none"),
        functorch_config.patch(enable_autograd_cache=caches == "graphs and autograd"),
    ):
        numbers = set()
        for run in ("cold", "warm", "another process"):
            counters.clear()
            torch._dynamo.reset()
            dash_inductor.clear_decisions()
            if run == "another process":
                PyCodeCache.cache_clear()
            first, second = of_graph(train(First())), of_graph(train(Second()))
            hits = (counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"])
            models = 1 if run == "cold" else 2  # that find their graphs in a cache
            assert hits == (0 if caches == "none" else 2 * models, models if caches == "graphs and autograd" else 0)

            assert first[1] == second[1] and sorted(entry.rewritten for entry in first[1]) == [False, True]
            for (graph, _), name, compile_id in ((first, "First", "0/0"), (second, "Second", "0/1")):
                assert (graph.compiled, graph.compile_id, graph.is_backward) == (name, compile_id, True)
                numbers.add(graph.number)
        assert len(numbers) == 6


def test_a_model_that_torch_compiled_before():
    """Dynamo takes the same compiled graph for two models of one class, and for each further step: there is nothing new."""
    compiled, x = torch.compile(First()), normal(1, 1, 40, 16).requires_grad_()
    for function in (compiled, compiled, torch.compile(First())):
        function(x).sum().backward()
    assert len(decisions()) == 2


@pytest.mark.parametrize("early", [True, False])
def test_a_function_whose_backward_is_compiled(early):
    """With its forward, or when it runs, in the context of the forward's compilation."""
    with functorch_config.patch(force_non_lazy_backward_lowering=early):
        out = torch.compile(attend)(normal(1, 1, 40, 16).requires_grad_())
        assert len(decisions()) == int(early)
        out.sum().backward()
    graph, _ = of_graph(decisions())
    assert str(graph) == "graph 0/0 of attend (backward)"


def test_for_each_length_that_is_compiled():
    """The second one is compiled for all others."""
    for length in (40, 50, 60):
        torch.compile(attend)(normal(1, 1, length, 16).requires_grad_()).sum().backward()
    first, second = decisions()
    assert (str(first.graph), first.q_len) == ("graph 0/0 of attend (backward)", 40)
    assert (str(second.graph), type(second.q_len)) == ("graph 0/1 of attend (backward)", str)


def test_while_the_package_is_off():
    """Nothing is recorded, also of a backward whose attention was declined before; what was recorded stays."""
    train(attend)
    (entry,) = decisions()
    out = torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x))(normal(1, 1, 40, 264).requires_grad_())
    dash_inductor.disable()
    out.sum().backward()
    assert counters["inductor"]["dash_declined"] == 1
    train(attend)
    assert decisions() == [entry]


def test_threads_that_compile_at_once():
    """Each graph has the name of what its thread compiles."""
    torch._dynamo.lookup_backend("dash")  # torch registers an entry point at its first use, of two threads twice
    barrier = Barrier(2)

    def compile_and_wait(module: nn.Module) -> None:
        barrier.wait(60)
        torch.use_deterministic_algorithms(True)
        torch.compile(module, backend="dash")(normal(1, 1, 40, 16).requires_grad_())

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_and_wait, (First(), Second())))
    names = [entry.graph.compiled for entry in decisions() if entry.graph]
    assert names in (["First"] * 2 + ["Second"] * 2, ["Second"] * 2 + ["First"] * 2)
