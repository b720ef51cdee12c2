"""Calls of SDPA that torch decomposes: each has one decision if a gradient flows through it, and keeps its gradients."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention import SeenError, assert_right, compiled, gradients
from tensors import BF16, FP32, normal
from torch import Tensor, fx
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.codecache import PyCodeCache
from torch.compiler import nested_compile_region
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import dash_inductor
from dash_inductor import Decision, UnsupportedAttentionError, decisions, enabled
from dash_inductor.decision import UNKNOWN
from dash_inductor.op import NOTE
from dash_inductor.rewrite import declined, math_path

REASON = "SDPA took the math path"
DROPPED = f"{REASON}: dropout on the CPU"


@pytest.fixture(autouse=True)
def on(as_installed: None) -> Iterator[None]:
    """Without the emulated memory-efficient op, which takes dropout."""
    with enabled(), without_efficient():
        yield


@contextmanager
def without_efficient() -> Iterator[None]:
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_mem_efficient_sdp(True)


def noted(function: Callable[..., Any], inputs: Sequence[Tensor], *, dynamic: bool = False) -> list[Decision]:
    """The decisions that the joint graph holds, which is not lowered, in the order of the calls."""
    found: list[list[Decision]] = []

    def look(graph: fx.Graph) -> None:
        if not any("tangents" in str(node.target) for node in graph.nodes):
            return  # of a part of it
        notes = [node for node in graph.nodes if node.target is NOTE]
        found.append([declined.noted(node) for node in reversed(notes)])  # and once more at the second try of a failed graph
        raise SeenError

    with inductor_config.patch(joint_custom_post_pass=look), pytest.raises(BackendCompilerFailed, match="SeenError"):
        compiled(function, dynamic=dynamic)(*(x.detach().requires_grad_() for x in inputs))
    return found[0]


def of(*shape: int, dtype: torch.dtype = FP32) -> list[Tensor]:
    return [normal(*shape, dtype=dtype, seed=seed) for seed in range(3)]


def dropped(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, dropout_p=0.1, **keywords)  # the line


def line_of(function: Callable[..., Any], text: str = "F.scaled_dot_product_attention") -> str:
    """Where the function has it."""
    lines, first = inspect.getsourcelines(function)
    return f"{__file__}:{first + next(index for index, line in enumerate(lines) if text in line)}"


def attend(**keywords: Any) -> Callable[..., Tensor]:
    return lambda query, key, value: F.scaled_dot_product_attention(query, key, value, **keywords)


def asked_for(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query, key, value)


def masked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return dropped(query, key, value, attn_mask=query[0, 0, :, :1] > 0)


def learnt(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The bias alone has a gradient. As on the CPU: under emulation the memory-efficient op would take it."""
    bias = query[..., :1].expand(2, 4, 20, 20)
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query.detach(), key.detach(), value.detach(), attn_mask=bias)


def narrowed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with torch.autocast("cpu", BF16):
        return dropped(query, key, value)


