"""The joint graphs of a model, as torch.compile would make them, without a kernel or a compiled graph.

Dynamo runs on a copy of the model whose tensors are fake, so that they take no memory. Each graph that it finds goes through
Inductor's front end up to the joint-graph passes, and ends there. Where the model does with a tensor what a fake one does not
allow, such as reading its value, Dynamo runs again with the tensors themselves, if they are real. Then each graph is computed too,
operation by operation, for what comes after it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd import graph_compile
from torch._inductor import compile_fx
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..decision import Decision
from ..hooks.hook import around_here
from ..rewrite.kept import note_names
from ..rewrite.varlen import note_used_logsumexps
from ..text import in_one_line
from . import outside


class Call(NamedTuple):
    """A call of a graph, as its joint graph; of one without a gradient its forward. Calls may share a graph, as layers do.

    module: the path of the innermost module that runs meanwhile.
    """

    graph: fx.GraphModule
    module: str = ""


Found = list[Call | Decision]


class Traced(NamedTuple):
    """What a call of the model does, in its order: its calls of graphs, and decisions on attentions that are in no graph. stopped:
    what ended it before its end, and where; None if nothing did."""

    found: Found
    stopped: str | None = None


Switch = Callable[[bool], contextlib.AbstractContextManager[Any]]


def joint_graphs(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: torch.device | None = None,
    taken_for_gpu: Switch = contextlib.nullcontext,
) -> Traced:
    """The joint graphs of a call of the model.

    Leaves traces in torch, which `leaving_no_trace` removes.

    Args:
        device: where all tensors are taken to be; None for where they are.
        taken_for_gpu: contexts in which tensors are taken for a GPU's (True), and in which they can be computed (False).

    Raises:
        Exception: of the call, where it ended before any graph.
    """
    found: Found = []
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with _AsFakes(mode, device):
        # Of one deepcopy, so that tensors that the inputs share with the model stay shared.
        fake, fake_args, fake_kwargs = copy.deepcopy((model, tuple(args), dict(kwargs)))
    try:
        with torch.enable_grad(), mode, outside.told(found.append, fake):
            torch.compile(fake, backend=functools.partial(_traced, found, False), dynamic=False)(*fake_args, **fake_kwargs)
    except Exception as error:  # the model's own, torch's, Dynamo's
        tensors = [x for x in (*model.parameters(), *model.buffers(), *tree_leaves((args, kwargs))) if isinstance(x, Tensor)]
        have_values = not any(x.device.type == "meta" or isinstance(x, FakeTensor) for x in tensors)
        if _is_of_values(error) and have_values and all(device in (None, x.device) for x in tensors):
            return _with_values(model, args, kwargs, taken_for_gpu)
        return _ended(found, error)
    return Traced(found)


def _with_values(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], taken_for_gpu: Switch) -> Traced:
    """The same, and what is between the graphs is computed. Parameters are the model's own: a forward does not change them."""
    found: Found = []
    copied, args, kwargs = copy.deepcopy((model, tuple(args), dict(kwargs)), {id(x): x for x in model.parameters()})

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        with taken_for_gpu(True):
            return _traced(found, True, gm, inputs)

    try:
        with torch.enable_grad(), taken_for_gpu(False), outside.told(found.append, copied):
            torch.compile(copied, backend=backend, dynamic=False)(*args, **kwargs)
    except Exception as error:
        return _ended(found, error)
    return Traced(found)


def _traced(found: Found, computes: bool, gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """A backend of torch.compile: adds calls of the joint graph to `found`, and returns what stands for the compiled one."""
    outputs = _StandIn(gm, computes)
    note_used_logsumexps(gm)
    with _stop_after_joint_passes():
        try:
            compile_fx.compile_fx(gm, inputs)
        except Ready as ready:
            return _added(found, ready.args[0], outputs)
    return outputs


def _added(found: Found, graph: fx.GraphModule, outputs: Callable[..., Any]) -> Callable[..., Any]:
    """`outputs`, whose calls are added to `found`. The first one's place is here, should the forward end before it."""
    calls, place = itertools.count(), len(found)
    found.append(Call(graph))

    def called(*inputs: Any) -> Any:
        call = Call(graph, outside.calling_module())
        if next(calls):
            found.append(call)
        else:
            found[place] = call
        return outputs(*inputs)

    return called


def _ended(found: Found, error: Exception) -> Traced:
    """What was found before the error, which is raised where nothing was."""
    if _is_of_values(error):
        what = " reads the value of a tensor between two graphs, which tensors without memory do not have"
    elif found:
        what = f": {in_one_line(error)}"
    else:
        raise error
    return Traced(found, f"{line_of(error)}{what}")


def _is_of_values(error: BaseException) -> bool:
    """Whether a fake tensor was asked for its values, or for a shape that follows from them."""
    kinds = (DataDependentOutputException, DynamicOutputShapeException)
    return any(isinstance(x, kinds) for x in (error, error.__cause__, error.__context__))


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


class _StandIn:
    """Stands for a compiled graph: returns tensors like those that it would return, `computes` says whether with their values.
    Nothing is saved for a backward."""

    def __init__(self, gm: fx.GraphModule, computes: bool) -> None:
        (output,) = (node for node in gm.graph.nodes if node.op == "output")
        inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
        # An input that is returned is returned; of anything else the example that Dynamo found.
        self._outputs = [inputs.index(x) if x in inputs else x.meta["example_value"] for x in output.args[0]]
        self._compute = fx.GraphModule(gm, copy.deepcopy(gm.graph)) if computes else None  # Inductor changes the graph

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        values = self._outputs
        if self._compute is not None:
            with torch.no_grad(), outside.telling_by(None):  # a part of the graph may switch gradients on again
                values = self._compute(*inputs)
        anchor = torch.empty(1, requires_grad=True)
        return tuple(
            inputs[like] if type(like) is int else _Made.apply(like, anchor, value) if isinstance(value, Tensor) else value
            for like, value in zip(self._outputs, values, strict=True)
        )


class _Made(torch.autograd.Function):
    """A tensor like another one, which is no leaf if that one requires a gradient: of that `value`, or of none if it is `like`."""

    @staticmethod
    def forward(ctx: Any, like: Tensor, anchor: Tensor, value: Tensor) -> Tensor:
        if value is like:
            value = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
        made = value.data  # which is no view, so that it can be written to
        if not like.requires_grad:
            ctx.mark_non_differentiable(made)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, torch.zeros(1), None


class Ready(BaseException):
    """Carries a graph out of Inductor, past the handlers that would report it as a failed compilation."""


@contextlib.contextmanager
def _stop_after_joint_passes() -> Iterator[None]:
    """Inductor raises `Ready(graph)` where it would go on to partition it; graphs in it, and nested regions, pass through."""
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
        note_names(gm.graph)
        raise Ready(gm)

    nested = around_here(graph_compile, "run_joint_graph_passes_on_hops", entered)
    with around_here(compile_fx, "_recursive_joint_graph_passes", stop), nested:
        yield


def line_of(error: BaseException) -> str:
    """The innermost line outside torch and explain; of an error that Dynamo reports, of the code that it was in."""
    frames = [*traceback.extract_tb(error.__traceback__), *getattr(error, "real_stack", ())]
    frame = next((x for x in reversed(frames) if not x.filename.startswith((*outside.OURS, "<"))), frames[-1])
    return f"{frame.filename}:{frame.lineno}"
