"""Attentions that a model calls outside of its graphs, where torch.compile breaks them. No pass sees their backward.

One kind is an autograd function that calls what Dynamo cannot trace, as those of FlashAttention 4 and TransformerEngine do. It is
known by its name alone, like another package's op. The other is SDPA in code that Dynamo leaves to Python. It is seen where a GPU
is named.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import CompileContext
from torch._ops import OpOverload
from torch.autograd import Function

from ..decision import Decision
from ..hooks import hook
from ..hooks.hook import around_here
from ..hooks.outside import OUTSIDE
from ..rewrite import third_party
from ..rewrite.declined import decision_of_call, mask_of
from ..rewrite.stock_ops import implementation_for

Tell = Callable[[Decision], None]
OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parent), hook.__file__)  # the last stands around torch's functions


_telling: ContextVar[tuple[Tell, Mapping[int, str]] | None] = ContextVar("_telling", default=None)


@contextlib.contextmanager
def told(tell: Tell, model: nn.Module) -> Iterator[None]:
    """Tells of each that is called on a tensor with a gradient while nothing is compiled."""

    # Dynamo is not to trace this frame, but what it calls.
    @torch._dynamo.disable(recursive=False)
    def apply(stock: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        has_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        # AOTAutograd applies torch's own ones while a graph is compiled.
        telling = _telling.get() if has_gradient and CompileContext.try_get() is None else None
        if telling is not None and third_party.ATTENTION.search(cls.__name__):
            tell, modules = telling
            tell(_decided(cls, args, kwargs, modules))
        return stock(cls, *args, **kwargs)

    modules = {id(module): name for name, module in model.named_modules()}
    with telling_by((tell, modules)), around_here(Function, "apply", apply, dynamo=False):
        yield


@contextlib.contextmanager
def telling_by(telling: tuple[Tell, Mapping[int, str]] | None) -> Iterator[None]:
    """Inside, whom attentions are told, and the paths of modules by id; None: nobody, as inside of a graph that is computed."""
    token = _telling.set(telling)
    try:
        yield
    finally:
        _telling.reset(token)


def calling_module() -> str:
    """Within `told`: the path of the innermost module that is called now; "" for the model itself."""
    telling = _telling.get()
    return "" if telling is None else _caller(telling[1])[1]


def called(op: OpOverload, tensors: Sequence[Tensor], attn_mask: Tensor | None, dropout_p: float, is_causal: bool) -> None:
    """SDPA is called on query, key and value, and would become this op."""
    telling = _telling.get()
    if telling is None or CompileContext.try_get() is not None or not torch.is_grad_enabled():
        return
    if any(x.requires_grad for x in tensors):
        tell, modules = telling
        source, module = _caller(modules)
        named = {"attn_bias": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal}
        decision = decision_of_call(str(op), tensors, mask_of(named), OUTSIDE)
        tell(replace(decision, implementation=implementation_for(str(op), named), source=source, module=module))


def _decided(cls: Any, args: Any, kwargs: Mapping[str, Any], modules: Mapping[int, str]) -> Decision:
    name = f"{cls.__module__}.{cls.__qualname__}"
    try:
        context = () if cls.setup_context is not Function.setup_context else (None,)
        bound = inspect.signature(cls.forward).bind(*context, *args, **kwargs)
        bound.apply_defaults()
        named: Mapping[str, Any] = bound.arguments
    except TypeError:  # stock raises it too
        named = {}
    source, module = _caller(modules)
    return third_party.decision_of_function(name, named, source, module)


def _caller(modules: Mapping[int, str]) -> tuple[str | None, str]:
    """The innermost line outside of torch, and the innermost module that is called, of the frames that stand now."""
    source, module = None, None
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (source is None or module is None):
        if not frame.f_code.co_filename.startswith((*OURS, "<")):
            source = source or f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if module is None:
            module = modules.get(id(frame.f_locals.get("self")))
        frame = frame.f_back
    return source, module or ""
