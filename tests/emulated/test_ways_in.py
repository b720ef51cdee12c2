"""Each way in rewrites each attention exactly once; deterministic mode and settings decide what is compiled; caches follow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention import assert_right, attention, gradients, rewritten
from tensors import normal, qkv
from test_varlen import Packed
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.codecache import PyCodeCache
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import dash_inductor
from dash_inductor import Decision, decisions, emulation
from dash_inductor.hooks import install


@pytest.fixture(autouse=True)
def off(as_installed: None) -> Iterator[None]:
    """The package is off."""
    was_enabled = install.is_enabled()
    dash_inductor.disable()
    yield
    dash_inductor.disable()
    if was_enabled:
        install.want()


attend = attention(causal=True)
INPUTS = qkv(1, 1, 64, 64, 16)[:3]


def train(function: Callable[..., Tensor] = attend, inputs: list[Tensor] = INPUTS, **options: Any) -> tuple[Tensor, ...]:
    """Gradients of the compiled function."""
    return gradients(torch.compile(function, **options), inputs)


def launched() -> int:
    """How many launches of our kernel there were since the last call: no other kernel here has atomics."""
    count = len(emulation.launches())
    emulation.clear_launches()
    return count


def counted() -> tuple[int, int]:
    """Attentions rewritten since the test began, and `launched()`."""
    return rewritten(), launched()


def leaves_of_inputs() -> list[Tensor]:
    return [x.clone().requires_grad_() for x in INPUTS]


def test_the_backend_and_plain_compile_do_not_mix():
    """Neither while they compile, nor through the caches, which are warm from the other one; whichever came first."""
    for backend, expected in (("inductor", (0, 0)), ("dash", (1, 1)), ("inductor", (1, 0)), ("dash", (2, 1))):
        torch._dynamo.reset()
        train(backend=backend)
        assert counted() == expected
    assert [entry.rewritten for entry in decisions()] == [True, True]


def packed_model(dim: int = 32, heads: int = 2) -> torch.nn.Module:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = torch.nn.Linear(dim, 3 * dim, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            query, key, value = self.qkv(x).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind()
            return x + attend(query, key, value).transpose(1, 2).flatten(2)

    torch.manual_seed(0)
    return torch.nn.Sequential(Block(), Block()).requires_grad_(False)


def hand_written(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.softmax(query @ key.transpose(-2, -1) * 0.25, -1) @ value


def checkpointed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return checkpoint(lambda *qkv: attend(*(x.sin() for x in qkv)).sin(), query, key, value, use_reentrant=False)


@pytest.mark.parametrize(
    ("function", "inputs", "expected"),
    [
        (packed_model(), [normal(1, 70, 32)], [("causal", 2, 2, 70)] * 2),
        (hand_written, qkv(2, 2, 64, 64, 16)[:3], [("full", 2, 2, 64)]),
        (checkpointed, qkv(1, 2, 40, 40, 16)[:3], [("causal", 2, 2, 40)]),
        # The CPU's op takes fewer kv heads as they are; so does dash::sdpa_backward.
        (attention(gqa=True), qkv(1, 4, 40, 70, 16, kv_heads=2)[:3], [("full", 4, 2, 40)]),
    ],
    ids=["two packed layers", "hand-written", "activation checkpointing", "grouped query heads"],
)
def test_once_per_attention(function, inputs, expected):
    with dash_inductor.enabled():
        actual = train(function, inputs)
    assert counted() == (len(expected), len(expected))
    assert [(d.mask, d.heads, d.kv_heads, d.q_len) for d in decisions()] == expected
    assert_right(actual, function, inputs)


def branching(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    inputs = (query, key, value)
    return torch.cond(query.sum() > 1e6, lambda *qkv: attend(*qkv).sin(), lambda *qkv: attend(*qkv).cos(), inputs)


region = torch.compiler.nested_compile_region(lambda *qkv: attend(*qkv))


def repeated(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return region(region(query, key, value), key, value)


@pytest.mark.parametrize(
    ("function", "eager", "launches"),
    [(branching, lambda q, k, v: attend(q, k, v).cos(), 1), (repeated, lambda q, k, v: attend(attend(q, k, v), k, v), 2)],
)
def test_inside_a_subgraph(function, eager, launches):
    """Of a cond both branches are compiled, and one runs."""
    with dash_inductor.enabled():
        actual = train(function, fullgraph=True)
    assert (rewritten(), len(decisions()), launched()) == (2, 2, launches)
    assert_right(actual, eager, INPUTS)


class Spy(CustomGraphPass):
    """A user's own pass: sees Inductor's settings and the ops of the graph."""

    def __init__(self, setting: str) -> None:
        self.setting, self.seen = setting, []

    def __call__(self, graph: torch.fx.Graph) -> None:
        ops = [str(node.target) for node in graph.nodes if "attention" in str(node.target) or "dash" in str(node.target)]
        self.seen.append((getattr(inductor_config, self.setting), ops))

    def uuid(self) -> str:
        return self.setting


FORWARD, OURS = "aten._scaled_dot_product_flash_attention_for_cpu.default", "dash.sdpa_backward.default"


@pytest.mark.parametrize("backend", ["dash", "inductor"])
def test_options_and_custom_passes(backend):
    """They arrive, and the user's passes run: on the joint graph after ours, on the forward and the backward graph."""
    joint, post = Spy("max_fusion_size"), Spy("max_fusion_size")
    options = {"max_fusion_size": 7, "joint_custom_post_pass": joint, "post_grad_custom_pre_pass": post}
    if backend == "inductor":
        dash_inductor.enable()
    train(backend=backend, options=options)
    assert joint.seen == [(7, [FORWARD, OURS])]
    assert post.seen == [(7, [FORWARD]), (7, [OURS])]
    assert counted() == (1, 1)


