"""Attention that trains outside of compiled graphs: recorded, warned of or refused, once for each place, and else as it was."""

from __future__ import annotations

import gc
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import script
from tensors import qkv
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

import dash_inductor
from dash_inductor import decisions
from dash_inductor.hooks import install
from dash_inductor.hooks.table import LIMIT as LIMIT_HOOKS
from dash_inductor.hooks.table import OUTSIDE
from dash_inductor.rewrite.declined import UnsupportedAttentionError

OUTSIDE_OF_GRAPHS = "runs outside of the graphs that Inductor compiles"
(LIMIT,) = LIMIT_HOOKS
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@pytest.fixture(autouse=True)
def on(as_installed: None) -> Iterator[None]:
    """The pass is on, and tells."""
    with dash_inductor.enabled(on_unsupported="warn"):
        yield


def leaves() -> list[Tensor]:
    query, key, value, _ = qkv(1, 2, 32, 32, 16)
    return [x.detach().requires_grad_() for x in (query, key, value)]


def train(function: Callable[..., Tensor], inputs: list[Tensor] | None = None) -> list[Tensor | None]:
    inputs = leaves() if inputs is None else inputs
    function(*inputs).sum().backward()
    return [x.grad for x in inputs]


def told(function: Callable[..., Any]) -> list[str]:
    """Warnings of ours while it runs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(each.message) for each in caught if "dash_inductor" in str(each.message)]


class Recomputed(torch.autograd.Function):
    """Attends once more in its backward, which Dynamo does not trace."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return F.scaled_dot_product_attention(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            out = F.scaled_dot_product_attention(*inputs)
        return torch.autograd.grad(out, inputs, grad)


@torch._dynamo.disable
def disabled(*inputs: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*inputs)


def differing_dims(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value[..., :8])


def packed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    lengths = torch.tensor([0, 12, 32], dtype=torch.int32)
    return varlen_attn(*(x[0].transpose(0, 1) for x in (query, key, value)), lengths, lengths, 20, 20)


def checkpointed(*inputs: Tensor) -> Tensor:
    return checkpoint(disabled, *inputs, use_reentrant=False)


WAYS = {
    disabled: FLASH,
    Recomputed.apply: FLASH,
    checkpointed: FLASH,
    differing_dims: torch.ops.aten._scaled_dot_product_efficient_attention.default,
    packed: torch.ops.torch_attn._varlen_attn.default,
    flex_attention: "flex_attention",
}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: getattr(way, "__name__", str(way)))
def test_each_way_is_told_once(way):
    compiled = torch.compile(lambda *inputs: way(*inputs)) if way in (disabled, Recomputed.apply, checkpointed) else way
    (message, *others) = told(lambda: [train(compiled) for _ in range(3)])
    assert not [other for other in others if OUTSIDE_OF_GRAPHS in other]
    decision = decisions()[-1]
    assert (decision.op, decision.rewritten, decision.batch) == (str(WAYS[way]), False, 1)
    assert OUTSIDE_OF_GRAPHS in message and decision.reason in message and decision.remedy in message
    assert (decision.head_dim, decision.mask) == (
        ("16/8", "full") if way is differing_dims else (16, {packed: "varlen", flex_attention: "block_mask"}.get(way, "full"))
    )
    assert decision.source in message and decision.source.rpartition(":")[0] == __file__


def test_the_line_is_the_users():
    told(lambda: train(torch.compile(Recomputed.apply)))
    lines, first = inspect.getsourcelines(Recomputed.backward)
    line = first + next(number for number, text in enumerate(lines) if "scaled_dot_product" in text)
    assert [decision.source for decision in decisions() if not decision.rewritten] == [f"{__file__}:{line}"]
    dash_inductor.clear_decisions()
    assert len(told(lambda: train(torch.compile(Recomputed.apply)))) == 1  # once more


