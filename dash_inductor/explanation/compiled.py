"""torch.compile for a GPU that is not there: caches are filled as on it, kernels are compiled and not loaded, and nothing runs."""

from __future__ import annotations

import contextlib
import copyreg
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._functorch import config as functorch_config
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from ..codegen.fake_gpu import fake_gpu
from ..hooks.hook import around_here
from .decisions import modules_of, move, on_gpu
from .gpu_attention import attention_of

Context = Callable[[], contextlib.AbstractContextManager[Any]]


class CompiledError(BaseException):
    """Ends the call of a function whose graph, forward and backward, is compiled: past Dynamo's handlers, for it cannot run."""


@contextlib.contextmanager
def compiling_for(key: str, *, moving: Context = contextlib.nullcontext) -> Iterator[None]:
    """Inside, what torch.compile gets is traced on the CPU, of tensors without memory, with the attention that the GPU would take.

    The joint graph is moved to the GPU inside of `moving`. From then on everything is as there: passes, partition, code, Triton's
    compiler, caches. The call ends with CompiledError.

    Raises:
        ValueError: there is no such GPU.
    """
    copyreg.pickle(FakeTensor, _reduced)
    with contextlib.ExitStack() as stack:
        stack.enter_context(loading_nothing())
        for name in ("_recursive_joint_graph_passes", "_compile_fx_inner"):
            stack.enter_context(around_here(compile_fx, name, functools.partial(_moved, moving)))
        stack.enter_context(around_here(compile_fx, "compile_fx", _ended))
        stack.enter_context(functorch_config.patch(force_non_lazy_backward_lowering=True))
        gpu = stack.enter_context(fake_gpu(key))
        stack.enter_context(attention_of(gpu))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


@contextlib.contextmanager
def loading_nothing() -> Iterator[None]:
    """Inside, kernels are compiled in this process, into Triton's cache, and none is loaded."""
    # A CPU build lacks the first, which generated code names. Static launchers load what they launch.
    with (
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, create=True),
        around_here(CachingAutotuner, "_make_launchers", lambda stock, kernel: None),
        inductor_config.patch(compile_threads=1, use_static_triton_launcher=False),
    ):
        yield


def _ended(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    stock(*args, **kwargs)
    raise CompiledError


def _moved(moving: Context, stock: Callable[..., Any], gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    """Moves the graph, and inputs, to the GPU before `stock` takes them."""
    with moving():
        for module in modules_of(gm):
            move(module)
        args = torch.utils._pytree.tree_map(on_gpu, args)
    return stock(gm, *args, **kwargs)


def _reduced(x: FakeTensor) -> Any:
    """Zeros in the place of a tensor that is not there: the table of a schedule, as caches keep it."""
    with unset_fake_temporarily():
        return torch.zeros(x.shape, dtype=x.dtype).__reduce_ex__(2)
