"""Each way in rewrites each attention exactly once; deterministic mode and settings decide what is compiled; caches follow."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention import assert_as_good_as_stock, gradients, normal, qkv
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.codecache import PyCodeCache
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.utils.checkpoint import checkpoint

import dash_inductor
from dash_inductor import Decision, config, decision, decisions, emulation
from dash_inductor.emulation import emulate
from dash_inductor.rewrite import install


@pytest.fixture(autouse=True)
def off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Deterministic mode is on and the package off; caches are empty, settings the defaults, nothing is recorded."""
    was_enabled = install.is_enabled()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(config, "_current", config.Config())
    monkeypatch.setattr(decision, "_loaded", {})
    caplog.set_level(logging.INFO, "dash_inductor")
    dash_inductor.disable()
    torch._dynamo.reset()
    counters.clear()
    emulation.clear_launches()
    torch.use_deterministic_algorithms(True)
    with emulate():
        yield
    torch.use_deterministic_algorithms(False)
    dash_inductor.disable()
    if was_enabled:
        install.want()


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


INPUTS = qkv(1, 1, 64, 64, 16)[:3]


def train(function: Callable[..., Tensor] = attend, inputs: list[Tensor] = INPUTS, **options: Any) -> tuple[Tensor, ...]:
    """Gradients of the compiled function."""
    return gradients(torch.compile(function, **options), inputs)


def rewritten() -> int:
    return counters["inductor"]["dash_rewritten"]


def launched() -> int:
    """How many launches of our kernel there were since the last call: no other kernel here has atomics."""
    count = len(emulation.launches())
    emulation.clear_launches()
    return count


def test_the_backend_and_plain_compile_do_not_mix():
    """Neither while they compile, nor through the caches, which are warm from the other one; whichever came first."""
    expected = [(0, 0), (1, 1), (1, 0), (2, 1)]
    actual = []
    for backend in ("inductor", "dash", "inductor", "dash"):
        torch._dynamo.reset()
        train(backend=backend)
        actual.append((rewritten(), launched()))
    assert actual == expected
    assert len(decisions()) == 1


def test_enable_disable_enabled():
    dash_inductor.enable()
    train()
    train()
    assert (rewritten(), launched()) == (1, 2)
    dash_inductor.disable()
    train()
    assert (rewritten(), launched()) == (1, 0)
    with dash_inductor.enabled():
        train()
    assert (rewritten(), launched()) == (2, 1)
    train()
    assert (rewritten(), launched()) == (2, 0)


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


def grouped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)


def checkpointed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return checkpoint(lambda *qkv: attend(*(x.sin() for x in qkv)).sin(), query, key, value, use_reentrant=False)


@pytest.mark.parametrize(
    ("function", "inputs", "expected"),
    [
        (packed_model(), [normal(1, 70, 32)], [("causal", 2, 2, 70)] * 2),
        (hand_written, qkv(2, 2, 64, 64, 16)[:3], [("full", 2, 2, 64)]),
        (checkpointed, qkv(1, 2, 40, 40, 16)[:3], [("causal", 2, 2, 40)]),
        # The CPU's op takes fewer kv heads as they are; so does dash::sdpa_backward.
        (grouped, qkv(1, 4, 40, 70, 16, kv_heads=2)[:3], [("full", 4, 2, 40)]),
    ],
    ids=["two packed layers", "hand-written", "activation checkpointing", "grouped query heads"],
)
def test_once_per_attention(function, inputs, expected):
    with dash_inductor.enabled():
        actual = train(function, inputs)
    assert (rewritten(), launched()) == (len(expected), len(expected))
    assert [(d.mask, d.heads, d.kv_heads, d.q_len) for d in decisions()] == expected
    stock = gradients(function, inputs)
    wide = function.double() if isinstance(function, torch.nn.Module) else function
    assert_as_good_as_stock(actual, stock, gradients(wide, [x.double() for x in inputs]))