@pytest.mark.parametrize("way", WAYS, ids=lambda way: getattr(way, "__name__", str(way)))
def test_error_raises(way):
    dash_inductor.configure(on_unsupported="error")
    for _ in range(2):
        with pytest.raises(UnsupportedAttentionError, match=OUTSIDE_OF_GRAPHS):
            train(way)
    gc.collect()  # torch 2.11 keeps the hooks of a checkpoint whose forward raised for as long as its frames
    dash_inductor.configure(on_unsupported="fallback")
    train(way)


def test_what_is_in_a_graph_is_not_told():
    torch._dynamo.reset()
    counters.clear()
    for function in (F.scaled_dot_product_attention, differing_dims, torch.compile(F.scaled_dot_product_attention)):
        assert told(lambda function=function: train(torch.compile(function, fullgraph=True))) == []
    stock = told(lambda: train(torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5))))
    assert not [message for message in stock if OUTSIDE_OF_GRAPHS in message]
    assert {decision.rewritten for decision in decisions() if "flash" in decision.op} == {True}


def test_what_trains_nothing_is_not_told():
    def without_gradients() -> None:
        with torch.no_grad():
            disabled(*leaves())
        disabled(*(x.detach() for x in leaves()))

    def without_determinism() -> None:
        torch.use_deterministic_algorithms(False)
        train(disabled)
        torch.use_deterministic_algorithms(True)

    assert told(without_gradients) == told(without_determinism) == [] == decisions()


def test_eager_training_with_dash_is_not_told():
    activate_flash_attention_impl("DASH")
    try:
        assert told(lambda: train(disabled)) == []
        assert len(told(lambda: train(differing_dims))) == 1  # it has no kernel for this op
    finally:
        restore_flash_attention_impl()


def hooked() -> set[str]:
    """Places of torch that differ from those that are there where nobody is told."""
    kernels = {hook.name for hook in OUTSIDE[:-1] for key in KEYS if STOCK[hook.name, key] != kernel_of(hook, key)}
    return kernels | ({OUTSIDE[-1].name} if hasattr(OUTSIDE[-1].found_owner().apply, "dash_inductor") else set())


KEYS = ("AutogradCPU", "AutogradCUDA")


def kernel_of(hook: Any, key: str) -> bool:
    """Whether the op has a kernel at the key that is not the alias Autograd's."""
    op = getattr(hook.found_owner(), hook.name).default
    return any(line.startswith(f"{key}:") for line in torch._C._dispatch_dump(op.name()).splitlines())


STOCK = {(hook.name, key): kernel_of(hook, key) for hook in OUTSIDE[:-1] for key in KEYS}


def test_it_costs_nothing_under_fallback():
    everything = {hook.name for hook in OUTSIDE}
    assert hooked() == everything
    dash_inductor.configure(on_unsupported="fallback")
    assert hooked() == set()
    for action in ("error", "warn"):
        dash_inductor.configure(on_unsupported=action)
        assert hooked() == everything
    dash_inductor.disable()
    assert hooked() == set()


def test_a_graph_that_is_traced_later_trains():
    """Tracing remembers no kernel that is gone, which would have no gradient."""
    for action in ("warn", "fallback"):
        dash_inductor.configure(on_unsupported=action)
        torch._dynamo.reset()
        assert all(grad is not None for grad in train(torch.compile(F.scaled_dot_product_attention, fullgraph=True)))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: getattr(way, "__name__", str(way)))
