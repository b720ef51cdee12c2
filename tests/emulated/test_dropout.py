"""SDPA with dropout, by the emulated memory-efficient op, which drops as a GPU's does; and by the bits of flash attention.

What was dropped is known: `dropout.kept` of the forward's seed and offset. With it gradients are compared with float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention import GARBAGE, compiled, error, gradients, mutate, rewritten
from flex import INTERLEAVINGS
from tensors import BF16, FP16, normal, qkv
from torch import Tensor
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor.codecache import PyCodeCache
from torch.utils.checkpoint import checkpoint

import dash_inductor
from dash_inductor import decisions, emulation, enabled
from dash_inductor.dropout import EFFICIENT, FLASH, Dropout, kept
from dash_inductor.emulation import efficient
from dash_inductor.first_use.kind import Kind
from dash_inductor.reproduce import trial
from dash_inductor.rewrite import drops

pytestmark = pytest.mark.usefixtures("rewriting")

OP = "aten._scaled_dot_product_efficient_attention_backward.default"
P = 0.3
SEED = 5
SIZES = 2, 2, 40, 75, 16
ADDED = "position = offset + ((zh*Q_LEN"
Attention = Callable[..., Tensor]


@pytest.fixture(params=[EFFICIENT, FLASH])
def generator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The emulated op drops by these bits, and is known to."""
    monkeypatch.setattr(efficient, "OF_EFFICIENT", request.param)
    monkeypatch.setattr(drops, "GENERATORS", dict.fromkeys(drops.GENERATORS, request.param))
    monkeypatch.setitem(drops.FORWARDS, FLASH, drops._efficient)
    drops._asked_once.cache_clear()
    yield request.param
    drops._asked_once.cache_clear()


def attend(p: float = P, **options: Any) -> Attention:
    """SDPA that drops; of a fourth tensor, that is its mask."""

    def function(query: Tensor, key: Tensor, value: Tensor, *mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, *mask, dropout_p=p, **options)

    return function


def state_of(seed: int) -> Tensor:
    """What the op draws first after that seed."""
    torch.manual_seed(seed)
    x = torch.zeros(1, 1, 1, 8)
    with emulation.emulate():
        return torch.stack(torch.ops.aten._scaled_dot_product_efficient_attention(x, x, x, None, True, P)[2:])


def trained(function: Attention, inputs: Sequence[Tensor], grad_out: Tensor, seed: int = SEED) -> tuple[Tensor, ...]:
    torch.manual_seed(seed)
    return gradients(function, inputs, grad_out)


def expected(
    inputs: Sequence[Tensor], grad_out: Tensor, *, p: float = P, seed: int = SEED, seen: Tensor | None = None, of: str = EFFICIENT
) -> tuple[Tensor, ...]:
    """In float64."""
    dropout, state = Dropout(p, of), state_of(seed)

    def function(query: Tensor, key: Tensor, value: Tensor, *bias: Tensor) -> Tensor:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        scores = query @ key.mT / math.sqrt(query.shape[3]) + (bias[0] if bias else 0)
        weights = (scores if seen is None else scores.masked_fill(~seen, -math.inf)).softmax(-1)
        return weights * kept(dropout, state, tuple(scores.shape)) * dropout.scale(inputs[0].dtype) @ value

    return gradients(function, [x.double() for x in inputs], grad_out.double())


def assert_close(actual: Sequence[Tensor], reference: Sequence[Tensor], allowed: float = 2e-6) -> None:
    for number, (a, r) in enumerate(zip(actual, reference, strict=True)):
        assert error(a, r) <= allowed, f"gradient {number}: error {error(a, r):.2e}"


def assert_taken(mask: str) -> None:
    assert rewritten() == 1
    assert (decisions()[-1].op, decisions()[-1].mask, decisions()[-1].reason) == (OP, mask, None)


