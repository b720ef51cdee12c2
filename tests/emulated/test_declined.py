"""Attentions that cannot be rewritten keep the stock op, with a reason."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention import normal
from torch import Tensor, fx
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensorMode

import dash_inductor
from dash_inductor import config, decision, decisions
from dash_inductor.emulation import emulate
from dash_inductor.rewrite import sdpa
from dash_inductor.rewrite.declined import DECLINED
from dash_inductor.rewrite.sdpa import why_declined
from dash_inductor.rewrite.stock_ops import FLASH, FLASH_CPU, UNSUPPORTED
from dash_inductor.schedule.packing import MAX_N_KV, MAX_N_Q
from dash_inductor.templates.tiles import tile

TILE = tile("emulated", "fp32", 16)


def declined(node: fx.Node) -> str | None:
    """The reason of the pass under the settings in force."""
    return why_declined(node, config.current())


def backward(op: Any = FLASH_CPU, like: dict[str, tuple[int, ...]] | None = None, dtypes: Any = None, **arguments: Any) -> fx.Node:
    """A node of a graph made by hand: `op` on fake CPU tensors, fp32 [1, 2, 40, 16] but for what `like` and `dtypes` name."""
    graph = fx.Graph()
    named: dict[str, Any] = {}
    with FakeTensorMode():
        for argument in op._schema.arguments:
            if "Tensor" in str(argument.type) and not argument.has_default_value():
                shape = (like or {}).get(argument.name, (1, 2, 40, 16))
                named[argument.name] = graph.placeholder(argument.name)
                named[argument.name].meta["val"] = torch.empty(shape, dtype=(dtypes or {}).get(argument.name, torch.float32))
            elif not argument.has_default_value():
                named[argument.name] = {"dropout_p": 0.0, "is_causal": False}.get(argument.name, 0)
    node = graph.call_function(op, (), named | arguments)
    graph.output(node)
    return node


def test_nothing_against_it():
    with emulate():
        assert declined(backward()) is None
        assert declined(backward(is_causal=True, scale=0.5)) is None
        assert declined(backward(like={"key": (1, 1, 9, 16), "value": (1, 1, 9, 16)})) is None


def shapes(*names: str, to: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return dict.fromkeys(names, to)


QKV = ("query", "key", "value")
TOO_MANY_Q, TOO_MANY_K = MAX_N_Q * TILE.block_m + 1, MAX_N_KV * TILE.block_n + 1
REASONS: list[tuple[dict[str, Any], str]] = [
    ({"dropout_p": 0.1}, "dropout_p=0.1"),
    ({"attn_mask": "a node"}, "an attention mask"),
    ({"scale": "a node"}, "a scale that is not a constant"),
    ({"dtypes": dict.fromkeys(QKV, torch.float64)}, "dtype torch.float64 is not one of bf16, fp16, fp32"),
    ({"dtypes": {"key": torch.float16}}, "dtypes differ: query torch.float32, key torch.float16, value torch.float32"),
    ({"like": shapes(*QKV, to=(1, 2, 40, 8))}, "head dim 8 is outside 16..256"),
    ({"like": shapes(*QKV, to=(1, 2, 40, 264))}, "head dim 264 is outside 16..256"),
    ({"like": shapes("value", to=(1, 2, 40, 32))}, "head dims differ: query 16, key 16, value 32"),
    ({"like": shapes("key", "value", to=(1, 3, 40, 16))}, "kv heads (3, 3) do not divide the query heads (2)"),
    ({"like": shapes("value", to=(1, 1, 40, 16))}, "kv heads (2, 1) do not divide the query heads (2)"),
    ({"like": shapes("query", to=(1, 2, 0, 16))}, "an empty tensor"),
    ({"like": shapes("key", "value", to=(1, 2, 0, 16))}, "an empty tensor"),
    ({"like": shapes(*QKV, to=(0, 2, 40, 16))}, "an empty tensor"),
    ({"like": shapes("query", to=(1, 2, 41, 16)), "is_causal": True}, "causal with S_q=41 and S_k=40"),
    ({"like": shapes("query", to=(1, 2, TOO_MANY_Q, 16))}, f"lengths S_q={TOO_MANY_Q}, S_k=40 have too many tiles"),
    ({"like": shapes("key", "value", to=(1, 2, TOO_MANY_K, 16))}, f"lengths S_q=40, S_k={TOO_MANY_K} have too many tiles"),
    ({"op": FLASH}, f"{FLASH} on device cpu"),
    *(({"op": op}, reason) for op, reason in UNSUPPORTED.items()),
]


@pytest.mark.parametrize(("changes", "reason"), REASONS)
def test_reasons(changes, reason):
    node = backward(**changes)
    with emulate():
        assert (declined(node) or "").startswith(reason)


def test_lengths_with_a_table_entry_for_each_tile():
    most = {"query": (1, 2, MAX_N_Q * TILE.block_m, 16), **shapes("key", "value", to=(1, 2, MAX_N_KV * TILE.block_n, 16))}
    with emulate():
        assert declined(backward(like=most)) is None


@pytest.mark.parametrize(
    ("settings", "is_causal", "reason"),
    [
        ({"schedule": "shift"}, True, "family 'shift' serves the full mask only, this one is causal:"),
        ({"schedule": "symmetric"}, False, "family 'symmetric' serves causal masks only"),
        (
            {"schedule": "symmetric", "guarantee": "device"},
            True,
            "family 'symmetric' adds in an order that depends on the SM count",
        ),
        ({"schedule": "searched", "guarantee": "device"}, True, "family 'searched' adds in an order that depends on the SM count"),
        ({"schedule": "searched", "guarantee": "batch"}, False, "family 'searched' adds in an order that depends on the SM count"),
        ({"schedule": "shift"}, False, None),
        ({"schedule": "symmetric"}, True, None),
        ({"schedule": "searched"}, False, None),
        ({"schedule": "searched"}, True, None),
    ],
)
def test_a_forced_family_that_cannot_serve(settings, is_causal, reason):
    node = backward(is_causal=is_causal)
    with emulate(), dash_inductor.enabled(**settings):
        found = declined(node)
    assert found is None if reason is None else (found or "").startswith(reason)


@pytest.mark.parametrize(
    "name", ["benchmark_fusion", "profile_bandwidth", "benchmark_kernel", "cpp_wrapper", "triton.autotune_at_compile_time"]
)
def test_settings_of_inductor(name):
    node = backward()
    with emulate(), inductor_config.patch({name: True}):
        assert declined(node) == f"torch._inductor.config.{name} is on"


def test_the_cpu_itself():
    assert declined(backward()) == "the stock op is already deterministic on the CPU (emulation is off)"


@pytest.mark.parametrize("node", [backward(dropout_p=0.1), backward(attn_mask="a node")])
def test_the_node_stays(node):
    torch.use_deterministic_algorithms(True)
    with emulate():
        sdpa.patterns.apply(fx.GraphModule({}, node.graph).graph)
    torch.use_deterministic_algorithms(False)
    (left,) = (n for n in node.graph.nodes if n.op == "call_function")
    assert left is node
    assert left.target is FLASH_CPU
    assert left.meta[DECLINED] == declined(node)


@pytest.fixture
def enabled(tmp_path, monkeypatch, caplog) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(config, "_current", config.Config())
    monkeypatch.setattr(decision, "_loaded", {})
    caplog.set_level(logging.INFO, "dash_inductor")
    counters.clear()
    torch.use_deterministic_algorithms(True)
    with dash_inductor.enabled(), emulate():
        yield
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()


class Case:
    """One call of SDPA: its inputs, its arguments and what is said of it."""

    def __init__(
        self, q_len: int, kv_len: int, head_dim: int, reason: str | None, dtype: Any = torch.float32, **arguments: Any
    ) -> None:
        self.inputs = [normal(1, 2, n, head_dim, seed=i).to(dtype) for i, n in enumerate((q_len, kv_len, kv_len))]
        self.arguments, self.reason = arguments, reason


CASES = [
    Case(20, 20, 16, None, is_causal=True),
    Case(20, 24, 16, "an attention mask", attn_mask=normal(20, 24)),
    Case(20, 20, 8, "head dim 8 is outside 16..256", is_causal=True),
    Case(20, 20, 264, "head dim 264 is outside 16..256"),
    Case(20, 20, 16, "dtype torch.float64 is not one of bf16, fp16, fp32", dtype=torch.float64),
    Case(20, 24, 16, "causal with S_q=20 and S_k=24", is_causal=True),
]


def attend_all(*inputs: Tensor) -> list[Tensor]:
    triples = zip(inputs[::3], inputs[1::3], inputs[2::3], strict=True)
    return [F.scaled_dot_product_attention(*qkv, **case.arguments) for qkv, case in zip(triples, CASES, strict=True)]


def gradients(function: Any) -> tuple[Tensor, ...]:
    leaves = [x.clone().requires_grad_() for case in CASES for x in case.inputs]
    outs = function(*leaves)
    return torch.autograd.grad(outs, leaves, [torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype) for out in outs])


@contextmanager
def joint_graph() -> Iterator[list[str]]:
    """The ops of the joint graph that is compiled inside, after all passes."""
    ops: list[str] = []
    with inductor_config.patch(joint_custom_post_pass=lambda graph: ops.extend(str(n.target) for n in graph.nodes)):
        yield ops


def test_one_graph(enabled, caplog):
    """One attention of six is rewritten; the gradients of the others are the stock op's to the bit."""
    with joint_graph() as ops:
        actual = gradients(torch.compile(attend_all, fullgraph=True))
    assert (ops.count(str(FLASH_CPU)), ops.count("dash.sdpa_backward.default")) == (5, 1)
    assert (counters["inductor"]["dash_declined"], counters["inductor"]["dash_rewritten"]) == (5, 1)
    assert sorted(str(d.reason) for d in decisions()) == sorted(str(case.reason) for case in CASES)
    for entry in decisions():
        assert caplog.messages.count(str(entry)) == 1
        assert entry.rewritten or f"keeps the stock kernel: {entry.reason}" in str(entry)
    assert len(caplog.messages) == len(decisions()) == len(CASES)
    stock = gradients(attend_all)
    torch.testing.assert_close(actual[:3], stock[:3], rtol=0, atol=1e-5)
    assert all(map(torch.equal, actual[3:], stock[3:]))


