"""Eager training: what `torch.nn.attention.activate_flash_attention_impl("DASH")` puts in front of the stock backward.

The dispatcher's kernel of SDPA's flash backward gives way to one that compiles the op alone, as the backward of a model is
compiled, so that the pass rewrites it. What the pass declines, and everything outside deterministic mode, goes to the stock kernel.
The forward is stock's. A model that is traced for torch.compile meets none of this: its tensors are fake then, and the stock op is
in its graph.
"""

from __future__ import annotations

import functools
import operator
import threading
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.utils import counters
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from .. import emulation
from ..decision import Declined, add_eager
from ..devices.target import target_of
from ..op import NOTE
from ..rewrite.declined import noted, why_no_target
from ..rewrite.nodes import call
from ..rewrite.stock_ops import FLASH, FLASH_CPU
from .backend import dash
from .cache_key import settings_key
from .hook import overridden
from .joint_pass import PASS, ready

REMEMBERED = 4096  # calls, by their sizes, for which the pass is not asked again
MOST_VARIANTS = 2**16  # of one program, by sizes and strides: no bound in practice


def activate() -> SimpleNamespace | None:
    """Overrides the backward of each device that has kernels of ours; None, with a warning, where the package is switched off.

    Torch calls `remove` of what is returned, which puts the stock kernels back.

    Raises:
        RuntimeError: there is no such device.
        ValueError: a `DASH_INDUCTOR_*` variable that is not one of the allowed ones.
    """
    settings = ready()
    if not settings.enabled:
        warnings.warn('DASH_INDUCTOR=0: activate_flash_attention_impl("DASH") leaves the stock backward', stacklevel=4)
        return None
    ops: dict[str, OpOverload] = {"CPU": FLASH_CPU} if emulation.active() else {}
    reason = "no CUDA GPU is available"
    if torch.cuda.is_available():
        try:
            target_of(torch.device("cuda"), settings)
            ops["CUDA"] = FLASH
        except Declined as declined:
            reason = str(declined)
    if not ops:
        remedy = "DASH_INDUCTOR_EMULATE=1, set when Python starts, emulates one on the CPU"
        raise RuntimeError(f'activate_flash_attention_impl("DASH"): {reason}; {remedy}')
    return SimpleNamespace(remove=overridden(ops, backward))


def backward(op: OpOverload, stock: Any, keyset: Any, *args: Any, **kwargs: Any) -> Any:
    """The gradients of `op`: by our kernels or, where the pass declines the attention, by the kernel `stock`."""
    if torch.are_deterministic_algorithms_enabled() and ready().enabled:
        _require_outermost()
        settings = (*settings_key(), str(why_no_target(args[0].device)))
        called = Call(settings, op, tuple(map(_like, args)), tuple((name, _like(x)) for name, x in kwargs.items()))
        program = program_for(called)
        if program is not None:
            return program([x for x in (*args, *kwargs.values()) if _varies(x)])
    return stock.call_boxed(keyset, *args, **kwargs)


class TensorLike(NamedTuple):
    """A tensor without its elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Call(NamedTuple):
    """A call of a stock backward under settings, ours and Inductor's: its arguments, tensors as TensorLike."""

    settings: tuple[Any, ...]
    op: OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    def kind(self) -> Call:
        """What its program is made for: any batch and any lengths."""
        return self._replace(args=tuple(map(_kind, self.args)), kwargs=tuple((name, _kind(x)) for name, x in self.kwargs))

    def graph(self) -> tuple[fx.Graph, list[fx.Node]]:
        """A graph that calls the op with its tensors and integers as inputs, and the gradients; on fake tensors."""
        graph = fx.Graph()

        def argument(x: Any) -> Any:
            if not _varies(x):
                return x
            node = graph.placeholder(f"arg_{len(graph.nodes)}")
            node.meta["val"] = torch.empty_strided(*x[:2], dtype=x.dtype, device=x.device) if isinstance(x, TensorLike) else x
            return node

        with FakeTensorMode():
            node = graph.call_function(self.op, tuple(map(argument, self.args)), {name: argument(x) for name, x in self.kwargs})
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
            node.meta["val"] = self.op(*args, **kwargs)
        gradients = [call(graph, operator.getitem, node, index) for index in range(len(node.meta["val"]))]
        graph.output(gradients)
        return graph, gradients


def _varies(x: Any) -> bool:
    """Whether an argument is an input of the graph; others are constants in it."""
    return isinstance(x, (Tensor, TensorLike)) or type(x) is int


def _like(x: Any) -> Any:
    return TensorLike(tuple(x.shape), x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else x


def _kind(x: Any) -> Any:
    if isinstance(x, TensorLike):
        return x._replace(shape=x.shape[1::2], stride=())  # the heads and the head dim of [B, H, S, D]
    return int if type(x) is int else x


_lock = threading.RLock()  # autograd has a thread for each GPU
_running = threading.local()


class Program:
    """A stock backward in which the pass finds an attention to rewrite, compiled for whatever batch and lengths come."""

    def __init__(self, graph: fx.Graph) -> None:
        function = fx.GraphModule({}, graph, class_name="EagerAttention").forward
        self._compiled = torch.compile(function, fullgraph=True, backend=dash, options={"pattern_matcher": True})

    def __call__(self, strides: list[tuple[int, ...]], args: list[Any]) -> list[Tensor]:
        """The gradients, of given strides: the caller may be a compiled graph that relies on those of the stock op."""
        # Here, below autograd, nothing is differentiated: what it would make of the tensors would only compile anew.
        args = [x.detach() if isinstance(x, Tensor) else x for x in args]
        _running.compiled = True
        try:
            with torch.no_grad():
                grads = self._run(args)
            return [_with_stride(grad, stride) for grad, stride in zip(grads, strides, strict=True)]
        finally:
            _running.compiled = False

    def _run(self, args: list[Any]) -> Any:
        with _lock:  # two threads in functions of a full graph leave torch 2.11 without Dynamo, for good
            try:
                return self._compiled(*args)
            except FailOnRecompileLimitHit:
                with dynamo_config.patch(recompile_limit=MOST_VARIANTS, accumulated_recompile_limit=MOST_VARIANTS):
                    return self._compiled(*args)


def _with_stride(x: Tensor, stride: tuple[int, ...]) -> Tensor:
    if x.stride() == stride:
        return x
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)


def _require_outermost() -> None:
    """Raises where a program calls the stock op itself: it was not compiled, or the pass did not rewrite it after all."""
    if getattr(_running, "compiled", False):
        raise RuntimeError(
            'activate_flash_attention_impl("DASH") needs torch.compile and its passes, which are off (torch.compiler.set_stance, '
            "TORCHDYNAMO_DISABLE, suppress_errors): switch them on, or call restore_flash_attention_impl()"
        )


_programs: dict[Call, Program] = {}


@functools.lru_cache(REMEMBERED)
def program_for(called: Call) -> Callable[[list[Any]], list[Tensor]] | None:
    """What runs in place of a stock backward; None if the pass declines it, which is recorded as of a graph.

    Raises:
        UnsupportedAttentionError: it is declined, under on_unsupported="error".
    """
    with _lock:
        graph, gradients = called.graph()
        strides = [gradient.meta["val"].stride() for gradient in gradients]
        PASS.apply(fx.GraphModule({}, graph))
        for note in (node for node in graph.nodes if node.target is NOTE):
            counters["inductor"]["dash_declined"] += 1
            add_eager(noted(note))
            return None
        kind = called.kind()
        if kind not in _programs:
            _programs[kind] = Program(called.graph()[0])
        return functools.partial(_programs[kind], strides)
