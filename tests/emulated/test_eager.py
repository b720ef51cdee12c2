"""Eager training through torch's registry of flash attention: gradients, bits, what goes to stock, and what runs beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention import assert_right, attention, differing, gradients, rewritten
from tensors import BF16, normal, permuted, qkv
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
)
from torch.utils.checkpoint import checkpoint

import dash_inductor
from dash_inductor import decisions, emulation
from dash_inductor.cli.gpt import GPT
from dash_inductor.hooks import eager, install
from dash_inductor.rewrite.stock_ops import FLASH_CPU

pytestmark = [
    pytest.mark.usefixtures("listed"),
    pytest.mark.filterwarnings("ignore:Warning only once for all operators", "ignore:There is a performance drop"),
]


@pytest.fixture
def listed(as_installed: None) -> Iterator[None]:
    """ "DASH" is listed, not active; the pass is not in Inductor, and nothing is remembered of other tests."""
    was_enabled = install.is_enabled()
    dash_inductor.disable()
    install.offer_eager()
    eager.program_for.cache_clear()
    eager._programs.clear()
    yield
    restore_flash_attention_impl(_raise_warn=False)
    dash_inductor.disable()
    if was_enabled:
        install.want()


@contextmanager
def activated() -> Iterator[None]:
    activate_flash_attention_impl("DASH")
    assert current_flash_attention_impl() == "DASH"
    yield
    restore_flash_attention_impl()
    assert current_flash_attention_impl() is None


def launched() -> int:
    """How many launches of our kernel there were since the last call: no other kernel here has atomics."""
    count = len(emulation.launches())
    emulation.clear_launches()
    return count


def in_interleavings(function: Callable[[], Sequence[Tensor]], seeds: int) -> Sequence[Tensor]:
    """What `function` returns, to the same bits in every interleaving."""
    first: Sequence[Tensor] = ()
    for seed in range(seeds):
        with emulation.emulate(seed):
            again = function()
        first = first or again
        assert all(map(torch.equal, again, first))
    return first


causal = attention(causal=True)
PACKED = normal(1, 40, 3, 2, 16).permute(2, 0, 3, 1, 4)


@pytest.mark.parametrize(
    ("function", "inputs", "grad_out"),
    [
        (causal, qkv(1, 2, 70, 70, 16)[:3], normal(1, 2, 70, 16)),
        (attention(), qkv(2, 1, 40, 70, 16)[:3], normal(2, 1, 40, 16)),
        (attention(causal=True, gqa=True), qkv(1, 4, 50, 50, 16, kv_heads=2)[:3], normal(1, 4, 50, 16)),
        (causal, qkv(1, 2, 50, 50, 32, dtype=BF16)[:3], normal(1, 2, 50, 32, dtype=BF16)),
        (attention(scale=0.2), PACKED.unbind(), permuted([normal(1, 2, 40, 16)])[0]),
        (causal, qkv(1, 2, 50, 50, 16)[:3], None),  # that of sum(): one element in memory
    ],
    ids=["causal", "full", "GQA", "bf16", "packed", "expanded"],
)
def test_gradients_and_bits(function, inputs, grad_out):
    """As good as stock's against float64, and the same in three interleavings."""
    with activated():
        actual = in_interleavings(lambda: gradients(function, inputs, grad_out), 3)
        assert (launched(), rewritten()) == (3, 1)
    (decision,) = decisions()
    assert (decision.op, decision.rewritten, decision.q_len) == (str(FLASH_CPU), True, inputs[0].shape[2])
    assert_right(actual, function, inputs, grad_out)
    assert launched() == 0


INPUTS = qkv(1, 2, 40, 40, 16)[:3]
GRAD_OUT = normal(1, 2, 40, 16, seed=7)


def train(function: Callable[..., Tensor] = causal, inputs: Sequence[Tensor] = INPUTS) -> tuple[Tensor, ...]:
    return gradients(function, inputs, normal(*inputs[0].shape, dtype=inputs[0].dtype, seed=7))


def masked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=normal(40, 40))


WIDE, TOO_WIDE = qkv(1, 2, 40, 40, 264)[:3], "head dim 264 is outside 1..256"


