"""varlen_attn of packed sequences: right gradients, and the same bits in every interleaving."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from attention import FP32_ERROR, compiled, differing, error, gradients, mutate, rewritten
from flex import INTERLEAVINGS, backward_of, wide_scores
from tensors import BF16, FP32, normal
from test_flex_tables import tables_made
from torch import Tensor, fx
from torch._dynamo import config as dynamo_config
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen as torch_varlen
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from torch.utils.checkpoint import checkpoint

from dash_inductor import clear_decisions, decisions, disable, enabled
from dash_inductor.codegen.mode import deterministic
from dash_inductor.decision import Kernel, Stock
from dash_inductor.emulation import emulate
from dash_inductor.hooks import install, recording
from dash_inductor.resolve import resolve
from dash_inductor.rewrite import resolved, stock_ops
from dash_inductor.rewrite import varlen as rewriting
from dash_inductor.rewrite.stock_ops import VARLEN

pytestmark = pytest.mark.usefixtures("rewriting")

FULL, CAUSAL = (-1, -1), (-1, 0)


@dataclass(frozen=True)
class Packed:
    """Sequences of `queries` and `keys` tokens (None: as many), one after the other; `tail` more tokens belong to none of them."""

    queries: tuple[int, ...]
    keys: tuple[int, ...] | None = None
    window: tuple[int, int] = CAUSAL
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 16
    dtype: torch.dtype = FP32
    scale: float | None = None
    tail: int = 0

    @property
    def lengths(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Those of queries and of keys."""
        return self.queries, self.keys or self.queries

    def tensors(self) -> list[Tensor]:
        """query, key, value [T, H, D], and grad_out."""
        q_len, kv_len = (sum(x) + self.tail for x in self.lengths)
        shapes = (q_len, self.heads), (kv_len, self.kv_heads), (kv_len, self.kv_heads), (q_len, self.heads)
        return [normal(*shape, self.head_dim, dtype=self.dtype, seed=seed) for seed, shape in enumerate(shapes)]

    def offsets(self) -> list[Tensor]:
        """Those of queries and of keys."""
        return [torch.tensor([0, *accumulate(x)], dtype=torch.int32) for x in self.lengths]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, *longest: int) -> Any:
        """varlen_attn under the window."""
        knows_gqa = "enable_gqa" in inspect.signature(varlen_attn).parameters  # from torch 2.13 on
        gqa = {"enable_gqa": True} if knows_gqa else {}
        return varlen_attn(query, key, value, cu_q, cu_k, *longest, window_size=self.window, scale=self.scale, **gqa)

    def function(self) -> Callable[..., Tensor]:
        """The attention of query, key, value."""
        offsets, longest = self.offsets(), [max(x) for x in self.lengths]
        return lambda *tensors: self.attend(*tensors, *offsets, *longest)

    def visible(self) -> Tensor:
        """bool [queries, keys]."""
        seen = torch.zeros([sum(x) + self.tail for x in self.lengths], dtype=torch.bool)
        left, right = (10**6 if size < 0 else size for size in self.window)
        for (q, q_end), (k, k_end) in zip(*(pairwise(x.tolist()) for x in self.offsets()), strict=True):
            ahead = torch.arange(k_end - k) - torch.arange(q_end - q)[:, None] - (k_end - k) + (q_end - q)
            seen[q:q_end, k:k_end] = (ahead >= -left) & (ahead <= right)
        return seen

    def reference(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """dq, dk, dv in float64."""
        *leaves, grad_out = (x.double() for x in tensors)
        seen = self.visible()

        def attend(*packed: Tensor) -> Tensor:
            heads = [x.transpose(0, 1)[None] for x in packed]
            scores, values = wide_scores(*heads, lambda b, h, m, n: seen[m, n], None, self.scale)
            return (scores.softmax(-1).where(seen, 0.0) @ values)[0].transpose(0, 1)

        return gradients(attend, leaves, grad_out)


LENGTHS = (20, 40, 9)
ATTENTIONS = {
    "causal": Packed(LENGTHS),
    "full, keys longer, GQA": Packed((30, 20, 7), (40, 40, 33), window=FULL, heads=4),
    "window, keys longer, bf16": Packed((30, 20), (35, 50), window=(16, 0), dtype=BF16),
    "empty sequences, tokens of no sequence": Packed((0, 40, 0, 0, 22, 0), (5, 35, 0, 7, 22, 0), tail=24),
    "head dim 160, window, tokens of no sequence": Packed((50, 0, 31), window=(16, 0), head_dim=160, tail=24),
}
NIGHTLY = {
    "queries longer, some see nothing": Packed((44, 40), (20, 40)),
    "full": Packed((40, 33, 64), window=FULL),
    "window": Packed((90, 50), window=(16, 0), heads=4),
    "window on both sides": Packed((90, 50), window=(8, 20)),
    "window on the right": Packed((90, 50), window=(-1, 20)),
    "window on the left": Packed((50, 50), window=(8, -1)),
    "keys longer": Packed((30, 20, 7), (64, 40, 90)),
    "queries longer": Packed((64, 30, 45), (20, 45, 2), window=FULL),
    "one sequence": Packed((75,)),
    "whole blocks": Packed((64, 32), window=FULL),
    "many short ones": Packed((3,) * 20, scale=0.7),
    "one token each": Packed((1,) * 40),
    "tokens of no sequence": Packed((30, 34), window=FULL, tail=64),
    "wide window": Packed((30, 34), window=(2**40, 2**40)),
    "window as wide as the queries": Packed((20, 22), (20, 12), window=(20, 22)),
    "head dim 128": Packed((50, 31), heads=1, kv_heads=1, head_dim=128),
    "head dim 24": Packed((50, 31), head_dim=24),
    "MQA": Packed((30, 34), heads=6, kv_heads=1),
}
ERRORS = {FP32: FP32_ERROR, BF16: 2**-7}
CASES = [*ATTENTIONS.items(), *(pytest.param(*case, marks=pytest.mark.nightly) for case in NIGHTLY.items())]


@pytest.mark.parametrize(("name", "attention"), CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_right_in_every_interleaving(name, attention):
    """Against float64; tokens of no sequence have gradients of 0."""
    tensors = attention.tensors()
    backward = backward_of(attention.function(), tensors)
    first, *others = [backward(*interleaving) for interleaving in INTERLEAVINGS]
    assert rewritten() == 1 and not any(differing(x, first) for x in others)
    for actual, right in zip(first, attention.reference(tensors), strict=True):
        assert error(actual, right) < ERRORS[attention.dtype]
    assert (decisions()[-1].op, decisions()[-1].mask) == (str(VARLEN), "varlen")


def test_what_the_stock_op_leaves_unwritten_does_no_harm():
    """Tokens of no sequence have NaN in out and logsumexp in deterministic mode."""
    attention = ATTENTIONS["empty sequences, tokens of no sequence"]
    *inputs, _ = attention.tensors()
    with emulate():
        out = compiled(attention.function())(*inputs)
    assert out[-24:].isnan().all() and not out[:-24].isnan().any()


def of_projection(x: Tensor, cu_q: Tensor, cu_k: Tensor, *longest: int) -> Any:
    """Strided queries, keys and values, gradients in other layouts, and offsets that begin within their memory."""
    query, key, value = x.sin().view(x.shape[0], 3, 2, 16).unbind(1)
    key = key.transpose(0, 1).contiguous().transpose(0, 1)
    return ATTENTIONS["causal"].attend(query, key, value, cu_q[2:], cu_k[2:], *longest)


@pytest.mark.parametrize("dynamic", [True, pytest.param(None, marks=pytest.mark.nightly)])
def test_three_lengths_through_one_graph(dynamic):
    """With the bits of a graph of each length alone. Where dynamic shapes are automatic, the second length recompiles."""
    in_one_graph = compiled(of_projection, dynamic=dynamic)
    for index, lengths in enumerate([LENGTHS, (33, 31), (5, 30, 2, 2)]):
        attention = Packed(lengths)
        x, grad_out = normal(sum(lengths), 96), attention.tensors()[3]
        others = [*(torch.cat([normal(2).int() - 50, cu]) for cu in attention.offsets()), 40, 40]

        def step(function, x=x, grad_out=grad_out, others=others):
            return gradients(lambda leaf: function(leaf, *others), [x], grad_out)

        with dynamo_config.patch(error_on_recompile=index > (dynamic is None)), emulate(index):
            (actual,) = step(in_one_graph)
        with emulate():
            (right,) = step(of_projection)
        assert error(actual, right) < FP32_ERROR
    assert rewritten() == 1 + (dynamic is None) and not isinstance(decisions()[-1].q_len, int)
    with emulate(5):
        (alone,) = step(compiled(of_projection))
    assert torch.equal(actual, alone)


@pytest.mark.parametrize("level", ["run", "batch"])
def test_one_table_for_all_layers(level):
    """Two windows have two."""
    causal, window = Packed((64,)), Packed((64,), window=(8, 0))
    offsets = causal.offsets()

    def layers(query, key, value):
        for attention in (causal, window, causal):
            query = attention.attend(query, key, value, *offsets, 64, 64).sin()
        return query

    with enabled(guarantee=level), emulate(), tables_made() as made:
        gradients(compiled(layers), causal.tensors()[:3])
    assert rewritten() == 3 and made == {"matrix": 0, "ranks": 2, "rows": 2}


MUTANTS = {
    "every block in full": lambda first, last, length, keys, right: right * 2,
    "no last block of keys": lambda first, last, length, keys, right: torch.cat([right[:, :, :-1], 0 * right[:, :, -1:]], 2),
}


@pytest.mark.parametrize("name", [*MUTANTS])
def test_wrong_blocks_are_seen(name, monkeypatch):
    attention, right = ATTENTIONS["full, keys longer, GQA"], rewriting.block_matrix
    monkeypatch.setattr(rewriting, "block_matrix", lambda *args: MUTANTS[name](*args, right(*args)))
    assert not is_right(attention)


def test_garbage_that_comes_through_is_seen(monkeypatch):
    """`out` of tokens of no sequence, which stand in one tile with others."""
    kept = 'tl.where(neg_lse == float("-inf"), 0.0, delta)'
    mutate(monkeypatch, "PREPROCESS", "garbage", {kept: "delta"})
    assert not is_right(ATTENTIONS["empty sequences, tokens of no sequence"])


def is_right(attention: Packed) -> bool:
    tensors = attention.tensors()
    actual = backward_of(attention.function(), tensors)()
    assert rewritten() == 1
    return all(error(a, e) < 1e-3 for a, e in zip(actual, attention.reference(tensors), strict=True))


def reason_of(attention: Packed, **settings: Any) -> str | None:
    """Why it keeps the stock kernel, whose gradients are right; None where it is rewritten."""
    tensors = attention.tensors()
    with enabled(**settings), emulate():
        actual = gradients(compiled(attention.function()), tensors[:3], tensors[3])
    assert max(error(a, e) for a, e in zip(actual, attention.reference(tensors), strict=True)) < 1e-5
    decision = decisions()[-1]
    assert counters["inductor"]["dash_declined" if decision.reason else "dash_rewritten"] == 1
    assert (decision.op, decision.mask, decision.batch) == (str(VARLEN), "varlen", 1)
    assert (decision.q_len, decision.kv_len) == tuple(map(sum, attention.lengths))
    return decision.reason


SHORT = Packed((20, 12))
ENDS_ON_THE_RIGHT = Packed((20, 22), (20, 12), window=(4, -1))


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("attention", "settings", "expected"),
    [
        (replace(SHORT, head_dim=144), {"template": "one_pass"}, "head dim 144 is more than the 128 of one pass, which template="),
        (SHORT, {"kernel": "gluon"}, "the Gluon kernel is made for sm_90, not emulated"),
        (ENDS_ON_THE_RIGHT, {}, "a window to the left alone, and more queries than keys: "),
        (replace(ENDS_ON_THE_RIGHT, window=(-1, 20)), {}, "a window to the right of all keys, and more queries than that: "),
        (replace(ENDS_ON_THE_RIGHT, window=(30, 21)), {}, "a window to the right of all keys, and more queries than that: "),
    ],
)
def test_reasons(attention, settings, expected):
    assert (reason_of(attention, **settings) or "").startswith(expected)


@pytest.mark.parametrize("warn_only", [False, True])
def test_the_mode_is_asked_with_the_attention(warn_only, monkeypatch):
    """Whether a faster stock kernel may be kept depends on it."""
    asked = []
    monkeypatch.setattr(resolved, "resolve", lambda problem, *others: asked.append(problem.stock) or resolve(problem, *others))
    with deterministic(warn_only=warn_only):
        assert reason_of(SHORT) is None
    assert set(asked) == {Stock(Kernel.FLASH, strict=not warn_only)}


def test_settings_of_inductor():
    with inductor_config.patch(pattern_matcher=False):
        assert reason_of(SHORT) == "torch._inductor.config.pattern_matcher is off"


@pytest.mark.filterwarnings("ignore:dash_inductor")
def test_what_a_newer_torch_may_give(monkeypatch):
    """Such as the gradient of the logsumexp, which torch leaves out up to now."""
    stock = rewriting.arguments
    monkeypatch.setattr(rewriting, "arguments", lambda node: stock(node) | {"grad_lse": node.args[5], "other": None})
    assert reason_of(SHORT) == "varlen_attn's backward takes grad_lse, which is not known here"


def with_logsumexp(use: Callable[[Tensor, Tensor], Any]) -> Callable[..., Any]:
    """What `use` makes of the output [T, H, D] and the logsumexp [T, H] of an attention."""
    offsets, longest = SHORT.offsets(), [max(x) for x in SHORT.lengths]

    def attend(*tensors: Tensor) -> Any:
        out, lse = varlen_attn(*tensors, *offsets, *longest, return_aux=AuxRequest(lse=True), window_size=CAUSAL)
        return use(out, lse.T)

    return attend


@torch.no_grad()
def without_grad(x: Tensor) -> Tensor:
    return x.sigmoid()


def gated(out: Tensor, gate: Tensor) -> Tensor:
    return (out * gate.unsqueeze(-1)).square().sum()


SINK = torch.zeros(2, requires_grad=True)
USED = {
    "sinks": lambda out, lse: gated(out, (lse - SINK).sigmoid()),
    "its own loss": lambda out, lse: out.square().sum() + lse.square().mean(),
    "checkpointed": lambda out, lse: checkpoint(gated, out, lse, use_reentrant=False),
}
UNUSED = {
    "not taken": lambda out, lse: out.square().sum(),
    "returned": lambda out, lse: (out.square().sum(), lse, lse.mean()),
    "detached": lambda out, lse: gated(out, (lse.detach() - SINK).sigmoid()),
    "data": lambda out, lse: gated(out, lse.data),
    "without grad": lambda out, lse: gated(out, without_grad(lse)),
    "compared": lambda out, lse: gated(out, lse > 0),
}


@pytest.mark.parametrize("name", [*USED, *UNUSED])
@pytest.mark.every_case
def test_which_logsumexps_are_used(name):
    noted = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        rewriting.note_used_logsumexps(gm)
        nodes = [x for each in gm.modules() if isinstance(each, fx.GraphModule) for x in each.graph.nodes]
        noted.extend(rewriting.USED in x.meta.get("custom", {}) for x in nodes if x.target in rewriting.FORWARDS)
        return gm

    with emulate():
        torch.compile(with_logsumexp((USED | UNUSED)[name]), backend=backend)(*(x.requires_grad_() for x in SHORT.tensors()[:3]))
    assert noted == [name in USED]


@pytest.mark.every_case
@pytest.mark.parametrize("backend", ["inductor", "dash"])
def test_a_logsumexp_that_is_used_is_told_once(backend, monkeypatch):
    """Whatever the settings: torch gives query and key no gradient of it."""
    monkeypatch.setattr(recording, "_warned", set())
    if backend == "dash":
        disable()
    with emulate(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            torch._dynamo.reset()
            clear_decisions()
            leaves = [x.requires_grad_() for x in SHORT.tensors()[:3]]
            torch.compile(with_logsumexp(USED["sinks"]), backend=backend)(*leaves).backward()
    install.want()
    (decision,) = decisions()
    (told,) = (str(x.message) for x in caught if "leaves out what that gives query and key" in str(x.message))
    assert not decision.rewritten
    assert decision.reason in told and "flex_attention" in told and __file__ in told


@pytest.mark.filterwarnings("ignore:dash_inductor")
def test_torch_leaves_that_gradient_out():
    """Where it no longer does, such an attention can be rewritten."""
    leaves = [x.requires_grad_() for x in SHORT.tensors()[:3]]
    with emulate():
        torch.compile(with_logsumexp(lambda out, lse: out.sum() * 0 + lse.square().sum()))(*leaves).backward()
    assert [x.grad.any().item() for x in leaves] == [False] * 3


def takes_flash(**named: Any) -> bool:
    """Whether an op with these arguments does, with tensors of a GPU."""
    with FakeTensorMode():
        on_gpu = {name: torch.empty(200, 2, 16, device="cuda") for name in ("query", "key", "value")}
    return rewriting._takes_flash(on_gpu | named)


def test_cudnn_stays(monkeypatch):
    """By what torch 2.15's op is given, what 2.14 says of the problem, and earlier ones of the GPU."""
    assert not takes_flash(backend=7) and takes_flash(backend=rewriting.FLASH)
    asked = []

    def can_use_cudnn(query: Tensor, key: Tensor, value: Tensor, max_q: int, window_size: list[int]) -> bool:
        asked.append((query.shape, max_q))
        return window_size == [-1, -1]

    monkeypatch.setattr(torch_varlen, "_can_use_cudnn", can_use_cudnn, raising=False)
    assert not takes_flash(window_size=None, max_q=200) and not takes_flash(window_size=[-1, -1], max_q=200)
    assert takes_flash(window_size=[-1, 0], max_q=200) and asked == [((200, 2, 16), 200)] * 3
    monkeypatch.delattr(torch_varlen, "_can_use_cudnn")
    for uses_cudnn in (True, False):
        monkeypatch.setattr(torch_varlen, "_should_use_cudnn", lambda index, uses_cudnn=uses_cudnn: uses_cudnn)
        assert takes_flash(max_q=200) != uses_cudnn


@pytest.mark.parametrize(
    ("window", "in_one", "rewrites"), [(CAUSAL, False, False), ((8, 0), False, False), (CAUSAL, True, True), (FULL, False, True)]
)
@pytest.mark.filterwarnings("ignore:dash_inductor")
def test_the_provider_of_cudnn_frontend_aligns_masks_otherwise(monkeypatch, window, in_one, rewrites):
    """Where lengths of queries and keys may differ, our backward would not fit its forward."""
    attention = replace(SHORT, window=window)
    monkeypatch.setattr(stock_ops, "active_implementation", lambda: "CUDNN")
    offsets, longest = attention.offsets(), [max(x) for x in attention.lengths]
    offsets = [offsets[0]] * 2 if in_one else offsets
    with emulate():
        gradients(compiled(lambda *x: attention.attend(*x, *offsets, *longest)), attention.tensors()[:3])
    decision = decisions()[-1]
    assert decision.rewritten == rewrites and ("the first query" in str(decision.reason)) != rewrites
    assert rewrites or (decision.implementation, decision.stock_differs) == ("CUDNN", False)


def test_without_emulation_the_cpu_has_no_kernel():
    """There is none before an emulation, and none after it has ended."""
    tensors = SHORT.tensors()[:3]
    with emulate():
        SHORT.function()(*tensors)
    with pytest.raises((NotImplementedError, RuntimeError), match="_flash_attention_forward"):
        SHORT.function()(*tensors)
