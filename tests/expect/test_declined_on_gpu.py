"""What is declined on GPUs, none of which is there: fake CUDA tensors, and graphs of explicit forward and backward ops."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch._dynamo.device_interface as device_interface
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from dash_inductor import install
from dash_inductor.codegen import generate
from dash_inductor.emulation.named_gpu import named_gpu
from dash_inductor.matching import declined
from dash_inductor.stock_ops import TARGETS

aten = torch.ops.aten
Attention = Callable[..., tuple[Tensor, ...]]


def by_flash(inputs: Sequence[Tensor], dropout_p: float, is_causal: bool) -> tuple[Tensor, ...]:
    query, key, value, grad_out = inputs
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal
    )
    return aten._scaled_dot_product_flash_attention_backward(
        grad_out, query, key, value, out, lse, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, seed, offset
    )


def flash(*inputs: Tensor) -> tuple[Tensor, ...]:
    return by_flash(inputs, 0.0, False)


def causal(*inputs: Tensor) -> tuple[Tensor, ...]:
    return by_flash(inputs, 0.0, True)


def dropping(*inputs: Tensor) -> tuple[Tensor, ...]:
    return by_flash(inputs, 0.1, False)


def efficient(query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
    out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(query, key, value, None, True)
    return aten._scaled_dot_product_efficient_attention_backward(
        grad_out, query, key, value, None, out, lse, seed, offset, 0.0, [True] * 3 + [False]
    )[:3]


def cudnn(query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(query, key, value, None, True)
    return aten._scaled_dot_product_cudnn_attention_backward(
        grad_out, query, key, value, out, lse, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, False
    )


def tensors(q_len: int = 64, kv_len: int = 64, head_dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.empty(1, 2, n, head_dim, dtype=dtype, device="cuda") for n in (q_len, kv_len, kv_len, q_len)]


def backward_node(attention: Attention, **sizes: Any) -> fx.Node:
    with FakeTensorMode():
        module = make_fx(attention)(*tensors(**sizes))
    (node,) = (node for node in module.graph.nodes if node.target in TARGETS)
    return node


@pytest.fixture
def h100() -> Iterator[None]:
    with named_gpu("h100"):
        yield


def test_rewritten(h100):
    assert declined(backward_node(flash)) is None
    assert declined(backward_node(causal, dtype=torch.float16, head_dim=96)) is None
    assert declined(backward_node(flash, q_len=3, kv_len=200, head_dim=16)) is None


EFFICIENT = "the memory-efficient op (masks, fp32) is not rewritten"
CUDNN = "the cuDNN op is not rewritten; torch.backends.cuda.enable_cudnn_sdp(False) makes SDPA take flash"


@pytest.mark.parametrize(
    ("attention", "sizes", "reason"),
    [
        (efficient, {}, EFFICIENT),
        (efficient, {"dtype": torch.float32}, EFFICIENT),
        (cudnn, {}, CUDNN),
        (dropping, {}, "dropout_p=0.1"),
        (flash, {"dtype": torch.float32}, "dtype fp32 is not one of bf16, fp16"),
        (flash, {"head_dim": 8}, "head dim 8 is outside 16..256"),
        (flash, {"head_dim": 264}, "head dim 264 is outside 16..256"),
        (causal, {"q_len": 64, "kv_len": 65}, "causal with S_q=64 and S_k=65"),
    ],
)
def test_reasons(h100, attention, sizes, reason):
    assert declined(backward_node(attention, **sizes)) == reason


def test_the_cpus_op_on_a_gpu(h100):
    node = backward_node(flash)
    node.target = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    node.args, node.kwargs = (*node.args[:6], 0.0, False), {}
    assert declined(node) == f"{node.target} on device cuda"


def test_rocm(h100, monkeypatch):
    node = backward_node(flash)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert declined(node) == "ROCm is not supported"


@pytest.mark.parametrize(("name", "major", "minor"), [("NVIDIA A10", 8, 6), ("Tesla T4", 7, 5), ("NVIDIA L40S", 8, 9)])
def test_other_gpus(h100, monkeypatch, name, major, minor):
    node = backward_node(flash)
    properties = types.SimpleNamespace(name=name, major=major, minor=minor, multi_processor_count=72)
    worker = device_interface.get_interface_for_device("cuda").Worker
    monkeypatch.setattr(worker, "get_device_properties", lambda device=None: properties)
    assert declined(node) == f"no tile and no cost file for {name} (sm_{major}{minor})"


def test_the_stock_ops_stay():
    """In one graph with an attention that is rewritten: what is generated and what is recorded."""

    def all_four(*inputs: Tensor) -> Sequence[Tensor]:
        return [gradient for attention in (flash, efficient, cudnn, dropping) for gradient in attention(*inputs)]

    was_enabled = install.is_enabled()
    install.install()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        generated = generate(all_four, tensors, "h100")
    finally:
        torch.use_deterministic_algorithms(False)
        if not was_enabled:
            install.uninstall()
    assert [decision.reason for decision in generated.decisions] == [None, EFFICIENT, CUDNN, "dropout_p=0.1"]
    for op in ("flash", "efficient", "cudnn"):
        call = f"torch.ops.aten._scaled_dot_product_{op}_attention_backward.default("
        assert (generated.source.count(call), generated.graph.count(f"{op}_attention_backward.default(")) == (1, 1)
    assert generated.graph.count("dash.sdpa_backward.default(") == 1
