"""A step on the GPU that is there, in three ways, one after the other: whole, and its kernels by groups."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.utils._pytree import tree_leaves

from .. import config
from ..codegen.mode import deterministic
from ..hooks.install import enabled
from ..text import in_one_line
from . import BACKWARD, FORWARD, MATMULS, OTHERS, OURS, STRICT, WAYS, Group, StepCost

WARM_UP, STEPS = 3, 5
# The group of a kernel by its name, the first that fits: those of attention as benchmarks/results/h200/kernel_times.csv has them.
OF_ATTENTION = r"attention|attncute|sdpa|flash|fmha|triton_dash|dot_do_o|convert_dq"
KERNELS = {
    BACKWARD: re.compile(
        rf"^(?=.*({OF_ATTENTION}|triton_tem))(?=.*(backwar|bwd|bprop|triton_dash|dot_do_o|convert_dq|cutlassB))", re.I
    ),
    FORWARD: re.compile(OF_ATTENTION, re.I),
    MATMULS: re.compile(r"gemm|nvjet|xmma|cutlass|cublas|triton_tem|conv|wgrad|dgrad|splitk", re.I),
}


class Timed(NamedTuple):
    """ms of a whole step, and of its kernels by name."""

    step_ms: float
    kernels: Mapping[str, float]


def measured(model: nn.Module, inputs: Any, kwargs: Any, timed: Callable[[Callable[[], None]], Timed] | None = None) -> StepCost:
    """The cost of a step of `model(*inputs, **kwargs)`, as torch.compile compiles it.

    timed: times a step; None for the GPU that is there.

    Raises:
        ValueError: there is no GPU, the model is not on it, or a step fails.
    """
    if timed is None:
        if not torch.cuda.is_available():
            raise ValueError("there is no GPU here: name one by --device, and the cost of a step is predicted for it")
        if places := {x.device.type for x in model.parameters()} - {"cuda"}:
            raise ValueError(
                f"the model is on {', '.join(sorted(places))}: put model and inputs on the GPU, or name one by --device"
            )
    found = {way: _in_way(way, model, inputs, kwargs, timed or _timed) for way in WAYS}
    groups = {way: of_groups(each.kernels) for way, each in found.items()}
    rows = [Group(name, None, None, {way: groups[way][name] for way in WAYS}) for name in (FORWARD, BACKWARD, MATMULS, OTHERS)]
    notes = [
        f"median of {STEPS} steps of forward and backward, without the optimizer; kernels by a profiler in others, by their names",
        "a step is longer than its kernels where the GPU waits for Python; without the mode Inductor may choose other kernels",
    ]
    device = "cpu" if not torch.cuda.is_available() else torch.cuda.get_device_name()
    return StepCost(device, rows, step_ms={way: each.step_ms for way, each in found.items()}, notes=notes)


def of_groups(kernels: Mapping[str, float]) -> Counter[str]:
    """ms by group, of kernels by name.

    >>> of_groups({"sdpa_backward": 2.0, "nvjet_hsh_128x256": 1.0, "triton_poi_fused_add_0": 0.5}).most_common()
    [('attention, backward', 2.0), ('matmuls', 1.0), ('other kernels', 0.5)]
    """
    found: Counter[str] = Counter()
    for name, ms in kernels.items():
        found[next((group for group, pattern in KERNELS.items() if pattern.search(name)), OTHERS)] += ms  # type: ignore[assignment]
    return found


def _in_way(way: str, model: nn.Module, inputs: Any, kwargs: Any, timed: Callable[[Callable[[], None]], Timed]) -> Timed:
    torch._dynamo.reset()
    with ExitStack() as stack:
        for context in _contexts(way):
            stack.enter_context(context)
        compiled = torch.compile(model, dynamic=False)

        def step() -> None:
            model.zero_grad(set_to_none=True)
            _loss(compiled(*inputs, **kwargs)).backward()

        try:
            return timed(step)
        except Exception as error:
            raise ValueError(f"a step of {type(model).__name__}, {way}, failed: {in_one_line(error)}") from error
        finally:
            model.zero_grad(set_to_none=True)


def _contexts(way: str) -> list[AbstractContextManager[Any]]:
    if way == OURS:
        return [deterministic(), enabled()]
    off = config.within(replace(config.current(), enabled=False))  # an installation is on by itself where the mode is deterministic
    return [deterministic(way == STRICT), off]


def _loss(output: Any) -> Tensor:
    """What `backward` is called on: the output's `loss` if it has one, else the sum of all that has a gradient."""
    if isinstance(loss := getattr(output, "loss", None), Tensor):
        return loss
    tensors = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    if not tensors:
        raise ValueError("the model returns nothing that has a gradient")
    return torch.stack([x.sum().float() for x in tensors]).sum()


def _timed(step: Callable[[], None]) -> Timed:
    """On the current GPU."""
    for _ in range(WARM_UP):
        step()
    times = []
    for _ in range(STEPS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    kernels: Counter[str] = Counter()
    for event in profile.key_averages():
        if event.device_type == DeviceType.CUDA:
            kernels[event.key] += event.self_device_time_total / 1000 / STEPS
    return Timed(statistics.median(times), kernels)
