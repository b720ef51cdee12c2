"""The memory-efficient op, which under emulation runs on the CPU: rewritten, probed, and stock's where it is declined."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention import assert_right, attention, compiled, gradients, rewritten
from tensors import BF16, FP16, FP32, columns, normal, permuted, qkv
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor.codecache import PyCodeCache

import dash_inductor
from dash_inductor import decisions
from dash_inductor.emulation import emulate
from dash_inductor.rewrite import probe

EFFICIENT = "aten._scaled_dot_product_efficient_attention_backward.default"
CPUS = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
Attention = Callable[..., Tensor]


def efficient(*, causal: bool = False, scale: float | None = None) -> Attention:
    """The op itself, which SDPA on the CPU takes where head dims differ alone."""
    op = torch.ops.aten._scaled_dot_product_efficient_attention

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return op(query, key, value, None, True, 0.0, causal, scale=scale)[0]

    return attend


def narrow(inputs: list[Tensor]) -> list[Tensor]:
    """value has half the columns."""
    return [*inputs[:2], inputs[2][..., ::2].contiguous()]


@pytest.mark.parametrize(
    ("sizes", "options", "dtype", "layout"),
    [
        ((2, 2, 40, 72, 16), {}, FP32, list),
        ((1, 2, 72, 72, 16), {"causal": True}, FP32, permuted),
        ((1, 1, 64, 64, 32), {"causal": True, "scale": 0.3}, FP32, columns),  # as many rows as logsumexp has
        ((1, 2, 40, 40, 24), {"causal": True}, BF16, list),
        pytest.param((1, 2, 33, 20, 16), {}, FP16, permuted, marks=pytest.mark.nightly),
    ],
)
def test_gradients(rewriting, sizes, options, dtype, layout):
    """Right, and the same in two interleavings."""
    inputs = layout(qkv(*sizes, dtype=dtype)[:3])
    function, found = compiled(efficient(**options)), []
    for seed in (0, 1):
        with emulate(seed=seed):
            found.append(gradients(function, inputs))
    assert rewritten() == 1 and decisions()[-1].op == EFFICIENT
    assert all(map(torch.equal, *found))
    assert_right(found[0], attention(**options), inputs)


def test_one_graph_for_all_lengths(rewriting):
    with emulate():
        function = compiled(efficient(causal=True), dynamic=True)
        for length in (40, 64, 70):
            inputs = qkv(1, 2, length, length, 16)[:3]
            assert_right(gradients(function, inputs), attention(causal=True), inputs)
    assert (counters["stats"]["unique_graphs"], rewritten()) == (1, 1)


def test_caches_know_it_from_other_ops(as_installed):
    """At a length where logsumexp of both has 64 rows."""
    inputs = qkv(1, 2, 64, 64, 16)[:3]
    with dash_inductor.enabled():
        for function, op in ((attention(causal=True), CPUS), (efficient(causal=True), EFFICIENT)):
            gradients(compiled(function), inputs)
            assert decisions()[-1].op == op
    assert len(decisions()) == 2


def test_stock_backward(rewriting):
    inputs = qkv(1, 2, 40, 40, 264)[:3]
    with emulate():
        actual = gradients(compiled(efficient()), inputs)
    assert rewritten() == 0 and (decisions()[-1].reason or "").startswith("head dim 264 is outside")
    assert_right(actual, attention(), inputs)


@pytest.mark.parametrize("value_dim", [16, 24])
def test_causal_of_lengths_that_differ(rewriting, value_dim):
    """From the first query and key on, also of values that have another head dim."""
    query, key, _ = qkv(1, 2, 40, 72, 16)[:3]
    inputs = [query, key, normal(1, 2, 72, value_dim, seed=2)]
    with emulate():
        actual = gradients(compiled(efficient(causal=True)), inputs)
    assert rewritten() == 1
    assert (decisions()[-1].op, decisions()[-1].mask, decisions()[-1].reason) == (EFFICIENT, "block_mask", None)
    assert_right(actual, attention(causal=True), inputs)


SEES = torch.ones(40, 72, dtype=torch.bool).tril(20)
WITHOUT_KEYS = SEES.clone()
WITHOUT_KEYS[[0, 7]] = False


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "scale": 0.3},
        {"attn_mask": SEES},
        {"attn_mask": WITHOUT_KEYS},
        {"attn_mask": normal(2, 1, 40, 72)},
    ],
)
def test_head_dims_that_differ_go_there(deterministic, options):
    """Eager and compiled; with the gradients of the math path."""
    inputs = narrow(qkv(2, 2, 40, 72, 16)[:3])
    ops: list[str] = []

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, **options)

    expected = gradients(attend, inputs)
    with (
        emulate(),
        torch._inductor.config.patch(joint_custom_post_pass=lambda graph: ops.extend(str(n.target) for n in graph.nodes)),
    ):
        for function in (attend, compiled(attend)):
            torch.testing.assert_close(gradients(function, inputs), expected, rtol=1e-5, atol=1e-5)
    assert ops.count(EFFICIENT.replace("_backward", "")) == 1


def test_a_learnt_bias_keeps_the_stock_op(rewriting):
    """Without deterministic mode. Generated code asserts that strides are those of a GPU, where rows of 20 elements are padded."""
    torch.use_deterministic_algorithms(False)
    *inputs, grad_out = qkv(1, 2, 20, 20, 16, value_dim=24)

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)

    with emulate():
        actual = gradients(compiled(attend), [*inputs, normal(1, 2, 20, 20)], grad_out)
    assert rewritten() == 0
    assert_right(actual, attend, [*inputs, normal(1, 2, 20, 20)], grad_out)


def test_logsumexp_and_layout_of_a_gpu():
    query, key, value = qkv(1, 2, 40, 72, 16)[:3]
    bias = torch.zeros(1, 2, 40, 72).masked_fill(~WITHOUT_KEYS, -math.inf)
    with emulate():
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, bias, True)
    assert lse.shape == (1, 2, 64)
    assert (lse[..., [0, 7]] == 0).all() and (out[..., [0, 7], :] == 0).all() and (lse[..., 40:] == math.inf).all()
    assert out.stride() == (40 * 2 * 16, 16, 2 * 16, 1)


@pytest.mark.parametrize(
    "case",
    ["equal head dims", "nothing to train", "a dropout of everything", "grouped heads", "three dimensions"],
    ids=lambda case: case,
)
def test_all_else_stays_where_it_was(case, monkeypatch):
    """With the bits of the stock op."""
    query, key, value = narrow(qkv(1, 2, 8, 8, 16)[:3]) if case != "equal head dims" else qkv(1, 2, 8, 8, 16)[:3]
    options: dict[str, Any] = {"dropout_p": 1.0} if case == "a dropout of everything" else {"enable_gqa": case == "grouped heads"}
    if case == "grouped heads":
        key, value = key[:, :1], value[:, :1]
    if case == "three dimensions":
        query, key, value = (x[0] for x in (query, key, value))
    query.requires_grad_(case != "nothing to train")

    def attend() -> Tensor:
        torch.manual_seed(0)
        return F.scaled_dot_product_attention(query, key, value, **options)

    expected = attend()
    with emulate():
        actual = attend()
    assert torch.equal(actual, expected)
    assert "Efficient" not in str(actual.grad_fn)


def test_nothing_is_left_of_it():
    inputs = narrow(qkv(1, 2, 8, 8, 16)[:3])
    query = inputs[0].requires_grad_()
    with emulate():
        assert "Efficient" in str(F.scaled_dot_product_attention(*inputs).grad_fn)
    assert "Efficient" not in str(F.scaled_dot_product_attention(*inputs).grad_fn)
    with pytest.raises(NotImplementedError, match="efficient_attention' with arguments from the 'CPU' backend"):
        efficient()(query, *inputs[1:])


# The probe


@pytest.fixture
def asked_anew() -> Iterator[None]:
    probe._probed_once.cache_clear()
    yield
    probe._probed_once.cache_clear()


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("kind", probe.KINDS)
def test_the_emulated_op_is_as_it_should_be(kind, dtype, asked_anew):
    name = str(dtype).removeprefix("torch.")
    with emulate():
        assert probe._probed(EFFICIENT, kind, name, "cpu") is None
        assert probe._probed_once.cache_info().currsize == 1
    assert probe._probed(EFFICIENT, kind, name, "cpu") is None  # not there: not asked
    assert probe._probed_once.cache_info().hits == 0


def in_base_2(*args: Any) -> tuple[Tensor, ...]:
    out, lse, *others = torch.ops.aten._scaled_dot_product_efficient_attention(*args)
    return out, lse * math.log2(math.e), *others


INPUTS = qkv(1, 2, 40, 40, 16)[:3]
SEEN = f"logsumexp is in base 2 (seen of the forward of {EFFICIENT} in float32 on cpu)"


@pytest.fixture
def off(monkeypatch, asked_anew) -> Callable[[], None]:
    """Makes the op another than it was when it was last asked."""

    def make() -> None:
        monkeypatch.setattr(probe, "FORWARDS", {EFFICIENT: Named(in_base_2)})
        probe._probed_once.cache_clear()

    return make


class Named:
    """A function that looks like the op."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def __str__(self) -> str:
        return "aten._scaled_dot_product_efficient_attention.default"


