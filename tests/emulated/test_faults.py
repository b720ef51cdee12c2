"""What goes wrong around a rewritten attention ends in its stock kernel, or in one error; never in a hang or a wrong gradient.

Threads are in test_emulation.py, a wait that is bounded on a GPU in gpu/test_wait.py.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from attention import assert_right, attention, backward, gradients, mutate
from flex import Attention
from tensors import CAUSAL, arguments, qkv
from test_masked import window
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.async_compile import AsyncCompile

import dash_inductor
from dash_inductor import decisions, emulation
from dash_inductor.emulation.deadlock import DeadlockError
from dash_inductor.emulation.session import LOCK
from dash_inductor.hooks import ranks
from dash_inductor.hooks.told import Rank
from dash_inductor.lowering import kernels
from dash_inductor.rewrite import resolved
from dash_inductor.rewrite.declined import InternalErrorWarning

attend = attention(causal=True)
*INPUTS, GRAD_OUT = qkv(1, 2, 40, 40, 16)
OP, TENSORS = backward(CAUSAL), arguments(1, 2, 40, 40)
NO_CODE = "no code for this"
LEAVES = "dash_inductor leaves attentions to their stock kernels"


@pytest.fixture(autouse=True)
def on(as_installed: None) -> Iterator[None]:
    """The pass is on, and backwards are compiled with their forwards; caches are empty, and used."""
    with dash_inductor.enabled():
        yield


def compiled(function: Callable[..., Any] = attend) -> Callable[..., Any]:
    """`function` compiled afresh, by the caches if they know it."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, dynamic=False)


