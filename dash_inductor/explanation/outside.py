"""Attentions that a model calls outside of its graphs: autograd functions at which torch.compile breaks the graph.

Dynamo cannot trace what such a function calls, as of FlashAttention 4 and TransformerEngine, and leaves its call to Python. So no
graph has its backward, and no pass sees it. It is known by its name alone, like another package's op.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.autograd import Function

from ..decision import Decision
from ..rewrite import third_party

OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


@contextlib.contextmanager
def told(tell: Callable[[Decision], None], model: nn.Module) -> Iterator[None]:
    """Tells of each such function that is applied to a tensor with a gradient while nothing is traced."""
    stock = Function.__dict__["apply"]
    modules = {id(module): name for name, module in model.named_modules()}

    # Dynamo is not to trace this frame, but what it calls.
    @torch._dynamo.disable(recursive=False)
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        has_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        # AOTAutograd applies torch's own ones while it traces.
        if has_gradient and third_party.ATTENTION.search(cls.__name__) and TracingContext.try_get() is None:
            tell(_decided(cls, args, kwargs, modules))
        return stock.__get__(None, cls)(*args, **kwargs)

    with mock.patch.object(Function, "apply", classmethod(apply)):
        yield


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