@pytest.mark.parametrize(
    ("function", "inputs", "reason"),
    [
        (masked, WIDE, TOO_WIDE),
        (causal, WIDE, TOO_WIDE),
        (causal, [x.double() for x in INPUTS], "dtype torch.float64 is not one of bf16, fp16, fp32"),
    ],
)
def test_what_goes_to_stock(function, inputs, reason, caplog):
    """With stock's bits; recorded, counted and logged once, however often it comes."""
    expected = train(function, inputs)
    with activated():
        assert [differing(train(function, inputs), expected) for _ in range(2)] == [[], []]
    (decision,) = decisions()
    assert (decision.op, decision.reason) == (str(FLASH_CPU), reason)
    said = [message for message in caplog.messages if "a row of a float mask" not in message]  # once a process
    assert said == ["eager call: 0 attentions rewritten, 1 declined", str(decision)]
    assert (counters["inductor"]["dash_declined"], rewritten(), launched()) == (1, 0, 0)


def test_what_goes_to_stock_without_being_asked():
    """Outside deterministic mode, and where the package is switched off."""
    expected = train()
    with activated():
        for mode, settings in ((False, {}), (True, {"enabled": False})):
            torch.use_deterministic_algorithms(mode)
            dash_inductor.configure(**settings)
            assert differing(train(), expected) == []
        assert (launched(), decisions()) == (0, [])
        dash_inductor.configure(enabled=True)
        torch.use_deterministic_algorithms(True, warn_only=True)
        train()
        assert launched() == 1


def test_emulation_that_ends():
    expected = train()
    with activated(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulation, "ACTIVE", [])
        assert differing(train(), expected) == []
    assert decisions()[-1].reason == "the stock op is already deterministic on the CPU (emulation is off)"


def test_on_unsupported():
    """A warning once; an error each time, which comes out of autograd as it is."""
    with activated():
        dash_inductor.configure(on_unsupported="warn")
        with pytest.warns(UserWarning, match=f"to the stock kernel: {TOO_WIDE}") as caught:
            train(causal, WIDE)
            train(causal, WIDE)
        assert len([w for w in caught if TOO_WIDE in str(w.message)]) == 1
        dash_inductor.configure(on_unsupported="error")
        for _ in range(2):
            with pytest.raises(dash_inductor.UnsupportedAttentionError, match=f"to the stock kernel: {TOO_WIDE}"):
                train(causal, WIDE)


def test_restoring():
    """The dispatcher's kernel is stock's again, with its bits; activating twice, or another one, is fine."""
    expected, kernel = train(), torch._C._dispatch_dump(FLASH_CPU.name())
    assert "DASH" in list_flash_attention_impls()
    for _ in range(2):
        activate_flash_attention_impl("DASH")
        activate_flash_attention_impl("DASH")
        assert differing(train(), expected) != [] and launched() == 1
        restore_flash_attention_impl()
        assert differing(train(), expected) == [] and launched() == 0
        assert torch._C._dispatch_dump(FLASH_CPU.name()) == kernel
    override = eager.activate()
    assert override
    override.remove()  # which drops the kernel even while somebody holds on to what registered it
    assert torch._C._dispatch_dump(FLASH_CPU.name()) == kernel
    activate_flash_attention_impl("DASH")
    with pytest.raises(ValueError, match="Unknown flash attention impl"):
        activate_flash_attention_impl("none")
    assert current_flash_attention_impl() is None
    assert differing(train(), expected) == []


def test_many_lengths():
    """One program for all of them, however many variants Dynamo makes of it; each has the bits of a program of its own."""
    sizes = [(1, 40), (1, 33), (2, 33), (3, 20), (1, 1), (1, 50)]
    inputs = {size: qkv(size[0], 2, size[1], size[1], 16) for size in sizes}
    actual = {}
    with activated():
        with dynamo_config.patch(recompile_limit=1):
            for size in sizes:
                *tensors, grad_out = inputs[size]
                actual[size] = gradients(causal, tensors, grad_out)
        assert len(eager._programs) == 1
        assert (launched(), rewritten()) == (len(sizes), counters["stats"]["unique_graphs"])
        with dynamo_config.patch(error_on_recompile=True):
            for size in sizes:
                *tensors, grad_out = inputs[size]
                assert differing(gradients(causal, tensors, grad_out), actual[size]) == []
        for size in sizes[1:3]:
            torch._dynamo.reset()
            *tensors, grad_out = inputs[size]
            assert differing(gradients(causal, tensors, grad_out), actual[size]) == []
    for size in sizes:
        *tensors, grad_out = inputs[size]
        assert_right(actual[size], causal, tensors, grad_out)