def check(
    function: Attention, inputs: Sequence[Tensor], grad_out: Tensor, mask: str, *, allowed: float = 2e-6, **dropout: Any
) -> None:
    """Rewritten, with the gradients of `expected`."""
    with emulation.emulate():
        actual = trained(compiled(function), inputs, grad_out)
    assert_taken(mask)
    assert_close(actual, expected(inputs, grad_out, **dropout), allowed)


SEEN = torch.ones(40, 75, dtype=torch.bool).tril(20)
SEEN_FIRST = torch.ones(40, 75, dtype=torch.bool).tril()
ATTENTIONS: dict[str, tuple[tuple[int, ...], dict[str, Any], Tensor | None, str]] = {
    "full": (SIZES, {}, None, "full"),
    "causal": ((2, 2, 72, 72, 16), {"is_causal": True}, torch.ones(72, 72, dtype=torch.bool).tril(), "causal"),
    "causal from the first key": (SIZES, {"is_causal": True}, SEEN_FIRST, "block_mask"),
    "mask": (SIZES, {"attn_mask": SEEN}, SEEN, "block_mask"),
}


SETTINGS: list[dict[str, str]] = [{}, {"template": "two_pass"}, {"guarantee": "device"}, {"guarantee": "batch"}]
# How elements are counted differs by template and mask; a guarantee decides the schedule.
AT_NIGHT = {"causal": SETTINGS[2:], "causal from the first key": SETTINGS[1:]}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param(name, each, id=f"{name}-{each}", marks=[pytest.mark.nightly] * (each in AT_NIGHT.get(name, [])))
        for name in ATTENTIONS
        for each in SETTINGS
    ],
)
def test_gradients(name, settings):
    sizes, options, seen, mask = ATTENTIONS[name]
    *inputs, grad_out = qkv(*sizes)
    with enabled(**settings):
        check(attend(**options), inputs, grad_out, mask, seen=seen)
    assert decisions()[-1].dropout == P and f"mask {mask}, dropout {P})" in str(decisions()[-1])


@pytest.mark.parametrize("settings", [{}, {"template": "two_pass"}], ids=["one pass", "two passes"])
@pytest.mark.parametrize("name", ["full", "mask"])
@pytest.mark.parametrize("generator", [FLASH], indirect=True)
def test_bits_of_either_forward(name, settings, generator):
    """Those of the other one are test_gradients'."""
    sizes, options, seen, mask = ATTENTIONS[name]
    *inputs, grad_out = qkv(*sizes)
    with enabled(**settings):
        check(attend(**options), inputs, grad_out, mask, seen=seen, of=generator)


@pytest.mark.parametrize(
    ("p", "dtype", "allowed"),
    [
        pytest.param(0.1, BF16, 2**-5, id="0.1-dtype0-0.03125"),
        pytest.param(0.9, FP16, 2**-8, id="0.9-dtype1-0.00390625"),
        pytest.param(0.1, FP16, 2**-8, id="0.1-dtype1-0.00390625", marks=pytest.mark.nightly),
        pytest.param(0.9, BF16, 2**-5, id="0.9-dtype0-0.03125", marks=pytest.mark.nightly),
    ],
)
def test_half_precision(p, dtype, allowed):
    """The op rounds 1 / (1 - p) to the dtype of the tensors."""
    *inputs, grad_out = qkv(*SIZES, dtype=dtype)
    check(attend(p), inputs, grad_out, "full", allowed=allowed, p=p)


def test_a_learnt_mask_and_dropout():
    *inputs, grad_out = qkv(*SIZES)
    check(attend(), [*inputs, normal(*SIZES[:4], seed=7)], grad_out, "block_mask")


def test_groups_of_query_heads():
    """Each query head drops its own elements, of keys that are repeated for it."""
    *inputs, grad_out = qkv(2, 4, 40, 75, 16, kv_heads=2)

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(2, 4, 75, 16) for x in (key, value))
        return F.scaled_dot_product_attention(query, key, value, dropout_p=P)

    check(function, inputs, grad_out, "full")
    assert decisions()[-1].kv_heads == 2