def wide(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """As on the CPU: under emulation the memory-efficient op would take it."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query, key, torch.cat([value, value], -1))


def flat(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Of two dimensions, which the math path alone takes; flash attention takes three from torch 2.14 on."""
    query, key, value = (x[0, 0] for x in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value)[None, None]


SHAPE = (2, 4, 20, 8)
GROUPED = [normal(*SHAPE), *of(2, 2, 20, 8)[1:]]
SIZES = {"batch": 2, "heads": 4, "kv_heads": 4, "q_len": 20, "kv_len": 20, "head_dim": 8, "dtype": "fp32", "mask": "full"}
CASES: dict[str, tuple[Callable[..., Any], Sequence[Tensor], str, dict[str, Any]]] = {
    "dropout": (dropped, of(*SHAPE), DROPPED, {}),
    "causal": (attend(dropout_p=0.1, is_causal=True), of(*SHAPE), DROPPED, {"mask": "causal"}),
    "a mask": (masked, of(*SHAPE), DROPPED, {"mask": "given"}),
    "bf16": (dropped, of(*SHAPE, dtype=BF16), DROPPED, {"dtype": "bf16"}),
    "autocast": (narrowed, of(*SHAPE), DROPPED, {"dtype": "bf16"}),
    "groups": (attend(dropout_p=0.1, enable_gqa=True), GROUPED, DROPPED, {"kv_heads": 2}),
    "head dims": (wide, of(*SHAPE), f"{REASON}: head dims differ (query 8, value 16)", {}),
    "2 dimensions": (attend(), of(20, 8), f"{REASON}: inputs of 2 dimensions, not 4", {"batch": 1, "heads": 1, "kv_heads": 1}),
    "columns": (lambda q, k, v: attend()(q, k, v.mT), [*of(*SHAPE)[:2], normal(2, 4, 8, 20)],
                f"{REASON}: the last stride of the value is 20, not 1", {}),
    "columns, of keys": (lambda q, k, v: attend()(q, k.mT, v), [normal(*SHAPE), normal(2, 4, 8, 20), normal(*SHAPE)], REASON, {}),
    "none, of keys": (lambda q, k, v: asked_for(q, k.mT.contiguous().mT, v), of(2, 4, 8, 8), REASON, {"q_len": 8, "kv_len": 8}),
    "asked for": (asked_for, of(*SHAPE), REASON, {}),
    "a bias with a gradient": (learnt, of(*SHAPE), REASON, {"mask": "given"}),
    "more queries": (dropped, [normal(2, 4, 24, 8), *of(*SHAPE)[1:]], DROPPED, {"q_len": 24}),
    "matmuls of one row": (dropped, [normal(2, 4, 1, 8), normal(*SHAPE), normal(2, 4, 20, 1)], DROPPED,
                           {"q_len": 1, "dtype": UNKNOWN}),
}  # fmt: skip


@pytest.mark.every_case
@pytest.mark.parametrize("name", CASES)
def test_reasons(name):
    """What is said of one call, and that nothing is said that the graph does not show."""
    function, inputs, reason, sizes = CASES[name]
    (entry,) = noted(function, inputs)
    assert entry.reason == reason and entry.op == "aten.scaled_dot_product_attention.default" and entry.device == "cpu"
    assert {name: getattr(entry, name) for name in SIZES} == SIZES | sizes


def test_three_dimensions():
    """Without dropout they are rewritten (test_matmuls). torch 2.15 makes them four."""
    (entry,) = noted(dropped, of(4, 20, 8))
    assert entry.reason.startswith(REASON)
    assert (entry.batch, entry.heads, entry.kv_heads, entry.head_dim) == (1, 4, 4, 8)


# How many there are.


def without_gradient(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The operation after the call has the number in autograd's count that the call would have had."""
    with torch.no_grad():
        out = dropped(query, key, value)
    return out * query


def by_hand(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.softmax(torch.sin(query @ key.mT), -1) @ value


def values_alone(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Neither softmax has a gradient."""
    return dropped(query.detach(), key.detach(), dropped(query.detach(), key.detach(), value))


def around(times: int, function: Callable[..., Tensor], **keywords: Any) -> Callable[..., Tensor]:
    """One line in a loop, whose result is the next query."""

    def loop(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        for _ in range(times):
            query = function(query, key, value, **keywords)
        return query

    return loop


def recomputed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return checkpoint(dropped, query, key, value, use_reentrant=False)


def twice_recomputed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return checkpoint(around(2, dropped), query, key, value, use_reentrant=False)


class Projected(torch.nn.Module):
    """Dynamo does not look into MultiheadAttention, which attends by SDPA unless weights are asked for."""

    def __init__(self, *, need_weights: bool = False, dropout: float = 0.1) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(8, 2, dropout=dropout, batch_first=True)
        self.need_weights = need_weights

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.attention(query, key, value, need_weights=self.need_weights)[0]  # the line


COUNTS: dict[str, tuple[int, Callable[..., Any]]] = {
    "a helper, twice": (2, lambda q, k, v: dropped(q, k, v) + dropped(q, k, v)),
    "a loop": (3, around(3, dropped)),
    "a loop, recomputed": (3, around(3, recomputed)),
    "loops, recomputed": (4, around(2, twice_recomputed)),
    "no gradient": (0, without_gradient),
    "one of two without": (1, lambda q, k, v: without_gradient(q, k, v) + dropped(q, k, v)),
    "detached": (0, lambda q, k, v: dropped(q, k, v).detach() + q),
    "of values alone": (2, values_alone),
    "by hand": (1, by_hand),
    "by hand and not": (2, lambda q, k, v: by_hand(q, k, v) + dropped(q, k, v)),
    "a flash op": (0, attend()),
    "a flash op and not": (1, lambda q, k, v: attend()(q, k, v) + dropped(q, k, v)),
    "under vmap": (1, torch.vmap(wide)),
}


def wide_and_causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Of groups, which the memory-efficient op does not know."""
    wide = torch.cat([value, value], -1)
    return F.scaled_dot_product_attention(query, key, wide, is_causal=True, enable_gqa=True)[..., :8]


def test_a_nested_region():
    """What is compiled once, to be called twice, has one decision. It is traced twice, of other ops then."""
    (entry,) = noted(around(2, nested_compile_region(dropped)), of(*SHAPE))
    assert ((entry.reason or "").startswith(REASON), entry.head_dim, entry.source) == (True, 8, line_of(dropped))
    inputs = [normal(1, 2, 20, 8), *of(1, 1, 20, 8)[1:]]
    actual = gradients(compiled(around(2, nested_compile_region(wide_and_causal))), inputs)
    (entry,) = set(decisions())
    assert entry.rewritten and (entry.mask, entry.kv_heads, entry.source) == ("causal", 1, line_of(wide_and_causal))
    assert_right(actual, around(2, wide_and_causal), inputs)


@pytest.mark.parametrize("name", COUNTS)
def test_one_decision_per_call(name):
    expected, function = COUNTS[name]
    assert len(noted(function, of(*SHAPE) if name != "under vmap" else of(3, *SHAPE))) == expected


def test_sizes_known_at_run_time():
    """They guard on nothing."""
    (entry,) = noted(dropped, of(*SHAPE), dynamic=True)
    assert entry.reason == DROPPED and entry.mask == "full"
    assert isinstance(entry.q_len, str) and UNKNOWN not in (entry.q_len, entry.kv_heads, entry.head_dim)


# Where they are.


def test_line_of_the_call():
    """Of the helper that calls SDPA, not of who calls the helper; two calls differ by it."""
    first, second = noted(lambda q, k, v: wide(dropped(q, k, v), k, v), of(*SHAPE))
    assert [first.source, second.source] == [line_of(dropped), line_of(wide)]
    assert first.place == f"at {line_of(dropped)}" and str(first).startswith(f"{first.op} {first.place} (B=2 H=4 ")


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = Projected()

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.attend(dropped(query, key, value), key, value)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        for block in self.blocks:
            query = block(query, key, value)
        return query


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: lambda *qkv: model(*qkv)], ids=["a module", "a function"])
def test_path_of_the_module(wrap):
    found = noted(wrap(Model()), of(2, 20, 8))
    assert [(entry.module, entry.source) for entry in found] == [
        *(("blocks.0", line_of(dropped)), ("blocks.0.attend.attention", line_of(Projected.forward, "need_weights)[0]"))),
        *(("blocks.1", line_of(dropped)), ("blocks.1.attend.attention", line_of(Projected.forward, "need_weights)[0]"))),
    ]
    assert [entry.kv_heads for entry in found] == [2, 2, 2, 2]
    (by_torch,) = noted(Projected(need_weights=True, dropout=0.0), of(2, 20, 8))
    assert (by_torch.op, by_torch.remedy) == (
        "attention written by hand",
        "call torch.nn.MultiheadAttention with need_weights=False",
    )


@pytest.mark.nightly
def test_layers_of_transformers():
    """The frame that calls SDPA is in transformers."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=16, n_positions=32, attn_implementation="sdpa")
    model = transformers.GPT2LMHeadModel(config).train()
    found = noted(lambda weights: model(inputs_embeds=weights).logits, [normal(1, 20, 32)])
    assert [entry.module for entry in found] == ["transformer.h.0.attn", "transformer.h.1.attn"]
    assert all("sdpa_attention.py:" in (entry.source or "") for entry in found)
    assert [entry.reason for entry in found] == [DROPPED] * 2


# What becomes of it.


def test_gradients_are_the_stock_ones():
    """To the bit, wherever the note stands: there is none without the package."""
    functions = [wide, lambda q, k, v: wide(q.detach(), k.detach(), v)]
    for function in functions:
        inputs = [x.requires_grad_() for x in of(1, 1, 20, 8)]
        actual = torch.autograd.grad(compiled(function)(*inputs).sum(), inputs, allow_unused=True)
        dash_inductor.disable()
        expected = torch.autograd.grad(compiled(function)(*inputs).sum(), inputs, allow_unused=True)
        dash_inductor.enable()
        assert all(a is e is None or torch.equal(a, e) for a, e in zip(actual, expected, strict=True))
    assert len(decisions()) == len(functions)


def loop_of_two(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One is rewritten, one of the others is recomputed."""
    query = F.scaled_dot_product_attention(query, key, value)
    query = checkpoint(flat, query, key, value, use_reentrant=False)
    return flat(query, key, value)


def test_recorded_once_cold_and_warm(caplog):
    """Warm in one process, and as in one that starts: it has loaded no graph yet. A cache of graphs alone knows it too."""
    inputs = of(1, 1, 20, 16)
    for run in ("cold", "warm", "another process", "graphs alone"):
        caplog.clear()
        dash_inductor.clear_decisions()
        if run in ("another process", "graphs alone"):
            PyCodeCache.cache_clear()
        counters.clear()
        with functorch_config.patch(enable_autograd_cache=run != "graphs alone"):
            gradients(compiled(loop_of_two), inputs)
        assert counters["aot_autograd"]["autograd_cache_hit"] == (run in ("warm", "another process"))
        assert (counters["inductor"]["fxgraph_cache_miss"] > 0) == (run == "cold")
        assert (counters["inductor"]["dash_declined"], counters["inductor"]["dash_rewritten"]) == (2, 1)
        found = sorted((entry.rewritten, entry.source) for entry in decisions())
        assert found == [(False, line_of(flat)), (False, line_of(flat)), (True, line_of(loop_of_two))]
        assert caplog.messages[0] == "graph 0/0 of loop_of_two (backward): 1 attention rewritten, 2 declined"
        assert caplog.messages[1:] == [str(entry) for entry in decisions()]


def test_the_text_is_in_the_keys(monkeypatch):
    """The backward is the same graph, with another decision; the forward is the same."""
    for reason, expected in ((REASON, 2), ("another", 1), ("another", 0), (REASON, 0)):
        monkeypatch.setattr(math_path, "REASON", reason)
        counters.clear()
        with functorch_config.patch(enable_autograd_cache=False):
            gradients(compiled(flat), of(1, 1, 20, 8))
        assert counters["inductor"]["fxgraph_cache_miss"] == expected
    assert [(entry.reason or "").partition(":")[0] for entry in decisions()] == [REASON, "another", "another", REASON]


@pytest.mark.parametrize("setting", ["pattern_matcher", "use_joint_graph_passes"])
def test_where_inductor_leaves_out_the_pass(setting):
    """Each attention has its decision all the same, once, with warm caches too; and a warning."""
    inputs, off = of(1, 1, 20, 16), f"torch._inductor.config.{setting} is off"
    for run, settings in enumerate(({}, {}, {"on_unsupported": "warn"})):
        PyCodeCache.cache_clear()
        dash_inductor.clear_decisions()
        counters.clear()
        with enabled(**settings), inductor_config.patch({setting: False}), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            gradients(compiled(loop_of_two), inputs)
        assert counters["aot_autograd"]["autograd_cache_hit"] == (run == 1)
        reasons = sorted((entry.reason or "").partition(":")[0] for entry in decisions())
        assert reasons == [REASON, REASON, off]
        assert all(entry.source for entry in decisions())
        assert sum("dash_inductor leaves" in str(w.message) for w in caught) == (3 if settings else 0)


LEAVES = "dash_inductor leaves aten.scaled_dot_product_attention.default to the stock kernel: "


def test_it_can_be_said_louder():
    """A warning for each; an error, with the user's stack."""
    with enabled(on_unsupported="warn"), pytest.warns(UserWarning, match="dash_inductor leaves") as caught:
        noted(around(2, dropped), of(*SHAPE))
    assert [str(w.message) for w in caught] == [f"{LEAVES}{DROPPED} (at {line_of(dropped)}). Remedy: {declined.DROPOUT}"] * 2
    with enabled(on_unsupported="error"), pytest.raises(BackendCompilerFailed) as raised:
        compiled(wide)(*(x.requires_grad_() for x in of(*SHAPE)))
    assert isinstance(raised.value.inner_exception, UnsupportedAttentionError)
    message = str(raised.value.inner_exception)
    assert message.startswith(
        f"{LEAVES}{REASON}: head dims differ (query 8, value 16) (at {line_of(wide)}). Remedy: none needed: on a GPU another op "
    )
    assert "return F.scaled_dot_product_attention(query, key, torch.cat" in message