def test_gradients_are_those_without(way):
    with_it = train(way)
    dash_inductor.configure(on_unsupported="fallback")
    for a, b in zip(with_it, train(way), strict=True):
        assert torch.equal(a, b)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def masked_in_blocks(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return flex_attention(query, key, value)


LIMITS = ("recompile_limit", "accumulated_recompile_limit")


def past_the_limit(function: Callable[..., Tensor], backend: str = "inductor", limit: str = LIMITS[0]) -> list[str]:
    """What is told in training steps of four lengths, of which Dynamo compiles two, and of a length that it met before."""
    compiled = torch.compile(function, backend=backend, dynamic=False)
    with torch._dynamo.config.patch({limit: 2}):
        return told(
            lambda: [train(compiled, [x[..., :length, :].detach().requires_grad_() for x in leaves()]) for length in LENGTHS]
        )


LENGTHS = 32, 24, 16, 8, 8, 32


@pytest.mark.parametrize(
    ("action", "function", "limit"),
    [("fallback", attend, LIMITS[0]), ("fallback", masked_in_blocks, LIMITS[0]), ("warn", attend, LIMITS[1])],
)
def test_the_limit_of_recompilations_is_told_once(action, function, limit):
    """Whatever the settings. A call that nobody compiled is as silent as ever, and Dynamo may be told to forget."""
    dash_inductor.configure(on_unsupported=action)
    (message,) = past_the_limit(function, limit=limit)
    *rewritten, decision = decisions()
    assert [x.rewritten for x in rewritten] == [True, True] and not decision.rewritten
    assert all(text in message for text in ("recompile_limit", "dynamic=True", "mark_dynamic", "padded", f"{__file__}:"))
    assert (decision.q_len, decision.source.rpartition(":")[0]) == (16, __file__) and decision.reason in message
    dash_inductor.configure(on_unsupported="fallback")
    assert told(lambda: train(function)) == []
    torch._dynamo.reset()
    assert told(lambda: train(torch.compile(function))) == [] and hooked() == set()


def test_the_limit_of_recompilations_raises():
    dash_inductor.configure(on_unsupported="error")
    with pytest.raises(UnsupportedAttentionError, match="limit of recompilations"):
        past_the_limit(attend)


def test_the_limit_of_recompilations_is_told_by_the_backend_alone():
    """Where the package is off for everybody else. Afterwards torch is as it was."""
    dash_inductor.configure(on_unsupported="fallback")
    dash_inductor.disable()
    assert len(past_the_limit(attend, "dash")) == 1 and [x.rewritten for x in decisions()] == [True, True, False]
    torch._dynamo.reset()
    assert hooked() == set() and not hasattr(LIMIT.found_owner().__call__, "dash_inductor")
    install.want()


def test_what_is_disabled_in_a_skipped_frame_is_not_of_the_limit():
    messages = past_the_limit(lambda *inputs: disabled(*inputs) + attend(*inputs))
    assert sorted(OUTSIDE_OF_GRAPHS in message for message in messages) == [False, True]


UNDER_DDP = """
import os
import warnings
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import dash_inductor

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x)

frames = []
torch._dynamo.convert_frame.register_bytecode_hook(lambda code, _: frames.append(code.co_filename))
torch.use_deterministic_algorithms(True)
dash_inductor.configure(on_unsupported="warn")
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
own = Own()
for model in (
    torch.compile(DistributedDataParallel(own.layer), backend="dash"),
    torch.compile(DistributedDataParallel(own), backend="dash"),
    DistributedDataParallel(torch.compile(own.layer)),
):
    torch._dynamo.reset()
    dash_inductor.clear_decisions()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.randn(1, 16, 32)).sum().backward()
    (decision,) = dash_inductor.decisions()
    print(decision.module, decision.rewritten, sum("outside of the graphs" in str(each.message) for each in caught))
print(len([file for file in frames if f"dash_inductor{os.sep}emulation" in file]))
"""


def test_a_layer_of_torch_under_ddp(tmp_path):
    """Dynamo skips a module of torch that DDP calls: it is told. What a module of the user's calls, or is compiled, is rewritten.

    Where SDPA runs outside of a graph, kernels of the emulation are no functions of the user's, which Dynamo would compile.
    """
    lines = script(["-c", UNDER_DDP], tmp_path, seed=0).splitlines()
    assert lines == ["module.self_attn False 1", "layer.self_attn True 0", "self_attn True 0", "0"]
