"""The names that Inductor's code for Triton calls, as Gluon has them: tl, tl_math, triton_helpers and libdevice."""

import functools
import types
from typing import Any

import triton
from torch._inductor.runtime import triton_helpers as stock_helpers
from torch._inductor.runtime.triton_helpers import libdevice
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.language import core
from triton.runtime.jit import JITFunction

__all__ = ["libdevice", "tl", "tl_math", "triton_helpers"]


@builtin
def _full(shape, value, dtype, _semantic=None):
    # Inductor's constants have one element. A scalar takes the layout of what it meets.
    sizes = [core._unwrap_if_constexpr(size) for size in core._unwrap_if_constexpr(shape)]
    assert all(size == 1 for size in sizes), f"a constant of shape {sizes}"
    return _semantic.scalar_constant(core._unwrap_if_constexpr(value), core._unwrap_if_constexpr(dtype))


@builtin
def _zeros(shape, dtype, _semantic=None):
    return _full(shape, 0, dtype, _semantic=_semantic)


@builtin
def _broadcast_to(x, *shape, _semantic=None):
    # Elementwise operations broadcast anyway.
    return x


def _of_gluon(module: types.ModuleType, **names: Any) -> types.ModuleType:
    """A copy of a module, whose functions are Gluon's and call each other and these names."""
    made = types.ModuleType(f"{__name__}.{module.__name__}")
    space = vars(made)
    space.update({**vars(module), **names})
    space.update({name: gluon.jit(_among(x.fn, space)) for name, x in space.items() if isinstance(x, JITFunction)})
    return made


def _among(function: Any, names: dict[str, Any]) -> Any:
    """The same function, with other globals."""
    made = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    return functools.update_wrapper(made, function, updated=())


tl = _of_gluon(triton.language, load=gl.load, where=gl.where, full=_full, zeros=_zeros, broadcast_to=_broadcast_to)
triton_helpers, tl_math = _of_gluon(stock_helpers, tl=tl), stock_helpers.math
