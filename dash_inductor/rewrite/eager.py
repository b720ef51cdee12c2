"""Eager training: what `torch.nn.attention.activate_flash_attention_impl("DASH")` puts in front of the stock backward.

The dispatcher's kernel of SDPA's flash backward is replaced by one that asks the pass about the attention, and runs what the pass made
of it, compiled. What the pass declines, and everything outside deterministic mode, goes to the stock kernel. The forward is stock's.
A model that is traced for torch.compile meets none of this: its tensors are fake then, and the stock op stands in its graph.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from .. import emulation
from ..config import current, ready
from ..decision import add
from ..devices.target import target_of
from ..schedule.families import SEARCHED
from .backend import dash
from .cache_key import key
from .declined import DECLINED, decision_of, why_no_target
from .sdpa import patterns
from .stock_ops import FLASH, FLASH_CPU

REMEMBERED = 4096  # calls, by their sizes, for which the pass is not asked again
MOST_VARIANTS = 2**16  # of one program, by sizes and strides: no bound in practice


class Override:
    """Kernels that stand in the dispatcher in front of stock's, until they are removed."""

    def __init__(self, ops: dict[str, OpOverload]) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        for dispatch_key, op in ops.items():
            stock = torch.library.get_kernel(op, dispatch_key)
            self._library.impl(op, functools.partial(backward, op, stock), dispatch_key, with_keyset=True)

    def remove(self) -> None:
        """Puts the stock kernels back."""
        self._library._destroy()


def activate() -> Override | None:
    """Overrides the backward of each device that has kernels of ours; None, with a warning, where the package is switched off.

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
        except ValueError as error:
            reason = str(error)
    if not ops:
        raise RuntimeError(
            f'activate_flash_attention_impl("DASH"): {reason}; DASH_INDUCTOR_EMULATE=1, set when Python starts, emulates one on the CPU'
        )
    return Override(ops)


def backward(op: OpOverload, stock: Any, keyset: Any, *args: Any, **kwargs: Any) -> Any:
    """The gradients of `op`: by our kernels or, where the pass declines the attention, by the kernel `stock`."""
    if torch.are_deterministic_algorithms_enabled() and ready().enabled:
        settings = (*key(), why_no_target(args[0].device))
        call = Call(settings, op, tuple(map(_like, args)), tuple((name, _like(x)) for name, x in kwargs.items()))
        program = program_for(call)
        if program is not None:
            return program([x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)])
    return stock.call_boxed(keyset, *args, **kwargs)


class TensorLike(NamedTuple):
    """What an answer depends on of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Call(NamedTuple):
    """A call of a stock backward under settings, ours and Inductor's: its arguments, tensors as TensorLike."""

    settings: tuple[Any, ...]
    op: OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    @property
    def tensors(self) -> list[TensorLike]:
        """In order."""
        return [x for x in (*self.args, *(x for _, x in self.kwargs)) if isinstance(x, TensorLike)]


def _like(x: Any) -> Any:
    return TensorLike(tuple(x.shape), x.dtype, x.device) if isinstance(x, Tensor) else x


class Program:
    """What the pass made of an attention, compiled by Dynamo for whatever batch and lengths come."""

    def __init__(self, module: fx.GraphModule, taken: list[int]) -> None:
        """`module` takes those tensors of the stock op that stand in `taken`."""
        self._taken = taken
        self._compiled = torch.compile(module.forward, fullgraph=True, backend=dash)

    def __call__(self, tensors: list[Tensor]) -> Any:
        """The gradients, of all tensors of the stock op. Raises rather than run the specification, which takes minutes."""
        # Below autograd, where nothing is differentiable: what the caller's tensors are to autograd would only compile anew.
        taken = [tensors[i].detach() for i in self._taken]
        with torch.no_grad():
            try:
                return self._compiled(*taken)
            except FailOnRecompileLimitHit:
                with _lock, dynamo_config.patch(recompile_limit=MOST_VARIANTS, accumulated_recompile_limit=MOST_VARIANTS):
                    return self._compiled(*taken)


_lock = threading.RLock()  # autograd has a thread for each GPU
_programs: dict[tuple[Any, ...], Program] = {}


@functools.lru_cache(REMEMBERED)
def program_for(call: Call) -> Program | None:
    """What runs in place of a stock backward; None if the pass declines it, which is recorded as of a node in a graph.

    Raises:
        UnsupportedAttentionError: it is declined, under on_unsupported="error".
    """
    with _lock:
        module = _module_of(call)
        patterns.apply(module)
        for node in module.graph.nodes:
            if DECLINED in node.meta:
                decision = decision_of(node)
                add((f"eager: {decision}", 0), decision)
                return None
        placeholders = module.graph.find_nodes(op="placeholder")
        taken = [i for i, node in enumerate(placeholders) if node.users]
        for node in placeholders:
            if not node.users:
                module.graph.erase_node(node)
        with module.graph.inserting_before(next(n for n in module.graph.nodes if n.op != "placeholder")):
            module.graph.call_function(_require_compilation)
        module.recompile()
        # One program for all batches and lengths; but a searched schedule is of one size.
        sizes = [x.shape if current().schedule == SEARCHED else x.shape[1::2] for x in call.tensors]
        kind = (call.settings, module.code, *((x.dtype, x.device, size) for x, size in zip(call.tensors, sizes, strict=True)))
        return _programs.setdefault(kind, Program(module, taken))


def _module_of(call: Call) -> fx.GraphModule:
    """A graph of the stock op alone, on fake tensors."""
    graph = fx.Graph()
    mode = FakeTensorMode()

    def argument(x: Any) -> Any:
        if not isinstance(x, TensorLike):
            return x
        node = graph.placeholder(f"tensor_{len(graph.nodes)}")
        with mode:
            node.meta["val"] = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return node

    args = tuple(map(argument, call.args))
    graph.output(graph.call_function(call.op, args, {name: argument(x) for name, x in call.kwargs}))
    return fx.GraphModule({}, graph)


def _require_compilation() -> None:
    if not torch.compiler.is_compiling():
        raise RuntimeError(
            'activate_flash_attention_impl("DASH") needs torch.compile, which is switched off (set_stance, TORCHDYNAMO_DISABLE or '
            "torch._dynamo.config.disable): switch it on, or call restore_flash_attention_impl()"
        )