def test_head_dims():
    """Of query and value apart, and past those of one pass."""
    for head_dim, value_dim in ((24, 16), (160, 160)):
        *inputs, grad_out = qkv(1, 2, 40, 40, head_dim, value_dim=value_dim)
        with emulation.emulate():
            actual = trained(compiled(attend()), inputs, grad_out)
        assert decisions()[-1].rewritten
        assert_close(actual, expected(inputs, grad_out))


@pytest.mark.parametrize(
    ("generator", "name"),
    [
        (EFFICIENT, "full"),
        (FLASH, "mask"),
        pytest.param(EFFICIENT, "mask", marks=pytest.mark.nightly),
        pytest.param(FLASH, "full", marks=pytest.mark.nightly),
    ],
    indirect=["generator"],
)
def test_the_same_bits_in_every_interleaving(name, generator):
    """Of sums that depend on their order."""
    sizes, options, *_ = ATTENTIONS[name]
    query, key, value, grad_out = qkv(*sizes)
    key[..., ::3, :] *= 1e4
    function, found = compiled(attend(**options)), []
    # All CTAs of a grouped launch are resident.
    for seed, resident in [*INTERLEAVINGS, (3, None), (4, 3)] if name == "mask" else [(seed, None) for seed in range(5)]:
        with emulation.emulate(seed, resident=resident):
            found.append(trained(function, [query, key, value], grad_out))
    assert rewritten() == 1 and all(torch.equal(a, b) for other in found for a, b in zip(found[0], other, strict=True))


def test_the_seed_decides():
    """One graph: seed and offset are tensors that it is given anew."""
    *inputs, grad_out = qkv(*SIZES)
    with emulation.emulate():
        function = compiled(attend())
        found = {seed: [trained(function, inputs, grad_out, seed) for _ in range(2)] for seed in (1, 2)}
    assert (counters["stats"]["unique_graphs"], rewritten()) == (1, 1)
    for seed, (first, second) in found.items():
        assert all(map(torch.equal, first, second))
        assert_close(first, expected(inputs, grad_out, seed=seed))
    assert not any(map(torch.equal, found[1][0], found[2][0]))


def test_eager_and_compiled_drop_the_same():
    *inputs, grad_out = qkv(*SIZES)
    with emulation.emulate():
        eager, ours = (trained(function, inputs, grad_out) for function in (attend(), compiled(attend())))
    assert_close(ours, [x.double() for x in eager])


@pytest.mark.parametrize("by", ["compiled", "eager"])
def test_checkpointing(by):
    """What is computed again drops the same: torch restores its generator, by which the forward draws."""
    *inputs, grad_out = qkv(*SIZES)

    def function(*tensors: Tensor) -> Tensor:
        return checkpoint(lambda *x: attend()(*x).sin(), *tensors, use_reentrant=False)

    with emulation.emulate():
        plain = trained(compiled(lambda *x: attend()(*x).sin()), inputs, grad_out)
        again = trained(compiled(function) if by == "compiled" else function, inputs, grad_out)
    assert rewritten() == (2 if by == "compiled" else 1)
    assert_close(again, [x.double() for x in plain])


def test_dynamic_lengths():
    with emulation.emulate():
        function = compiled(attend(is_causal=True), dynamic=True)
        for length in (40, 33, 70):
            *inputs, grad_out = qkv(1, 2, length, length, 16)
            seen = torch.ones(length, length, dtype=torch.bool).tril()
            assert_close(trained(function, inputs, grad_out), expected(inputs, grad_out, seen=seen))
    assert (counters["stats"]["unique_graphs"], rewritten()) == (1, 1)


def by_ops(p: float) -> Callable[..., tuple[Tensor, ...]]:
    """The backward op itself, which is told what the forward drew."""
    aten = torch.ops.aten

    def backward(query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, seed: Tensor, offset: Tensor) -> tuple[Tensor, ...]:
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(query, key, value, None, True, p)
        saved, wanted = (None, out, lse, seed, offset, p), [True, True, True, False]
        return aten._scaled_dot_product_efficient_attention_backward(grad_out, query, key, value, *saved, wanted)[:3]

    return backward


