"""The joint graphs of a model, as torch.compile would make them, without a kernel, a compiled graph or memory for a tensor.

Dynamo runs on a copy of the model whose tensors are fake. Each graph that it finds goes through Inductor's front end up to the
joint-graph passes, and ends there.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd import graph_compile
from torch._inductor import compile_fx
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.overrides import TorchFunctionMode

PASSES = "_recursive_joint_graph_passes"
NESTED_PASSES = "run_joint_graph_passes_on_hops"
_TORCH = str(Path(torch.__file__).parent)


def joint_graphs(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device | None = None
) -> list[fx.GraphModule]:
    """The joint graphs of a call of the model, in the order of their calls; of one without a gradient, its forward.

    Leaves traces in torch, which `leaving_no_trace` removes.

    Args:
        device: where all tensors are taken to be; None for where they are.

    Raises:
        ValueError: the call reads a tensor's value outside a graph, which nothing has computed.
    """
    found: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        outputs = _Outputs(gm)
        with _stop_after_joint_passes():
            try:
                compile_fx.compile_fx(gm, inputs)
            except _JointReady as ready:
                found.append(ready.args[0])
        return outputs

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with _AsFakes(mode, device):
        # Of one deepcopy, so that tensors that the inputs share with the model stay shared.
        model, args, kwargs = copy.deepcopy((model, tuple(args), dict(kwargs)))
    with torch.enable_grad(), mode:
        try:
            torch.compile(model, backend=backend, dynamic=False)(*args, **kwargs)
        except DataDependentOutputException as error:
            raise ValueError(
                f"{_place(error)} reads the value of a tensor between two graphs, and explain computes none: "
                "take the read out, or explain the module that attends by itself"
            ) from error
    return found


class _AsFakes(TorchFunctionMode):
    """A deepcopy of a tensor is a fake one, of the same strides."""

    def __init__(self, mode: FakeTensorMode, device: torch.device | None) -> None:
        super().__init__()
        self._mode, self._device = mode, device

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch._C.TensorBase.clone:  # of a Parameter's deepcopy
            return self._fake(args[0])
        if function is Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = self._fake(tensor)
            return memo[id(tensor)]
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs or {})

    def _fake(self, x: Tensor) -> Tensor:
        device = self._device or x.device
        with torch._C.DisableTorchFunctionSubclass():
            if device == x.device:
                return self._mode.from_tensor(x, static_shapes=True)
            with self._mode:
                fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
                return fake.requires_grad_(x.requires_grad)


class _Outputs:
    """Stands for a compiled graph: returns fake tensors like those that the graph would return."""

    def __init__(self, gm: fx.GraphModule) -> None:
        (output,) = (node for node in gm.graph.nodes if node.op == "output")
        inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
        # An input that is returned is returned; of anything else the example that Dynamo found.
        self._outputs = [inputs.index(x) if x in inputs else x.meta["example_value"] for x in output.args[0]]

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        return tuple(inputs[x] if type(x) is int else _Made.apply(x, _anchor()) for x in self._outputs)


class _Made(torch.autograd.Function):
    """A tensor like another one, which is no leaf if that one requires a gradient."""

    @staticmethod
    def forward(ctx: Any, like: Tensor, anchor: Tensor) -> Tensor:
        made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
        if not like.requires_grad:
            ctx.mark_non_differentiable(made)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, torch.zeros(1)


def _anchor() -> Tensor:
    return torch.empty(1, requires_grad=True)


class _JointReady(BaseException):
    """Carries a joint graph out of Inductor, past the handlers that would report it as a failed compilation."""


@contextlib.contextmanager
def _stop_after_joint_passes() -> Iterator[None]:
    """Inductor raises `_JointReady(graph)` where it would go on to partition it; graphs in it, and nested regions, pass through."""
    inside = 0

    def entered(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        inside += 1
        try:
            return stock(*args, **kwargs)
        finally:
            inside -= 1

    def stop(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        gm = entered(stock, *args, **kwargs)
        if inside:
            return gm
        raise _JointReady(gm)

    with contextlib.ExitStack() as stack:
        for owner, name, around in ((compile_fx, PASSES, stop), (graph_compile, NESTED_PASSES, entered)):
            stack.enter_context(mock.patch.object(owner, name, functools.partial(around, getattr(owner, name))))
        yield


def _place(error: BaseException) -> str:
    """The innermost line outside torch."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((x for x in reversed(frames) if not x.filename.startswith((_TORCH, "<"))), frames[-1])
    return f"{frame.filename}:{frame.lineno}"
