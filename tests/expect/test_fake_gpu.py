"""Code and cubins for GPUs that are not there, and a process that is the same afterwards."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch._dynamo.device_interface as device_interface
import torch._inductor.config as inductor_config
import triton
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.hints import DeviceProperties

from benchmarks.machine_code.generate import compile_kernel, generate
from dash_inductor.codegen.fake_gpu import fake_gpu
from dash_inductor.devices import DEVICES, key_for

aten = torch.ops.aten
TARGETS = {"h100": "sm_90a", "h200": "sm_90a", "a100": "sm_80", "b200": "sm_100a"}
TARGETS |= {"rtx4090": "sm_89", "l40s": "sm_89", "rtx5090": "sm_120a"}


def pointwise(x, y):
    return (aten.mul.Tensor(aten.relu.default(aten.add.Tensor(x, y)), 2),)


def attention(query, key, value, grad_out):
    """A causal attention, forward and backward, with what comes before and after it in a model."""
    query = query * 2
    inputs = (query, key, value)
    out, *saved, seed, offset, _ = aten._scaled_dot_product_flash_attention(*inputs, 0.0, True)
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(grad_out, *inputs, out, *saved, 0.0, True, seed, offset)
    return out, dq * 2, dk, dv


def pair():
    return [torch.empty(64, 64, device="cuda") for _ in range(2)]


def grouped_heads(length: int = 1024):
    sizes = [(2, length, heads, 64) for heads in (8, 2, 2, 8)]
    return [torch.empty(size, dtype=torch.bfloat16, device="cuda").transpose(1, 2) for size in sizes]


def settings() -> dict[str, object]:
    """What `fake_gpu` and `generate` touch and must put back."""
    names = ("is_available", "current_device", "device_count", "get_device_capability", "get_device_properties", "get_device_name")
    config = {name: getattr(inductor_config, name) for name in ("fx_graph_cache", "compile_threads", "deterministic")}
    return {
        "interfaces": dict(device_interface.device_interfaces),
        "interface": [dict(vars(each)) for each in (device_interface.CudaInterface, device_interface.CudaInterface.Worker)],
        "worker properties": dict(device_interface.caching_worker_device_properties),
        "torch.cuda": {name: getattr(torch.cuda, name) for name in names},
        "driver": (triton.runtime.driver._active, vars(type(triton.runtime.driver))["active"]),
        "set_driver_to_gpu": triton_helpers.set_driver_to_gpu,
        "compile_to_module": GraphLowering.compile_to_module,
        "inductor config": config,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def sms_by_inductor() -> int | str:
    from torch._inductor.utils import get_max_num_sms

    try:
        return get_max_num_sms()
    except Exception as error:
        return type(error).__name__


@pytest.mark.parametrize("key", DEVICES)
def test_pointwise(key):
    generated = generate(pointwise, pair, key)
    ((name, source),) = generated.kernels.items()
    properties = f"multi_processor_count={DEVICES[key].sms}, cc={DEVICES[key].arch}"
    assert properties in source
    (launch,) = generated.launches[name]
    assert launch.startswith(f"{name}.run(")
    assert generated.main_kernel is None
    assert generated.graph.splitlines()[-2:] == ["mul: float32[64, 64] = aten.mul.Tensor(relu, 2)", "return [mul]"]

    compiled = compile_kernel(source, key)
    (target,) = [line for line in compiled.ptx.splitlines() if line.startswith(".target")]
    assert target == f".target {TARGETS[key]}"
    assert compiled.cubin.startswith(b"\x7fELF")
    assert compiled.metadata.shared == 0


def test_generation_is_a_function_of_the_device():
    """No cache carries an answer from one GPU to another, or from one graph to the next."""
    first = {key: generate(attention, grouped_heads, key).source for key in DEVICES}
    generate(pointwise, pair, "a100")
    again = {key: generate(attention, grouped_heads, key).source for key in reversed(DEVICES)}
    assert first == again
    assert len(set(first.values())) == len({(known.sms, known.arch) for known in DEVICES.values()})


def test_no_trace_is_left():
    x = torch.randn(8, 8)
    torch.compile(torch.mm)(x, x)  # all of Inductor, but no C++ compiler
    before, sms = settings(), sms_by_inductor()
    for key in ("h100", "b200"):
        with fake_gpu(key) as gpu:
            assert sms_by_inductor() == gpu.sms
            assert torch.cuda.get_device_name() == gpu.name
            assert torch.cuda.get_device_capability() == divmod(gpu.arch, 10)
        generate(pointwise, pair, key)
        assert (settings(), sms_by_inductor()) == (before, sms)
    assert DeviceProperties.create.cache_info().currsize == 0
    torch.compiler.reset()
    assert torch.equal(torch.compile(torch.mm)(x, x), x @ x)


def test_nothing_is_left_after_an_error():
    def broken(x, y):
        raise ZeroDivisionError

    before = settings()
    with pytest.raises(ZeroDivisionError):
        generate(broken, pair, "h100")
    assert settings() == before


def test_fake_gpus_nest():
    with fake_gpu("h100"):
        with fake_gpu("a100"):
            assert sms_by_inductor() == 108
        assert sms_by_inductor() == 132


def test_refused_under_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is set"), fake_gpu("h100"):
        pass


@pytest.mark.parametrize(
    ("name", "arch", "key"),
    [
        *((known.name, known.arch, known.key) for known in DEVICES.values()),
        ("NVIDIA H100 PCIe", 90, "h100"),
        ("NVIDIA A100-SXM4-40GB", 80, "a100"),
        ("NVIDIA H100 80GB HBM3", 80, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 90, None),
        ("NVIDIA H20", 90, None),
        ("NVIDIA GH200 480GB", 90, None),
        ("NVIDIA A10", 86, None),
        ("NVIDIA GeForce RTX 5090 D", 120, "rtx5090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 89, None),
        ("NVIDIA RTX 4000 Ada Generation", 89, None),
        ("Quadro RTX 8000", 75, None),
    ],
)
def test_key_for(name, arch, key):
    assert key_for(name, arch) == key


SIZES = ["--q-len", "256", "--kv-len", "256", "--batch", "1", "--heads", "4", "--head-dim", "64"]


@pytest.mark.nightly  # of a command of benchmarks
def test_codegen_from_an_emulating_process():
    """A child without the interpreter does the work, and its answer and exit code are passed on."""

    def run(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "benchmarks.machine_code", "codegen", "--device", "h100", *SIZES, *arguments]
        environment = {**os.environ, "TRITON_INTERPRET": "1", "DASH_INDUCTOR_EMULATE": "1"}
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    result = run("--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["hgmma"] > 0
    assert "tl.dot(" in report["source"]
    assert run("--batch", "0").returncode == 2