@pytest.mark.parametrize(("seed", "offset"), [(0, 0), (-1, -1), (1, 2**32 - 3), (2**62, GARBAGE)])
def test_an_offset_that_lies(seed, offset):
    """Of another forward, or of none: what the stock op makes of it, which reads both as unsigned."""
    inputs = [*qkv(*SIZES), torch.tensor(seed), torch.tensor(offset)]
    with emulation.emulate():
        torch.manual_seed(SEED)
        stock = by_ops(P)(*inputs)
        torch.manual_seed(SEED)
        actual = compiled(by_ops(P))(*inputs)
    assert rewritten() == 1
    assert_close(actual, [x.double() for x in stock])


NOT_BETWEEN = "dropout_p=1.0 is not between 0 and 1"


def test_a_dropout_of_everything():
    """Stays with the stock op: of the GPU's own, where infinity times zero is no number, or of what SDPA makes of it on the CPU."""
    inputs = [*qkv(*SIZES), torch.tensor(0), torch.tensor(0)]
    with emulation.emulate():
        actual, stock = compiled(by_ops(1.0))(*inputs), by_ops(1.0)(*inputs)
        assert (decisions()[-1].reason or "").startswith(NOT_BETWEEN)
        whole = [trained(function, inputs[:3], inputs[3]) for function in (attend(1.0), compiled(attend(1.0)))]
    assert rewritten() == 0
    assert all(x.isnan().all() for x in (*actual, *stock))
    assert not any(x.any() for x in (*whole[0], *whole[1]))


@pytest.mark.parametrize("p", [-0.1, 1.5])
def test_a_probability_that_is_none(p):
    """The error of stock."""
    *inputs, grad_out = qkv(*SIZES)
    with pytest.raises(RuntimeError) as stock:
        trained(attend(p), inputs, grad_out)
    with emulation.emulate(), pytest.raises(RuntimeError) as raised:
        trained(attend(p), inputs, grad_out)
    assert str(raised.value) == str(stock.value)


