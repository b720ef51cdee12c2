"""The names that Inductor's code for Triton calls, as Gluon has them: tl, tl_math, triton_helpers and libdevice."""

import types

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
def _broadcast_to(x, *shape, _semantic=None):
    # Elementwise operations broadcast anyway.
    return x


def _of_gluon(module: types.ModuleType) -> types.ModuleType:
    """A copy of a module, whose functions are Gluon's."""
    made = types.ModuleType(f"{__name__}.{module.__name__}")
    vars(made).update({name: gluon.jit(x.fn) if isinstance(x, JITFunction) else x for name, x in vars(module).items()})
    return made


tl, triton_helpers = _of_gluon(triton.language), _of_gluon(stock_helpers)
tl_math = stock_helpers.math
vars(tl).update({"load": gl.load, "where": gl.where, "full": _full, "broadcast_to": _broadcast_to})
