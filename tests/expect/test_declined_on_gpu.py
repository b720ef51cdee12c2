"""What is declined on GPUs, none of which is there: fake CUDA tensors, and graphs of explicit forward and backward ops."""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo.device_interface as device_interface
from stock_ops import causal, cpus, cudnn, dropping, efficient, flash, jagged, tensors
from torch import Tensor, fx
from torch._inductor import config as inductor_config
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.machine_code import flex
from benchmarks.machine_code.generate import generate
from dash_inductor.cli.main import main
from dash_inductor.codegen.fake_gpu import fake_gpu
from dash_inductor.codegen.mode import deterministic
from dash_inductor.config import current
from dash_inductor.decision import Declined
from dash_inductor.devices import target as target_module
from dash_inductor.devices.cost_files import FOLDER, CostFileError
from dash_inductor.devices.target import Target, target_of
from dash_inductor.hooks import install
from dash_inductor.op import FLEX_BACKWARD, MARK, NOTE
from dash_inductor.rewrite.declined import UnsupportedAttentionError, noted
from dash_inductor.rewrite.sdpa import rewriting_of
from dash_inductor.rewrite.stock_ops import TARGETS

Attention = Callable[..., tuple[Tensor, ...]]


def declined(node: fx.Node) -> str | None:
    """The reason of the pass under the settings in force."""
    try:
        rewriting_of(node, current())
    except Declined as reason:
        assert reason.remedy
        return str(reason)
    return None


def backward_node(attention: Attention, **sizes: Any) -> fx.Node:
    with FakeTensorMode():
        module = make_fx(attention)(*tensors(**sizes))
    (node,) = (node for node in module.graph.nodes if node.target in TARGETS)
    return node


@pytest.fixture
def h100() -> Iterator[None]:
    with fake_gpu("h100"):
        yield


@contextmanager
def other_gpu(name: str, arch: int, sms: int = 72) -> Iterator[None]:
    """In an H100's place, for the pass."""
    major, minor = divmod(arch, 10)
    properties = types.SimpleNamespace(name=name, major=major, minor=minor, multi_processor_count=sms)
    worker = device_interface.get_interface_for_device("cuda").Worker
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "get_device_properties", lambda device=None: properties)
        yield


DROPOUT = "dropout_p=0.1: whether its random bits are ours is asked of the GPU before its first use, and there is none here"
OF_CUDNN = "dropout_p=0.1: its random bits have a layout that only the stock op knows"
JAGGED = "jagged tensors are not rewritten"
UNEQUAL = {"q_len": 64, "kv_len": 65}
TILES = "(there are tiles for sm_80, sm_86, sm_87, sm_89, sm_90, sm_100, sm_103, sm_120)"
TUNING = "triton.autotune_at_compile_time"
ONE_PASS, SHIFT = partial(install.enabled, template="one_pass"), partial(install.enabled, schedule="shift")
T4, RTX, SPARK = (partial(other_gpu, *gpu) for gpu in (("Tesla T4", 75), ("NVIDIA GeForce RTX 5090", 120), ("NVIDIA GB10", 121)))
FP32 = {"dtype": torch.float32}
OUTSIDE = "head dim {} is outside 1..256".format
MORE = "head dim 190 is more than the 128 of one pass, which {0}='{1}' asks for".format
LONG = 65536 * 64