def broken_lowering(patch: pytest.MonkeyPatch) -> None:
    """The main kernel cannot be generated."""

    def generate(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(NO_CODE)

    patch.setattr(kernels.ONE_PASS, "generate", generate)
    patch.setattr(kernels.BLOCK_MASK_ONE_PASS, "generate", generate)


def broken_compiler(patch: pytest.MonkeyPatch) -> None:
    """Triton refuses the main kernel, whose code has been generated."""
    stock = AsyncCompile.triton

    def triton(self: Any, name: str, source: str, *args: Any, **kwargs: Any) -> Any:
        if "dash_inductor template: " in source:
            raise RuntimeError(NO_CODE)
        return stock(self, name, source, *args, **kwargs)

    patch.setattr(AsyncCompile, "triton", triton)


def broken_pass(patch: pytest.MonkeyPatch) -> None:
    """The pass itself fails, with what is no reason to decline."""

    def resolve(*args: Any) -> Any:
        raise RuntimeError(NO_CODE)

    patch.setattr(resolved, "resolve", resolve)


NIGHTLY = pytest.mark.nightly
FAULTS = pytest.mark.parametrize("fault", [broken_compiler, pytest.param(broken_lowering, marks=NIGHTLY)])
WINDOW = Attention(mask=lambda b, h, m, n: (m >= n) & (m - n < 40), q_len=80)


def two_layers(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attend(attend(query.sin(), key, value), key, value)


@pytest.mark.parametrize("fault", [broken_compiler, broken_pass, pytest.param(broken_lowering, marks=NIGHTLY)])
def test_a_graph_that_does_not_compile_keeps_its_stock_kernels(fault, monkeypatch):
    """All of them, with one warning. What is compiled afterwards, when nothing fails, is rewritten: no cache has the fallback."""
    with monkeypatch.context() as patch, pytest.warns(InternalErrorWarning, match=LEAVES) as said:
        fault(patch)
        actual = gradients(compiled(two_layers), INPUTS, GRAD_OUT)
    (message,) = [str(x.message) for x in said if "dash_inductor leaves" in str(x.message)]
    assert [d.rewritten for d in decisions()] == [False, False] and not emulation.launches()
    assert message == f"{LEAVES}: {decisions()[-1].reason}. Remedy: {decisions()[-1].remedy}" and NO_CODE in message
    assert (decisions()[-1].remedy or "").startswith("report it to dash_inductor")
    assert_right(actual, two_layers, INPUTS, GRAD_OUT)
    gradients(compiled(two_layers), INPUTS, GRAD_OUT)
    assert [d.rewritten for d in decisions()[2:]] == [True, True] and len(emulation.launches()) == 2


@NIGHTLY
def test_flex_attention_that_does_not_compile(monkeypatch):
    *inputs, grad_out = WINDOW.tensors()
    dash_inductor.configure(guarantee="device")
    with monkeypatch.context() as patch, pytest.warns(InternalErrorWarning, match=LEAVES):
        broken_compiler(patch)
        actual = gradients(compiled(WINDOW.function()), inputs, grad_out)
    assert [d.rewritten for d in decisions()] == [False]
    torch.testing.assert_close([x.double() for x in actual], list(WINDOW.reference([*inputs, grad_out])), rtol=0, atol=1e-5)
    dash_inductor.configure(guarantee="run")


@FAULTS
def test_an_error_if_so_asked(fault, monkeypatch):
    dash_inductor.configure(on_unsupported="error")
    fault(monkeypatch)
    with pytest.raises(BackendCompilerFailed, match=NO_CODE):
        gradients(compiled(), INPUTS)
    dash_inductor.configure(on_unsupported="fallback")
    assert not decisions()


def test_ranks_that_differ_are_an_error_and_no_failure(monkeypatch):
    """It ends the compilation: with stock kernels nobody would know of it."""
    dash_inductor.configure(guarantee="device")
    store = dist.HashStore()
    first, second = Rank(store, 0, 2), Rank(store, 1, 2)
    first.tell_facts(ranks.facts(torch.device("cpu")) | {"torch": "2.0"})
    monkeypatch.setattr(ranks, "this_rank", lambda: second)
    with pytest.raises(BackendCompilerFailed, match=r"torch is 2\.0 on rank 0 and .* on rank 1") as caught:
        gradients(compiled(), INPUTS)
    assert isinstance(caught.value.inner_exception, ranks.RanksDifferError) and not decisions()
    dash_inductor.configure(guarantee="run")


def late_gradients(function: Callable[..., Any], inputs: list[Tensor], grad_out: Tensor) -> tuple[Tensor, ...]:
    """As plain torch.compile has them: a backward is compiled when it first runs."""
    with functorch_config.patch(force_non_lazy_backward_lowering=False):
        return gradients(compiled(function), inputs, grad_out)


GROUPED = qkv(1, 4, 40, 30, 16, kv_heads=2)


@FAULTS
@pytest.mark.parametrize(
    ("function", "tensors"),
    [
        (two_layers, [*INPUTS, GRAD_OUT]),
        pytest.param(attention(gqa=True), GROUPED, marks=NIGHTLY),
        pytest.param(WINDOW.function(), WINDOW.tensors(), marks=NIGHTLY),
    ],
    ids=["two layers", "GQA", "FlexAttention"],
)
def test_a_backward_that_is_compiled_late(fault, function, tensors, monkeypatch):
    """Its forward has run. It takes the stock kernels, with one warning; no cache has that."""
    *inputs, grad_out = tensors
    dash_inductor.configure(guarantee="device")
    with monkeypatch.context() as patch, pytest.warns(InternalErrorWarning, match=LEAVES) as said:
        fault(patch)
        actual = late_gradients(function, inputs, grad_out)
    assert len([x for x in said if "dash_inductor leaves" in str(x.message)]) == 1
    failed = decisions()
    assert failed and all(NO_CODE in (d.reason or "") and d.source and d.graph.is_backward for d in failed)
    again = late_gradients(function, inputs, grad_out)
    assert [d.rewritten for d in decisions()[len(failed) :]] == [True] * len(failed)
    for x, y in zip(actual, again, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-5)
    dash_inductor.configure(guarantee="run")


@NIGHTLY
@pytest.mark.parametrize("asked", ["error", "fallback"])
def test_a_late_backward_that_cannot_be_stock_s(asked, monkeypatch):
    """An error is asked for, or the mask is gone, which the stock kernel would take. When nothing fails any more, it trains."""
    masked = attention(causal=True) if asked == "error" else lambda q, k, v: F.scaled_dot_product_attention(q, k, v, window(q, k))
    dash_inductor.configure(on_unsupported=asked)
    with monkeypatch.context() as patch, pytest.raises(Exception, match=NO_CODE):
        broken_compiler(patch)
        late_gradients(masked, INPUTS, GRAD_OUT)
    assert not decisions()
    late_gradients(masked, INPUTS, GRAD_OUT)
    assert [d.rewritten for d in decisions()] == [True]
    dash_inductor.configure(on_unsupported="fallback")


def test_the_failures_of_others_are_theirs(recwarn):
    """With our kernels or without them."""

    def fails(graph: Any) -> None:
        raise ZeroDivisionError("a pass of the user")

    with inductor_config.patch(post_grad_custom_pre_pass=fails), pytest.raises(BackendCompilerFailed, match="a pass of the user"):
        gradients(compiled(), INPUTS)
    assert not [x for x in recwarn if "dash_inductor" in str(x.message)]


def test_a_cta_whose_partner_never_comes_ends_in_an_error(monkeypatch):
    """Of a launch one CTA is killed before its first tile."""
    mutate(monkeypatch, "ONE_PASS", "killed", {"if j >= 0:": "if (j >= 0) & (tl.program_id(0) != 1):"})
    inputs = qkv(1, 2, 130, 130, 16)[:3]
    with pytest.raises(DeadlockError, match=r"deadlock in triton_.* of 6 programs wait"):
        gradients(compiled(), inputs)


def test_memory_that_is_not_there_is_torchs_error(monkeypatch):
    """The scratch of dq cannot be had in one step; the next one is as if nothing had been."""
    stock, full = torch._C._dynamo.guards._empty_strided_cpu, False

    def empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        if full and len(size) == 3 and dtype == torch.float32 and size[0] == 2 and size[2] > 40:
            raise torch.OutOfMemoryError("no memory")
        return stock(size, stride, dtype)

    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cpu", empty_strided)
    function = compiled()
    before = gradients(function, INPUTS, GRAD_OUT)
    full = True
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        gradients(function, INPUTS, GRAD_OUT)
    full = False
    assert all(map(torch.equal, gradients(function, INPUTS, GRAD_OUT), before))
    assert len(emulation.launches()) == 2


# After a fork.


def in_child(work: Callable[[], bool]) -> bool:
    """Whether `work` is true in a forked process, within a minute."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        status = 1
        try:
            status = 0 if work() else 2
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("busy", [pytest.param(False, marks=NIGHTLY), True], ids=["alone", "while another thread launches"])
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_after_use(busy):
    """The child runs what was compiled before, and compiles anew; with the same bits.

    Without autograd: where torch is built for a GPU, a child cannot use it if the parent did.
    """
    function = compiled(OP)
    before = function(*TENSORS)
    again = torch.compile(lambda *tensors: OP(*tensors), dynamic=False)
    launching = threading.Event()

    def launch() -> None:
        """What a launch holds as long as it runs."""
        with LOCK:
            launching.set()
            time.sleep(0.5)

    def work() -> bool:
        return all(all(map(torch.equal, f(*TENSORS), before)) for f in (function, again))

    with ThreadPoolExecutor(1) as pool:
        if busy:
            pool.submit(launch)
            launching.wait()
        assert in_child(work)