@pytest.mark.parametrize("name", ["benchmark_fusion", "triton.autotune_at_compile_time"])
def test_an_option_of_the_user(enabled, name):
    inputs = [x.requires_grad_() for x in Case(20, 20, 16, None).inputs]
    compiled = torch.compile(lambda *qkv: F.scaled_dot_product_attention(*qkv), options={name: True})
    compiled(*inputs).sum().backward()
    assert [d.reason for d in decisions()] == [f"torch._inductor.config.{name} is on"]
    assert (counters["inductor"]["dash_declined"], counters["inductor"]["dash_rewritten"]) == (1, 0)


@pytest.mark.parametrize("dims", [(0, 1, 2), (0,), (2,)])
def test_a_table_for_sizes_known_at_run_time(enabled, dims):
    """Whichever of them is not known: the attention keeps its stock op before anything is rewritten."""
    dash_inductor.configure(schedule="searched")
    inputs = [torch.randn(2, 3, 20, 16).requires_grad_() for _ in range(3)]
    for x in inputs:
        for dim in dims:
            torch._dynamo.mark_dynamic(x, dim)
    function = lambda *qkv: F.scaled_dot_product_attention(*qkv, is_causal=True)  # noqa: E731
    with joint_graph() as ops:
        torch.compile(function, fullgraph=True)(*inputs).sum().backward()
    assert ops.count(str(FLASH_CPU)) == 1 and "dash.sdpa_backward.default" not in ops
    (entry,) = decisions()
    assert (entry.reason or "").startswith("family 'searched' is made for static shapes (dynamic=False), not for B=")
    dash_inductor.configure(on_unsupported="error")
    with pytest.raises(BackendCompilerFailed, match="family 'searched' is made for static shapes"):
        torch.compile(function, fullgraph=True)(*inputs)


def test_error_names_the_line(enabled):
    """The line of the attention that is declined, also where not the user but Inductor made SDPA of it."""
    dash_inductor.configure(on_unsupported="error")

    def two(query, key, value):
        first = F.scaled_dot_product_attention(query, key, value)
        return first + F.scaled_dot_product_attention(query, key, value, is_causal=True)  # the culprit

    def hand_written(query, key, value):
        weights = torch.softmax(query @ key.mT * 0.5, -1)
        return weights @ value  # the culprit

    cases = [(two, Case(20, 24, 16, "causal with S_q=20 and S_k=24")), (hand_written, Case(20, 24, 8, "head dim 8 is outside"))]
    for function, case in cases:
        with pytest.raises(BackendCompilerFailed, match=case.reason) as caught:
            torch.compile(function)(*(x.requires_grad_() for x in case.inputs))
        assert "# the culprit" in str(caught.value)
        assert "first = " not in str(caught.value)
        assert isinstance(caught.value.inner_exception, dash_inductor.UnsupportedAttentionError)