def test_mode():
    spy = Spy("max_autotune")
    with inductor_config.patch(joint_custom_post_pass=spy):
        train(backend="dash", mode="max-autotune-no-cudagraphs")
        train(backend="dash")
    assert spy.seen == [(True, [FORWARD, OURS]), (False, [FORWARD, OURS])]


def test_unknown_options_raise_what_torch_raises():
    """When the first graph is compiled: Dynamo hands a backend its options no earlier."""
    for options in ({"nonsense": 1}, {"max_fusion_size": "large"}):
        with pytest.raises(RuntimeError) as stock:
            train(backend="inductor", options=options)
        with pytest.raises(BackendCompilerFailed) as ours:
            train(backend="dash", options=options)
        assert str(ours.value.inner_exception) == str(stock.value)
    with pytest.raises(RuntimeError, match="Unrecognized mode=nonsense"):
        train(backend="dash", mode="nonsense")


def test_deterministic_mode_toggled():
    """The right graph each time: compiled once for each of off, strict and warn_only, then used again."""
    dash_inductor.enable()
    compiled = torch.compile(attend)
    off, strict, warn = (False, False), (True, False), (True, True)
    actual = []
    for on, warn_only in (off, strict, off, warn, strict, warn, off):
        torch.use_deterministic_algorithms(on, warn_only=warn_only)
        gradients(compiled, INPUTS)
        actual.append((launched(), counters["stats"]["unique_graphs"], rewritten()))
    assert actual == [(0, 1, 0), (1, 2, 1), (0, 2, 1), (1, 3, 2), (1, 3, 2), (1, 3, 2), (0, 3, 2)]


def decided(**values: Any) -> bool:
    """Whether the last decision has these values."""
    return all(getattr(decisions()[-1], name) == value for name, value in values.items())


def test_settings_take_effect():
    """Between two calls of one compiled function."""
    dash_inductor.enable()
    compiled = torch.compile(attend)
    for settings in ({"schedule": "ascending"}, {"guarantee": "batch"}, {"schedule": "auto"}, {"launch": "chained"}):
        dash_inductor.configure(**settings)
        gradients(compiled, INPUTS)
        shown = {"family" if name == "schedule" else name: value for name, value in settings.items() if value != "auto"}
        assert decided(**shown), (settings, decisions()[-1])
    assert rewritten() == 4
    dash_inductor.configure(schedule="ascending")
    gradients(compiled, INPUTS)
    assert decided(family="ascending", launch="chained")
    dash_inductor.configure(seed=1)
    gradients(compiled, INPUTS)
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1


