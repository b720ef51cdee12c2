"""What is declined on GPUs, none of which is there: fake CUDA tensors, and graphs of explicit forward and backward ops."""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._dynamo.device_interface as device_interface
from torch import Tensor, fx
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from dash_inductor.commands.cli import main
from dash_inductor.config import current
from dash_inductor.devices import target as target_module
from dash_inductor.devices.target import Target, target_of
from dash_inductor.inspection.fake_gpu import fake_gpu
from dash_inductor.inspection.generate import generate
from dash_inductor.rewrite import install
from dash_inductor.rewrite.sdpa import why_declined
from dash_inductor.rewrite.stock_ops import TARGETS

aten = torch.ops.aten
Attention = Callable[..., tuple[Tensor, ...]]


def declined(node: fx.Node) -> str | None:
    """The reason of the pass under the settings in force."""
    return why_declined(node, current())


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
    with fake_gpu("h100"):
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


@pytest.mark.parametrize(
    ("attention", "sizes"),
    [
        (flash, {"dtype": torch.float32}),
        (flash, {"head_dim": 8}),
        (flash, {"head_dim": 264}),
        (causal, {"q_len": 64, "kv_len": 65}),
        (causal, {"q_len": 65536 * 64, "kv_len": 65536 * 64}),
    ],
)
def test_choose_says_the_same(h100, capsys, attention, sizes):
    reason = declined(backward_node(attention, **sizes))
    shape = {"q_len": 64, "kv_len": 64, "head_dim": 64} | sizes
    words = [f"--{name.replace('_', '-')}={size}" for name, size in shape.items() if name != "dtype"]
    dtype = "fp32" if "dtype" in sizes else "bf16"
    mask = "causal" if attention is causal else "full"
    asked = [f"--mask={mask}", "--batch=1", "--heads=2", "--device=h100", f"--dtype={dtype}", "--json"]
    assert main(["choose", *asked, *words]) == 1
    assert json.loads(capsys.readouterr().out)["declined"] == reason
    assert reason is not None


@pytest.mark.parametrize(
    ("settings", "asked"),
    [({"template": "one_pass"}, "template='one_pass'"), ({"schedule": "shift"}, "schedule='shift'")],
)
def test_a_head_dim_that_the_settings_leave_out(h100, settings, asked):
    """It says which setting, and what the attention would get without it."""
    (name,) = settings
    with install.enabled(**settings):
        assert declined(backward_node(flash, head_dim=128)) is None
        assert declined(backward_node(flash, head_dim=192)) == (
            f"head dim 192 is more than the 128 of one pass, which {asked} asks for: with {name}='auto' it takes two passes"
        )
        assert declined(backward_node(flash, head_dim=257)) == "head dim 257 is outside 16..256"


@pytest.mark.parametrize("on", [None, False, True])
def test_tuning_when_compiled(h100, on):
    """By launches on made-up inputs, a table of zeros among them. None is off where the wrapper is Python."""
    with inductor_config.patch({"triton.autotune_at_compile_time": on}):
        reason = declined(backward_node(flash))
    assert reason == ("torch._inductor.config.triton.autotune_at_compile_time is on" if on else None)


def test_the_cpus_op_on_a_gpu(h100):
    node = backward_node(flash)
    node.target = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    node.args, node.kwargs = (*node.args[:6], 0.0, False), {}
    assert declined(node) == f"{node.target} on device cuda"


def test_rocm(h100, monkeypatch):
    node = backward_node(flash)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert declined(node) == "ROCm is not supported"


@contextmanager
def other_gpu(name: str, arch: int, sms: int = 72) -> Iterator[None]:
    """Inside `h100`: another GPU in its place, for the pass."""
    major, minor = divmod(arch, 10)
    properties = types.SimpleNamespace(name=name, major=major, minor=minor, multi_processor_count=sms)
    worker = device_interface.get_interface_for_device("cuda").Worker
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "get_device_properties", lambda device=None: properties)
        yield


@pytest.mark.parametrize(("name", "arch"), [("Tesla T4", 75), ("NVIDIA GeForce RTX 5090", 120)])
def test_gpus_without_tiles(h100, name, arch):
    with other_gpu(name, arch):
        reason = declined(backward_node(flash))
    assert reason is not None and reason.startswith(
        f"no cost file for {name}, and no tile for sm_{arch} (there are tiles for sm_80, "
    )


@pytest.mark.parametrize(
    ("name", "arch", "sms", "costs"),
    [
        ("NVIDIA GH200 480GB", 90, 132, "h100"),
        ("NVIDIA H20", 90, 78, "h100"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 90, 16, "h100"),
        ("NVIDIA A10", 86, 72, "a100"),
        ("NVIDIA L40S", 89, 142, "a100"),
        ("NVIDIA B300 SXM6 AC", 103, 148, "b200"),
    ],
)
def test_gpus_without_a_cost_file(h100, caplog, name, arch, sms, costs):
    """They take that of a GPU with the same tiles and their own number of SMs; one line says so."""
    target_module._stand_in.cache_clear()
    with other_gpu(name, arch, sms), caplog.at_level("WARNING", "dash_inductor"):
        for _ in range(2):
            assert declined(backward_node(flash)) is None
            assert target_of(torch.device("cuda"), current()) == Target(costs, arch, sms)
    (line,) = caplog.messages
    assert line.startswith(f"no cost file for {name} (sm_{arch}): its schedules are chosen with the costs of {costs} and its own")


def test_a_head_dim_whose_tile_does_not_fit(h100):
    with other_gpu("NVIDIA L40S", 89):
        assert declined(backward_node(flash, head_dim=256)) == "no tile for head dim 256 fits the shared memory of sm_89"
        assert declined(backward_node(flash, head_dim=128)) is None


def test_sms_that_are_reserved(h100):
    """By the setting or torch's carve-out, whichever is more; not all of them."""
    cuda, carve_out = torch.device("cuda"), torch._C._set_sm_carveout_experimental
    assert target_of(cuda, current()).sms == 132
    try:
        with install.enabled(sm_reserve=16):
            assert target_of(cuda, current()).sms == 116
            carve_out(20)
            assert target_of(cuda, current()).sms == 112
            carve_out(4)
            assert target_of(cuda, current()).sms == 116
            carve_out(None)
        carve_out(20)
        assert target_of(cuda, current()).sms == 112
        carve_out(132)
        reason = "132 SMs are reserved (sm_reserve, torch's SM carve-out), and the device has 132"
        assert declined(backward_node(flash)) == reason
    finally:
        carve_out(None)


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