def test_kinds_of_attention():
    """One after the other: none runs another's program."""
    cases = [(function, INPUTS, GRAD_OUT) for function in (causal, attention(), attention(scale=0.2))]
    cases.append((causal, [x.to(BF16) for x in INPUTS], GRAD_OUT.to(BF16)))
    with activated():
        actual = [gradients(*case) for case in cases]
        assert launched() == len(cases)
    for grads, case in zip(actual, cases, strict=True):
        assert_right(grads, *case)


def test_what_requires_gradients():
    """Is nothing to the compiled code: it is below autograd."""
    query, key, value = INPUTS
    with activated():
        expected = train()
        with dynamo_config.patch(error_on_recompile=True):
            leaf = query.clone().requires_grad_()
            grads = torch.autograd.grad(causal(leaf, key, value), leaf, GRAD_OUT, create_graph=True)
    assert torch.equal(grads[0], expected[0])


def test_settings_take_effect():
    with activated():
        for settings in ({"schedule": "ascending"}, {"schedule": "symmetric"}, {"schedule": "auto", "launch": "chained"}):
            dash_inductor.configure(**settings)
            train()
            shown = {"family" if name == "schedule" else name: value for name, value in settings.items() if value != "auto"}
            assert all(getattr(decisions()[-1], name) == value for name, value in shown.items())
        with inductor_config.patch(cpp_wrapper=True):
            train()
        assert decisions()[-1].reason == "torch._inductor.config.cpp_wrapper is on"


@contextmanager
def ops_of_joint_graphs() -> Iterator[list[str]]:
    """The ops of the graphs that are compiled inside, after all passes."""
    ops: list[str] = []
    with inductor_config.patch(joint_custom_post_pass=lambda graph: ops.extend(str(n.target) for n in graph.nodes)):
        yield ops


def between_sines(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return causal(*(x.sin() for x in (query, key, value))).sin()


@pytest.mark.parametrize("on", [True, False], ids=["with the pass", "without"])
def test_compiled_models(on):
    """The stock op stands in their graphs, for the pass to see; without the pass they call it, and rely on its strides."""
    with activated():
        if on:
            dash_inductor.enable()
        with ops_of_joint_graphs() as ops:
            actual = train(torch.compile(between_sines, fullgraph=True))
        # Without the pass the op's call compiles a program, whose graph is the other.
        assert ops.count("dash.sdpa_backward.default") == 1
        assert (ops.count(str(FLASH_CPU)), counters["stats"]["unique_graphs"]) == ((0, 1) if on else (1, 2))
        assert (launched(), rewritten(), len(decisions())) == (1, 1, 1)
        in_eager = train(between_sines)
        assert launched() == 1
    assert_right(actual, between_sines, INPUTS, GRAD_OUT)
    assert_right(in_eager, between_sines, INPUTS, GRAD_OUT)


def leaves() -> list[Tensor]:
    return [x.clone().requires_grad_() for x in INPUTS]


def retained() -> tuple[Tensor, ...]:
    inputs = leaves()
    out = causal(*inputs)
    first = torch.autograd.grad(out, inputs, GRAD_OUT, retain_graph=True)
    second = torch.autograd.grad(out, inputs, GRAD_OUT)
    assert differing(first, second) == []
    return second


def checkpointed(reentrant: bool) -> tuple[Tensor, ...]:
    inputs = leaves()
    checkpoint(causal, *inputs, use_reentrant=reentrant).backward(GRAD_OUT)
    return tuple(x.grad for x in inputs)


def by_func() -> tuple[Tensor, ...]:
    return torch.func.grad(lambda *inputs: (causal(*inputs) * GRAD_OUT).sum(), argnums=(0, 1, 2))(*INPUTS)


def by_vmap() -> tuple[Tensor, ...]:
    function = torch.func.grad(lambda q, k, v, grad_out: (causal(q, k, v) * grad_out).sum(), argnums=(0, 1, 2))
    stacked = torch.func.vmap(function)(*(torch.stack([x, x]) for x in (*INPUTS, GRAD_OUT)))
    return tuple(x[1] for x in stacked)


def batched() -> tuple[Tensor, ...]:
    inputs = leaves()
    grads = torch.autograd.grad(causal(*inputs), inputs, torch.stack([GRAD_OUT, GRAD_OUT]), is_grads_batched=True)
    return tuple(x[1] for x in grads)


def in_autocast() -> tuple[Tensor, ...]:
    inputs = leaves()
    with torch.autocast("cpu", torch.bfloat16):
        return torch.autograd.grad(causal(*inputs), inputs, GRAD_OUT.to(BF16))


def in_threads() -> tuple[Tensor, ...]:
    first = train()  # compiles: where two threads parse at once, Python 3.11 may raise "AST constructor recursion depth mismatch"
    with ThreadPoolExecutor(3) as pool:
        others = [future.result() for future in [pool.submit(train) for _ in range(3)]]
    assert [differing(grads, first) for grads in others] == [[], [], []]
    return first


def called_directly() -> tuple[Tensor, ...]:
    with torch.inference_mode():
        query, key, value, grad_out = (x.clone() for x in (*INPUTS, GRAD_OUT))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True)
        return FLASH_CPU(grad_out, query, key, value, out, lse, 0.0, True)