def tuning(on: bool | None) -> AbstractContextManager:
    """By launches on made-up inputs, a table of zeros among them. None is off where the wrapper is Python."""
    return inductor_config.patch({TUNING: on})


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("attention", "sizes", "context", "reason"),
    [
        (flash, {}, nullcontext, None),
        (causal, {"dtype": torch.float16, "head_dim": 96}, nullcontext, None),
        (flash, {"q_len": 3, "kv_len": 200, "head_dim": 16}, nullcontext, None),
        *((attention, UNEQUAL, nullcontext, None) for attention in (efficient, cudnn)),
        *((partial(attention, is_causal=True), {}, nullcontext, None) for attention in (efficient, cudnn)),
        (efficient, FP32, nullcontext, "dtype fp32 is not one of bf16, fp16"),
        *((partial(attention, bias=True), {}, nullcontext, None) for attention in (efficient, cudnn)),
        (partial(efficient, bias=True, wanted=True), {}, nullcontext, None),
        (dropping, {}, nullcontext, DROPOUT),
        (partial(efficient, dropout_p=0.1), {}, nullcontext, DROPOUT),
        (partial(cudnn, dropout_p=0.1), {}, nullcontext, OF_CUDNN),
        *((partial(attention, is_causal=True), UNEQUAL, nullcontext, None) for attention in (efficient, cudnn)),
        (cpus, {}, nullcontext, "aten._scaled_dot_product_flash_attention_for_cpu_backward.default on device cuda"),
        (flash, {}, partial(mock.patch.object, torch.version, "hip", "6.4"), "ROCm is not supported"),
        # Sizes and dtypes
        (flash, FP32, nullcontext, "dtype fp32 is not one of bf16, fp16"),
        (flash, {"head_dim": 8}, nullcontext, None),
        (flash, {"head_dim": 264}, nullcontext, OUTSIDE(264)),
        (causal, {"q_len": 64, "kv_len": 65}, nullcontext, "causal with S_q=64 and S_k=65"),
        (
            causal,
            {"q_len": LONG, "kv_len": LONG},
            nullcontext,
            f"lengths S_q={LONG}, S_k={LONG} have too many tiles for a table entry",
        ),
        # Settings
        *((flash, {"head_dim": 128}, setting, None) for setting in (ONE_PASS, SHIFT)),
        *((flash, {"head_dim": 257}, setting, OUTSIDE(257)) for setting in (ONE_PASS, SHIFT)),
        (flash, {"head_dim": 190}, ONE_PASS, MORE("template", "one_pass")),
        (flash, {"head_dim": 190}, SHIFT, MORE("schedule", "shift")),
        *((flash, {}, partial(tuning, on), None) for on in (None, False)),
        (flash, {}, partial(tuning, True), f"torch._inductor.config.{TUNING} is on"),
        # GPUs without tiles
        (flash, {}, T4, f"no cost file for Tesla T4, and no tile for sm_75 {TILES}"),
        (flash, {}, SPARK, f"no cost file for NVIDIA GB10, and no tile for sm_121 {TILES}"),
        *((flash, {"head_dim": head_dim}, RTX, None) for head_dim in (128, 256)),
    ],
)
def test_reasons(h100, capsys, attention, sizes, context, reason):
    """`choose` says the same where it is asked for what decides."""
    with context():
        assert declined(backward_node(attention, **sizes)) == reason
    if context is nullcontext and reason and attention in (flash, causal):
        shape = {"q_len": 64, "kv_len": 64, "head_dim": 64, "dtype": "fp32" if "dtype" in sizes else "bf16"}
        shape |= {name: size for name, size in sizes.items() if name != "dtype"}
        shape |= {"mask": "causal" if attention is causal else "full", "batch": 1, "heads": 2, "device": "h100"}
        assert main(["choose", "--json", *(f"--{name.replace('_', '-')}={value}" for name, value in shape.items())]) == 1
        assert json.loads(capsys.readouterr().out)["declined"] == reason