MUTANTS = {
    "offset": {ADDED: ADDED.replace("offset", "offset + 1")},
    "seed": {"seed = tl.load(RANDOM).to": "seed = tl.load(RANDOM + 1).to"},
    "rounds": {"none, none, *key, {{ROUNDS}}": "none, none, *key, {{ROUNDS - 1}}"},
    "threshold": {">= {{THRESHOLD}}": ">= {{THRESHOLD + 2**28}}"},
    "dropped": {"tl.where({{kept}}, {{dp}}*DROP_SCALE, 0.0)": "{{dp}}*DROP_SCALE"},
    "value": {"tl.where(kept, p_t*DROP_SCALE, 0.0)": "p_t"},
    "scale": {"tl.where({{kept}}, {{dp}}*DROP_SCALE, 0.0)": "tl.where({{kept}}, {{dp}}, 0.0)"},
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_kernel_that_drops_something_else_is_seen(name, monkeypatch):
    mutate(monkeypatch, "ONE_PASS", f"drops_{name}", MUTANTS[name])
    *inputs, grad_out = qkv(*SIZES)
    with enabled(template="one_pass"), emulation.emulate():
        actual = trained(compiled(attend()), inputs, grad_out)
    assert rewritten() == 1
    with pytest.raises(AssertionError, match="gradient"):
        assert_close(actual, expected(inputs, grad_out))


# The probe


def off_by_one(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, p: float, is_causal: bool) -> tuple[Tensor, ...]:
    out, lse, seed, offset = drops._efficient(query, key, value, bias, p, is_causal)
    return out, lse, seed, offset + 1


@pytest.fixture
def off(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Makes the op another than it was when it was last asked."""

    def make() -> None:
        monkeypatch.setitem(drops.FORWARDS, EFFICIENT, off_by_one)
        drops._asked_once.cache_clear()

    yield make
    drops._asked_once.cache_clear()


DIFFERS = "elements are dropped where ours are not, or kept, as [0, 0, 0, "


def test_a_forward_that_drops_something_else_is_declined(off):
    off()
    *inputs, grad_out = qkv(*SIZES)
    with emulation.emulate():
        actual = trained(compiled(attend()), inputs, grad_out)
    reason = decisions()[-1].reason or ""
    assert rewritten() == 0 and reason.startswith(f"dropout_p={P}: ") and DIFFERS in reason
    assert reason.endswith("(seen of the efficient forward in float32 on cpu)")
    assert_close(actual, expected(inputs, grad_out))


def test_code_of_a_cache_is_refused_where_the_forward_drops_something_else(as_installed, off):
    *inputs, grad_out = qkv(*SIZES)

    def warm() -> tuple[Tensor, ...]:
        PyCodeCache.cache_clear()
        dash_inductor.clear_decisions()
        return trained(compiled(attend()), inputs, grad_out)

    with (
        dash_inductor.enabled(),
        torch._inductor.config.patch(fx_graph_cache=True),
        functorch_config.patch(enable_autograd_cache=True),
    ):
        warm()
        warm()
        assert counters["aot_autograd"]["autograd_cache_hit"] == 1 and decisions()[0].rewritten
        off()
        actual = warm()
    assert [DIFFERS in (entry.reason or "") for entry in decisions()] == [True]
    assert_close(actual, expected(inputs, grad_out))


def test_nothing_is_asked_of_a_generator_of_the_users():
    torch.manual_seed(SEED)
    before = torch.get_rng_state()
    with emulation.emulate():
        drops._asked_once.cache_clear()
        assert drops._asked(EFFICIENT, P, (True, False), "float32", (16, 16), "cpu") is None
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("template", "mask"),
    [
        ("one_pass", "causal"),
        ("one_pass", "block_mask"),
        ("two_pass", "full"),
        *(
            pytest.param(*each, marks=pytest.mark.nightly)
            for each in [("one_pass", "full"), ("two_pass", "causal"), ("two_pass", "block_mask")]
        ),
    ],
)
def test_trials(template, mask):
    launch = "plain" if template == "two_pass" else "chained" if mask == "block_mask" else "grouped"
    kind = Kind(
        template, "triton", launch, "emulated", "fp32", 16, 16, mask, 16, 32, 32 * (mask == "block_mask") or None, False, EFFICIENT
    )
    settings = dash_inductor.config.Config(template=template, guard="off", on_unsupported="error", emulate=True)
    with emulation.emulate():
        verdict = trial.tried(kind, "cpu", settings)
    assert verdict.fit and verdict.said.startswith("dq is ") and ", efficient dropout, " in str(kind)


def test_a_trial_in_sets():
    """Query heads share keys there, which the memory-efficient op has for each of them."""
    kind = Kind("one_pass", "triton", "chained", "emulated", "fp32", 16, 16, "block_mask", 16, 32, 32, dropout=EFFICIENT, sets=True)
    settings = dash_inductor.config.Config(template="one_pass", guard="off", on_unsupported="error", emulate=True)
    with emulation.emulate():
        verdict = trial.tried(kind, "cpu", settings)
    assert verdict.fit and verdict.said.startswith("dq is ")


def test_a_trial_sees_what_is_wrong(monkeypatch):
    mutate(monkeypatch, "ONE_PASS", "tried_drops", MUTANTS["offset"])
    kind = Kind("one_pass", "triton", "grouped", "emulated", "fp32", 16, 16, "full", 16, 32, dropout=EFFICIENT)
    settings = dash_inductor.config.Config(template="one_pass", guard="off", on_unsupported="error", emulate=True)
    with emulation.emulate():
        verdict = trial.tried(kind, "cpu", settings)
    assert verdict.fit is False and " off, of at most " in verdict.said