@pytest.mark.parametrize(
    ("way", "launches"),
    [
        (retained, 2),
        (lambda: checkpointed(False), 1),
        (lambda: checkpointed(True), 1),
        (by_func, 1),
        (by_vmap, 2),
        (batched, 2),
        (in_autocast, 1),
        (in_threads, 4),
        (called_directly, 1),
    ],
    ids=["retained", "checkpointed", "reentrant", "func", "vmap", "batched", "autocast", "threads", "direct"],
)
def test_ways_in(way, launches):
    """What stock can do, and our kernels in it."""
    expected = way()
    with activated():
        actual = way()
        assert launched() == launches
    torch.testing.assert_close(actual, expected, rtol=0, atol=0.05 if way is in_autocast else 1e-5)


def test_after_threads_dynamo_is_as_before():
    """Frames after a graph break are compiled too."""

    def in_two_graphs(x: Tensor) -> Tensor:
        x = x.cos()
        torch._dynamo.graph_break()
        return x.sin()

    with activated():
        in_threads()
    before = counters["stats"]["unique_graphs"]
    torch.compile(in_two_graphs, backend="eager")(GRAD_OUT)
    assert counters["stats"]["unique_graphs"] == before + 2


def test_second_derivatives():
    """There are none, with stock's error."""

    def second() -> None:
        inputs = leaves()
        (grad, *_) = torch.autograd.grad(causal(*inputs), inputs, GRAD_OUT, create_graph=True)
        torch.autograd.grad(grad.sum(), inputs)

    with pytest.raises(RuntimeError) as stock:
        second()
    with activated(), pytest.raises(RuntimeError) as ours:
        second()
    assert str(ours.value) == str(stock.value) and launched() == 1


def test_without_compilation():
    """No attention runs the specification, which takes minutes at real sizes: the error says what is off."""
    with activated():
        with torch.compiler.set_stance("force_eager"), pytest.raises(RuntimeError, match=r"needs torch\.compile and its passes"):
            train()
        train()
        assert launched() == 1


def test_a_gpt():
    """Two steps of training: every loss, gradient and weight is the same, whatever the interleaving; and close to stock's."""
    tokens = torch.randint(0, 256, (2, 34), generator=torch.Generator().manual_seed(1))

    def trained() -> list[Tensor]:
        torch.manual_seed(0)
        model = GPT(length=33, width=32, heads=2, layers=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        seen: list[Any] = []
        for _ in range(2):
            loss = model(tokens[:, :-1], tokens[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += [loss.detach(), *(p.grad for p in model.parameters())]
        return [*seen, *(p.detach() for p in model.parameters())]

    expected = trained()
    results, turns = [], []
    with activated():
        for seed in range(2):
            with emulation.emulate(seed):
                results.append(trained())
            turns.append([launch.schedule for launch in emulation.launches()])
            assert launched() == 2 * 2
    assert turns[0] != turns[1], "another seed, another interleaving"
    assert all(map(torch.equal, *results))
    first_step = len(list(GPT(33, 32, 2, 2).parameters())) + 1
    torch.testing.assert_close(results[0][:first_step], expected[:first_step], rtol=0, atol=1e-5)