@pytest.mark.parametrize(
    ("name", "arch", "sms", "costs"),
    [
        ("NVIDIA GH200 480GB", 90, 132, "h100"),
        ("NVIDIA H20", 90, 78, "h100"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 90, 16, "h100"),
        ("NVIDIA A10", 86, 72, "a100"),
        ("NVIDIA L4", 89, 58, "rtx4090"),
        ("NVIDIA GeForce RTX 5070", 120, 48, "rtx5090"),
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
        declined = (partial(efficient, dropout_p=0.1), partial(cudnn, dropout_p=0.1), dropping, jagged)
        return [gradient for attention in (flash, *declined) for gradient in attention(*inputs)]

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with install.enabled():
            generated = generate(all_four, tensors, "h100")
    finally:
        torch.use_deterministic_algorithms(False)
    reasons = [None, DROPOUT, OF_CUDNN, DROPOUT, JAGGED]
    assert [decision.reason for decision in generated.decisions] == reasons
    assert {decision.shape for decision in generated.decisions} == {"B=1 H=2 S=64 D=64 bf16"}
    for op in ("scaled_dot_product_flash", "scaled_dot_product_efficient", "scaled_dot_product_cudnn", "flash"):
        call = f"torch.ops.aten._{op}_attention_backward.default("
        assert (generated.source.count(call), generated.graph.count(f"aten._{op}_attention_backward.default(")) == (1, 1)
    assert generated.graph.count("dash.sdpa_backward.default(") == 1


FLEX = {"length": 4096, "batch": 2, "heads": 16, "kv_heads": 16, "head_dim": 64}
Change = Callable[..., Sequence[Tensor]]


def flex_generated(change: Change | None = None, make: Callable[..., Any] = generate, **sizes: Any) -> Any:
    """What `make`, in the place of `generate`, makes of a FlexAttention's backward, whose tensors `change` replaces."""

    def changed(backward: Attention, arguments: Callable[[], Sequence[Tensor]], device: str) -> Any:
        return make(backward, (lambda: change(*arguments())) if change else arguments, device)

    with mock.patch("benchmarks.machine_code.flex.generate", changed):
        return flex.flex_backward("h100", flex.FlexAttention(**(FLEX | sizes)))


def flex_declined(backward: Attention, arguments: Callable[[], Sequence[Tensor]], device: str) -> str | None:
    """The reason of the pass, in the joint graph, under the fake GPU in force."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        module = make_fx(backward)(*arguments())
        joint_graph_passes(module)
    (node,) = (node for node in module.graph.nodes if node.target is FLEX_BACKWARD)
    notes = [noted(note) for note in module.graph.nodes if note.target is NOTE]
    assert len(notes) == (MARK not in node.meta)
    assert all(note.remedy for note in notes)
    return notes[0].reason if notes else None


def in_fp32(*inputs: Tensor) -> Sequence[Tensor]:
    return [x.float() if x.dtype == torch.bfloat16 else x for x in inputs]


TRAINED = {"score_mod": "alibi", "trained": True}
NO_MULTIPLE = "BLOCK_SIZE ({0}, {0}) is no multiple of the tile's 64 x 128".format
FEW = (
    "few KV tiles: one pass has work for 17 CTAs, and needs work for 79 to be as fast as stock's "
    "kernel, deterministic too: 312 TFLOPS, estimated from an H200's at head dim 128; ours 511 TFLOPS, predicted by our cost file"
)
RESERVED = partial(install.enabled, sm_reserve=4)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("sizes", "context", "reason"),
    [
        ({}, nullcontext, None),
        ({"head_dim": 128, "score_mod": "alibi", "dtype": "fp16"}, nullcontext, None),
        ({"change": in_fp32}, nullcontext, "dtype fp32 is not one of bf16, fp16"),
        ({"value_dim": 32}, nullcontext, None),
        *(({name: 192}, nullcontext, None) for name in ("value_dim", "head_dim")),
        ({"head_dim": 190}, ONE_PASS, MORE("template", "one_pass")),
        ({"head_dim": 264}, nullcontext, OUTSIDE(264)),
        *(({"block": block}, nullcontext, NO_MULTIPLE(block)) for block in (64, 192)),
        ({"block": 256}, nullcontext, None),
        *(
            ({"kernel_options": {"BACKEND": name}}, nullcontext, f"BACKEND={name!r} is asked for")
            for name in ("FLASH", "TRITON_DECODE")
        ),
        ({"kernel_options": {"BACKEND": "TRITON"}}, nullcontext, None),
        (TRAINED, nullcontext, None),
        (TRAINED | {"block": 64}, nullcontext, NO_MULTIPLE(64)),
        ({"batch": 1, "heads": 1, "kv_heads": 1}, RESERVED, FEW),
        ({"batch": 1, "heads": 1, "kv_heads": 1}, nullcontext, FEW.replace("79", "81")),
        ({"batch": 1, "heads": 1, "kv_heads": 1} | TRAINED, RESERVED, None),  # stock's is not deterministic
        *(
            ({}, partial(inductor_config.patch, {name: True}), f"torch._inductor.config.{name} is on")
            for name in ("cpp_wrapper", "benchmark_fusion", TUNING)
        ),
        ({}, partial(install.enabled, template="two_pass"), None),
        ({}, partial(install.enabled, kernel="gluon"), None),
        (TRAINED, partial(install.enabled, kernel="gluon"), None),
        ({}, ONE_PASS, None),
        ({}, RTX, None),
        ({}, SPARK, f"no cost file for NVIDIA GB10, and no tile for sm_121 {TILES}"),
    ],
)
def test_reasons_of_flex(h100, sizes, context, reason):
    with context():
        assert flex_generated(make=flex_declined, **sizes) == reason


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"change": in_fp32}, "dtype fp32 is not one of bf16, fp16"),
        ({"kernel_options": {"BACKEND": "TRITON_DECODE"}}, "BACKEND='TRITON_DECODE' is asked for"),
        (TRAINED | {"kernel_options": {"BACKEND": "TRITON_DECODE"}}, "BACKEND='TRITON_DECODE' is asked for"),
        ({"batch": 1, "heads": 1, "kv_heads": 1}, FEW),
    ],
)
def test_stocks_kernel_of_flex_stays(sizes, reason):
    """And the generated code has the reason."""
    with RESERVED():
        code = flex_generated(**sizes)
    (decision,) = code.decisions
    assert (decision.op, decision.mask, decision.reason) == ("flex_attention_backward", "block_mask", reason)
    assert code.templates == {}
    (kernel,) = (source for source in code.kernels.values() if "tl.dot(" in source)
    assert kernel.count("tl.dot(") == 7


def test_a_faster_stock_is_nothing_to_warn_of(h100):
    """Nor an error, where an attention that is not supported is one."""
    with install.enabled(on_unsupported="error", sm_reserve=4):
        assert flex_generated(make=flex_declined, batch=1, heads=1, kv_heads=1) == FEW
        with pytest.raises(UnsupportedAttentionError, match="no multiple"):
            flex_generated(make=flex_declined, block=64)


def test_a_cost_file_of_another_gpu_is_an_error(tmp_path):
    """The compilation raises it: it is no reason to decline, nor a bug to report."""
    path = tmp_path / "costs.toml"
    text = (FOLDER / "h100.toml").read_text()
    path.write_text(text.replace("NVIDIA H100 80GB HBM3", "NVIDIA H200"))
    said = rf"cost file {path} is of NVIDIA H200 \(sm_90\), and this device is NVIDIA H100 80GB HBM3 \(sm_90\)"
    with install.enabled(costs=str(path)), deterministic(), pytest.raises(CostFileError, match=said):
        generate(flash, tensors, "h100")
    path = path.with_stem("mine")
    path.write_text(text)
    with install.enabled(costs=str(path)), deterministic():
        (decision,) = generate(flash, tensors, "h100").decisions
    assert decision.rewritten and decision.device == str(path)