def test_backward_after_the_block_is_of_the_block():
    """Settings, cache key and pass are gone when the backward runs, and it was compiled under them all the same."""
    leaves = leaves_of_inputs()
    with dash_inductor.enabled(schedule="ascending"):
        out = torch.compile(attend)(*leaves)
    out.sum().backward()
    assert decided(family="ascending")
    assert counted() == (1, 1)
    with dash_inductor.enabled(schedule="descending"):
        train()
    assert decided(family="descending")
    with dash_inductor.enabled(schedule="ascending"):
        train()
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1


@pytest.mark.parametrize("backend", ["dash", "inductor"])
def test_the_graph_can_be_retained(backend):
    """Under `backend="dash"` and inside `enabled()`: two backwards of one forward, the second as the first."""
    leaves = leaves_of_inputs()
    with dash_inductor.enabled() if backend == "inductor" else contextlib.nullcontext():
        loss = torch.compile(attend, backend=backend)(*(x.sin() for x in leaves)).square().sum().sin()
        first = torch.autograd.grad(loss, leaves, retain_graph=True)
        second = torch.autograd.grad(loss, leaves)
    assert counted() == (1, 2)
    assert all(map(torch.equal, first, second))
    wide = [x.double().requires_grad_() for x in INPUTS]
    expected = torch.autograd.grad(attend(*(x.sin() for x in wide)).square().sum().sin(), wide)
    torch.testing.assert_close([grad.double() for grad in first], list(expected), rtol=1e-4, atol=1e-4)


def window(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    m = torch.arange(64)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=(m <= m[:, None]) & (m > m[:, None] - 9))


PACKED = Packed((20, 40, 4))


@pytest.mark.parametrize(
    ("function", "inputs"),
    [(attend, INPUTS), (window, INPUTS), (flex_attention, INPUTS), (PACKED.function(), PACKED.tensors()[:3])],
    ids=["sdpa", "mask", "flex", "varlen"],
)
@pytest.mark.parametrize(
    "change",
    [
        dash_inductor.disable,
        lambda: dash_inductor.configure(schedule="ascending"),
        lambda: torch._C._set_sm_carveout_experimental(1),
    ],
    ids=["disable", "configure", "carve-out"],
)
def test_backward_under_other_settings_is_refused(change, function, inputs, request):
    """Where the backward is compiled late: the caches would take its code for that of the settings before."""
    dash_inductor.enable()
    out = torch.compile(function)(*(x.clone().requires_grad_() for x in inputs)).sum()
    request.addfinalizer(lambda: torch._C._set_sm_carveout_experimental(None))
    change()
    with pytest.raises(RuntimeError, match="dash_inductor was disabled, or its settings were changed, between the forward and"):
        out.backward()
    assert decisions() == []


def test_caches(caplog):
    """Cold, warm in the same process, and warm as in one that starts: counters, decisions and log say the same."""
    dash_inductor.enable()
    cold = train()
    assert (counters["inductor"]["fxgraph_cache_miss"], counters["aot_autograd"]["autograd_cache_miss"]) == (2, 1)
    (entry,) = decisions()
    assert isinstance(entry, Decision)
    assert entry.rewritten
    assert caplog.messages == ["graph 0/0 of attend (backward): 1 attention rewritten, 0 declined", str(entry)]

    for hits in (1, 2):
        torch._dynamo.reset()
        dash_inductor.clear_decisions()
        caplog.clear()
        if hits == 2:
            PyCodeCache.cache_clear()
        warm = train()
        assert counters["inductor"]["fxgraph_cache_miss"] == 2
        assert (counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"]) == (2 * hits, hits)
        assert rewritten() == 1 + hits
        (again,) = decisions()
        assert replace(again, graph=entry.graph) == entry != again
        assert caplog.messages == [f"{entry.graph}: 1 attention rewritten, 0 declined", str(entry)]
        assert all(map(torch.equal, warm, cold))
    assert launched() == 3
