"""A GPU that is not there: Inductor generates code for it, and Triton compiles that code, on any Linux machine.

What Inductor and Triton ask a GPU is answered from `dash_inductor.devices`. Nothing can run: the tensors are fake.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch._dynamo.device_interface as device_interface
import torch._higher_order_ops.flex_attention
import torch._inductor.utils
import torch.utils._triton
import triton
from torch._inductor import config as inductor_config
from torch._inductor.codecache import CacheBase
from torch._inductor.ir import get_fill_order
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.select_algorithm import TritonTemplate
from triton.backends.compiler import GPUTarget

from ..devices import NamedDevice, device, target
from ..hooks.hook import around_here

_LOCK = threading.RLock()


@contextmanager
def fake_gpu(device_key: str) -> Iterator[NamedDevice]:
    """Make "cuda:0" the GPU called `device_key` for code generation and compilation, also in a CPU build of torch.

    In this thread alone, and in one thread at a time: what torch remembers about a GPU is the process's, and is forgotten before
    and after. Autograd cannot run on fake CUDA tensors in a CPU build (it aborts the process): trace explicit forward and
    backward ops.

    Raises ValueError for an unknown key, RuntimeError under Triton's interpreter, which compiles nothing.
    """
    gpu = device(device_key)
    if triton.knobs.runtime.interpret:
        raise RuntimeError(
            "fake_gpu needs Triton's compiler, and TRITON_INTERPRET is set in this process: generate code in a process without it"
        )
    properties = _properties(gpu)
    # torch.cuda.is_available keeps its answer: Inductor makes real CUDA tensors for its patterns where it is true.
    asked: dict[str, Any] = {
        "current_device": 0,
        "device_count": 1,
        "get_device_capability": gpu.capability,
        "get_device_name": gpu.name,
        "get_device_properties": properties,
    }
    interface = {
        **{name: asked[name] for name in ("current_device", "device_count", "get_device_properties")},
        "is_available": True,
        "is_bf16_supported": True,
        "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
        "get_compute_capability": gpu.arch,
    }
    flex = sys.modules["torch._higher_order_ops.flex_attention"]  # the attribute of that name is the HOP
    answers = (
        *((torch.cuda, name, answer) for name, answer in asked.items()),
        *((device_interface.CudaInterface, name, answer) for name, answer in interface.items()),
        *((device_interface.CudaInterface.Worker, name, asked[name]) for name in ("current_device", "get_device_properties")),
        (type(triton.runtime.driver), "active", _driver(gpu)),
        (triton_helpers, "set_driver_to_gpu", None),
        (target, "is_there", False),
    )
    with ExitStack() as stack:
        stack.enter_context(_LOCK)
        stack.callback(_forget_devices)
        for owner, name, answer in answers:
            stack.enter_context(around_here(owner, name, functools.partial(_answer, answer)))
        stack.enter_context(around_here(flex, "_permute_strides", _permuted))
        stack.enter_context(inductor_config.patch(joint_graph_constant_folding=False))  # it would make constants on the GPU
        _forget_devices()
        yield gpu


def _answer(answer: Any, *_: Any, **__: Any) -> Any:
    return answer


def _permuted(stock: Any, out: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """torch's own copies `out`, which a CPU build refuses for fake CUDA tensors."""
    new, step = [0] * out.dim(), 1
    for dim in get_fill_order(strides):
        new[dim], step = step, step * out.shape[dim]
    return torch.empty_strided(out.shape, new, dtype=out.dtype, device=out.device)


def _driver(gpu: NamedDevice) -> types.SimpleNamespace:
    """What Triton's compiler and Inductor ask of a Triton driver."""
    limits = {
        "max_shared_mem": gpu.limits.shared_bytes_per_block_optin,
        "max_num_regs": gpu.limits.registers_per_sm,
        "multiprocessor_count": gpu.sms,
        "warpSize": gpu.limits.warp_size,
    }
    return types.SimpleNamespace(
        utils=types.SimpleNamespace(get_device_properties=lambda device: limits),
        get_current_target=lambda: GPUTarget("cuda", gpu.arch, gpu.limits.warp_size),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        is_active=lambda: True,
    )


def _properties(gpu: NamedDevice) -> types.SimpleNamespace:
    """The device's `torch.cuda.get_device_properties`."""
    major, minor = gpu.capability
    return types.SimpleNamespace(
        name=gpu.name,
        gcnArchName=gpu.name,  # what a CPU build asks for: it takes every GPU that is not CUDA's for AMD's
        major=major,
        minor=minor,
        multi_processor_count=gpu.sms,
        total_memory=gpu.total_memory,
        L2_cache_size=gpu.l2_bytes,
        regs_per_multiprocessor=gpu.limits.registers_per_sm,
        max_threads_per_multi_processor=gpu.limits.max_threads_per_sm,
        max_threads_per_block=gpu.limits.max_threads_per_block,
        warp_size=gpu.limits.warp_size,
        shared_memory_per_block=48 << 10,  # without opting in, on every NVIDIA GPU
        shared_memory_per_block_optin=gpu.limits.shared_bytes_per_block_optin,
        shared_memory_per_multiprocessor=gpu.limits.shared_bytes_per_sm,
        is_integrated=False,
        is_multi_gpu_board=False,
    )


def _forget_devices() -> None:
    """Empty every cache in which torch keeps what a GPU answered, or what it generated for one.

    Which functions of `torch.utils._triton` and `torch._inductor.utils` ask a GPU differs between versions of torch,
    and all they keep is cheap to ask again.
    """
    cached = type(functools.cache(lambda: None))
    modules = (torch.utils._triton, torch._inductor.utils)
    functions = [function for module in modules for function in vars(module).values() if isinstance(function, cached)]
    for function in [*functions, DeviceProperties.create, CacheBase.get_system, CacheBase.get_local_cache_path]:
        function.cache_clear()
    for template in TritonTemplate.all_templates.values():
        code = getattr(template, "_generated_code_cache", None)
        if code is not None:
            code.cache_clear()