def branching(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    inputs = (query, key, value)
    return torch.cond(query.sum() > 1e6, lambda *qkv: attend(*qkv).sin(), lambda *qkv: attend(*qkv).cos(), inputs)


region = torch.compiler.nested_compile_region(lambda *qkv: attend(*qkv))


def repeated(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return region(region(query, key, value), key, value)


@pytest.mark.parametrize(
    ("function", "eager", "launches"),
    [
        (branching, lambda q, k, v: attend(q, k, v).cos(), 1),
        (repeated, lambda q, k, v: attend(attend(q, k, v), k, v), 2),
    ],
)
def test_inside_a_subgraph(function, eager, launches):
    """Of a cond both branches are compiled, and one runs."""
    with dash_inductor.enabled():
        actual = train(function, fullgraph=True)
    assert (rewritten(), len(decisions()), launched()) == (2, 2, launches)
    assert_as_good_as_stock(actual, gradients(eager, INPUTS), gradients(eager, [x.double() for x in INPUTS]))


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
    assert (rewritten(), launched()) == (1, 1)


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


def test_deterministic_mode_off():
    torch.use_deterministic_algorithms(False)
    with dash_inductor.enabled():
        train()
    torch._dynamo.reset()
    train(backend="dash")
    assert not [name for name in counters["inductor"] if "dash" in name]
    assert launched() == 0
    assert decisions() == []


def test_deterministic_mode_toggled():
    """The right graph each time: compiled once for each of off, strict and warn_only, then used again."""
    dash_inductor.enable()
    compiled = torch.compile(attend)
    modes = [(False, False), (True, False), (False, False), (True, True), (True, False), (True, True), (False, False)]
    actual = []
    for on, warn_only in modes:
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
    leaves = [x.clone().requires_grad_() for x in INPUTS]
    with dash_inductor.enabled(schedule="ascending"):
        out = torch.compile(attend)(*leaves)
    out.sum().backward()
    assert decided(family="ascending")
    assert (rewritten(), launched()) == (1, 1)
    with dash_inductor.enabled(schedule="descending"):
        train()
    assert decided(family="descending")
    with dash_inductor.enabled(schedule="ascending"):
        train()
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1


@pytest.mark.parametrize("backend", ["dash", "inductor"])
def test_the_graph_can_be_retained(backend):
    """Under `backend="dash"` and inside `enabled()`: two backwards of one forward, the second as the first."""
    leaves = [x.clone().requires_grad_() for x in INPUTS]
    with dash_inductor.enabled() if backend == "inductor" else contextlib.nullcontext():
        loss = torch.compile(attend, backend=backend)(*(x.sin() for x in leaves)).square().sum().sin()
        first = torch.autograd.grad(loss, leaves, retain_graph=True)
        second = torch.autograd.grad(loss, leaves)
    assert (rewritten(), launched()) == (1, 2)
    assert all(map(torch.equal, first, second))
    wide = [x.double().requires_grad_() for x in INPUTS]
    expected = torch.autograd.grad(attend(*(x.sin() for x in wide)).square().sum().sin(), wide)
    for actual, exact in zip(first, expected, strict=True):
        torch.testing.assert_close(actual.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        dash_inductor.disable,
        lambda: dash_inductor.configure(schedule="ascending"),
        lambda: torch._C._set_sm_carveout_experimental(1),
    ],
    ids=["disable", "configure", "carve-out"],
)
def test_backward_under_other_settings_is_refused(change, request):
    """Where the backward is compiled late: the caches would take its code for that of the settings before."""
    leaves = [x.clone().requires_grad_() for x in INPUTS]
    dash_inductor.enable()
    out = torch.compile(attend)(*leaves).sum()
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
    assert caplog.messages == [str(entry)]

    for hits in (1, 2):
        torch._dynamo.reset()
        if hits == 2:
            PyCodeCache.cache_clear()
            decision._loaded.clear()
            caplog.clear()
        warm = train()
        assert counters["inductor"]["fxgraph_cache_miss"] == 2
        assert (counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"]) == (2 * hits, hits)
        assert rewritten() == 1 + hits
        assert decisions() == [entry]
        assert caplog.messages == [str(entry)]
        assert all(map(torch.equal, warm, cold))
    assert launched() == 3