def test_an_op_that_is_off_is_declined(as_installed, off):
    off()
    with dash_inductor.enabled():
        actual = gradients(compiled(efficient()), INPUTS)
        gradients(compiled(attention()), INPUTS)
    assert [entry.reason for entry in decisions()] == [SEEN, None]
    assert_right(actual, attention(), INPUTS)
    with dash_inductor.enabled(on_unsupported="error"), pytest.raises(BackendCompilerFailed, match="logsumexp is in base 2"):
        compiled(efficient())(*(x.clone().requires_grad_() for x in INPUTS))


@pytest.mark.parametrize("strict", [False, True])
def test_an_op_that_is_off_where_caches_are_warm(as_installed, off, strict):
    """In a process that starts, with another library say: the code of the cache is refused, by the op's name. Torch compiles anew
    then, and the op is declined; where that is forbidden, the user sees the refusal."""

    def warm() -> tuple[Tensor, ...]:
        PyCodeCache.cache_clear()
        dash_inductor.clear_decisions()
        return gradients(compiled(efficient()), INPUTS)

    with dash_inductor.enabled(), functorch_config.patch(strict_autograd_cache=strict):
        gradients(compiled(efficient()), INPUTS)
        warm()
        assert counters["aot_autograd"]["autograd_cache_hit"] == 1 and decisions()[0].rewritten
        off()
        if strict:
            with pytest.raises(
                BackendCompilerFailed, match=f"in the place of {EFFICIENT}, whose forward here is another: {SEEN[:20]}"
            ):
                warm()
        else:
            assert_right(warm(), attention(), INPUTS)
            assert [entry.reason for entry in decisions()] == [SEEN]


def test_sdpa_on_the_cpu_trains_after_an_emulation():
    """torch remembers where the op went while it was traced: to a kernel that is gone."""
    query = torch.randn(1, 2, 64, 16, requires_grad=True)

    def gradient(attend):
        return torch.autograd.grad(attend(query).sum(), query)[0]

    def attend(x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    expected = gradient(attend)
    with emulate():
        torch.testing.assert_close(gradient(torch.compile(attend, backend="aot_eager")), expected)
    torch._dynamo.reset()
    torch.testing.assert_close(gradient(torch.compile(attend, backend="aot_eager")), expected)
