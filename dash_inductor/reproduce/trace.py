"""A step operation by operation: what each was given, what it made, and which line asked for it."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._guards import CompileContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from .diverge import Operation
from .fingerprint import describe, generators
from .source import Place, Wrapper, in_backward, innermost, of_text

EMPTY = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")


class Recorder(TorchDispatchMode):
    """Writes down every operation that runs.

    Compilation is no part of a step: it is left out, and compiled code is what it would be without this mode. Memory that nothing
    has written yet is filled with zeros, for its contents are another in each run.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.wrappers: dict[str, Wrapper] = {}  # by file
        self._inside = threading.local()
        self._without_source: dict[int, int] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """torch.compile works as if this mode were off."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operation of torch."""
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        fake = any(isinstance(x, FakeTensor) for x in tensors)
        if not fake and any(map(is_traceable_wrapper_subclass, tensors)):
            return NotImplemented  # the operations on what it wraps come here
        if fake or not self.listening():
            return func(*args, **kwargs)
        if not isinstance(func, torch._ops.OpOverload):
            return self.record(func.name(), lambda: func(*args, **kwargs), (args, kwargs), ())
        if func.namespace == "aten" and func.overloadpacket.__name__ in EMPTY:
            return func(*args, **kwargs).zero_()
        return self.record(str(func), lambda: func(*args, **kwargs), (args, kwargs), _written(func, args, kwargs))

    def listening(self) -> bool:
        """Whether operations of this thread are written down now: not inside another one, nor while torch compiles."""
        return not getattr(self._inside, "operation", False) and CompileContext.try_get() is None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Writes nothing down in this thread."""
        before = getattr(self._inside, "operation", False)
        self._inside.operation = True
        try:
            yield
        finally:
            self._inside.operation = before

    def record(self, name: str, run: Callable[[], Any], given: Any, written: Any, *, alone: bool = True) -> Any:
        """Run one operation on `given` that may change `written`; `alone`: what runs inside it is not written down."""
        user, lines, backward, known = self._place()
        with self.paused():
            inputs, random = describe(given), generators()
            result = run() if alone else None
        if not alone:
            result = run()
        with self.paused():
            outputs = describe([result, written])
        operation = Operation(name, inputs, outputs, random, user, lines, backward)
        self._find_source(operation, known, given, (result, written))
        self.operations.append(operation)
        return result

    def _find_source(self, operation: Operation, known: bool, given: Any, made: Any) -> None:
        """What draws the seeds of a compiled graph has no line: it gets those of the first kernel that reads them."""
        if not known:
            self._without_source |= {x.data_ptr(): len(self.operations) for x in tree_leaves(made) if isinstance(x, Tensor)}
        elif operation.lines and self._without_source:
            for x in tree_leaves(given):
                if isinstance(x, Tensor) and (at := self._without_source.pop(x.data_ptr(), None)) is not None:
                    lines = operation.lines[::-1]  # the first of what it computes may be what draws
                    user = lines[0] if operation.source in lines else operation.source
                    self.operations[at] = replace(self.operations[at], source=user, lines=lines)

    def _place(self) -> tuple[str | None, list[str], bool, bool]:
        """Where the operation that runs now comes from: the user's line, lines below it, whether it is a backward's and known."""
        whole = [(frame.f_code.co_filename, frame, line) for frame, line in traceback.walk_stack(sys._getframe(2))]
        stacks = next((self.wrappers[file].stacks_at(line) for file, _, line in whole if file in self.wrappers), None)
        stack = [(frame, line) for file, frame, line in whole if file not in self.wrappers]
        node = torch._C._current_autograd_node()
        called = innermost(in_backward(stack))
        if node is not None and called.user is None:
            metadata: Any = node.metadata
            forward = of_text("".join(metadata.get("traceback_") or ()))
            called = forward if forward.user else called
        if called.user is None:
            called = Place(innermost((frame.f_code.co_filename, line) for frame, line in stack).user, called.package)
        if stacks is None:
            return called.user or called.package, [called.package] if called.package else [], node is not None, True
        # A kernel's sum or scatter is the last that it computes, which in a backward is the first of the forward.
        places = [of_text(stack) for stack in (stacks if node is not None else reversed(stacks))]
        lines = list(dict.fromkeys(line for place in places if (line := place.package or place.user)))
        user = next((place.user for place in places if place.user), called.user)
        return user or next(iter(lines), None), lines, node is not None, bool(lines)


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operation changes."""
    arguments = func._schema.arguments
    values = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    return [values.get(each.name) for each in arguments if each.alias_info is not None and each.alias_info.is_write]
