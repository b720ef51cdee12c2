"""The kernels of Inductor's generated wrappers, and kernels of Triton that nothing wraps: no dispatch mode sees them."""

from __future__ import annotations

import functools
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from .source import Wrapper
from .trace import Recorder

_KERNEL = re.compile(r"^(\w+) = async_compile\.\w+\(", re.MULTILINE)
_ALLOCATION = "empty_strided"


@contextmanager
def recording() -> Iterator[Recorder]:
    """Everything that runs inside is written down, compiled graphs kernel by kernel: they are compiled anew."""
    torch._dynamo.reset()
    recorder = Recorder()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Anomaly Detection has been enabled")
        lines_of_forward = torch.autograd.set_detect_anomaly(True, check_nan=False)
    try:
        with _hooked(recorder), lines_of_forward, recorder:
            yield recorder
    finally:
        torch._dynamo.reset()


@contextmanager
def _hooked(recorder: Recorder) -> Iterator[None]:
    """Graphs that are compiled inside tell of their kernels; they are compiled anew, with their lines."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config, debug
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.output_code import CompiledFxGraph

    load, call = PyCodeCache.load_by_key_path, CompiledFxGraph.__call__

    def load_by_key_path(*args: Any, **kwargs: Any) -> ModuleType:
        module = load(*args, **kwargs)
        if hasattr(module, "call"):
            _listen(recorder, module, dict(debug._inductor_kernel_stack_trace), stack)
        return module

    def call_graph(graph: Any, inputs: Any) -> Any:
        if not recorder.listening():
            return call(graph, inputs)
        inputs = list(inputs)  # the graph empties the caller's
        return recorder.record("compiled graph", lambda: call(graph, inputs), list(inputs), (), alone=False)

    with ExitStack() as stack:
        stack.enter_context(config.patch({"trace.provenance_tracking_level": 1, "fx_graph_cache": False}))
        stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
        stack.enter_context(mock.patch.object(PyCodeCache, "load_by_key_path", load_by_key_path))
        stack.enter_context(mock.patch.object(CompiledFxGraph, "__call__", call_graph))
        if "triton" in sys.modules:
            stack.enter_context(_launches(recorder))
        yield


def _listen(recorder: Recorder, module: ModuleType, stacks: dict[str, list[str]], patches: ExitStack) -> None:
    assert module.__file__ is not None
    with open(module.__file__) as file:
        text = file.read()
    recorder.wrappers[module.__file__] = Wrapper(text.splitlines(), stacks)
    for name in _KERNEL.findall(text):
        patches.enter_context(mock.patch.object(module, name, _Kernel(name, getattr(module, name), recorder)))
    for name, allocate in list(vars(module).items()):
        if name.startswith(_ALLOCATION) and callable(allocate):
            patches.enter_context(mock.patch.object(module, name, _zeroed(recorder, allocate)))


def _zeroed(recorder: Recorder, allocate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(allocate)
    def zeroed(*args: Any, **kwargs: Any) -> Any:
        with recorder.paused():
            return allocate(*args, **kwargs).zero_()

    return zeroed


def _launches(recorder: Recorder) -> AbstractContextManager[Any]:
    """Launches of Triton kernels by the user's own code, kernel[grid](...)."""
    from triton.runtime.jit import KernelInterface

    stock = KernelInterface.__getitem__

    def launcher(kernel: Any, grid: Any) -> Callable[..., Any]:
        function = kernel
        while hasattr(function, "fn"):  # what it is decorated with, such as autotune
            function = function.fn
        return _Kernel(getattr(function, "__name__", "kernel"), stock(kernel, grid), recorder)

    return mock.patch.object(KernelInterface, "__getitem__", launcher)


class _Kernel:
    """A kernel whose calls are written down. It may change every tensor that it is given."""

    def __init__(self, name: str, kernel: Any, recorder: Recorder) -> None:
        self._name, self._kernel, self._recorder = name, kernel, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._record(self._kernel, args, kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """How a wrapper launches a kernel of Triton."""
        return self._record(self._kernel.run, args, kwargs)

    def _record(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not self._recorder.listening():
            return run(*args, **kwargs)
        given = {name: value for name, value in kwargs.items() if name != "stream"}  # an address
        return self._recorder.record(self._name, lambda: run(*args, **kwargs), (args, given), (args, given))
