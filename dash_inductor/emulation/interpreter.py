"""Patches of Triton's interpreter: interleaved programs, correct bf16, and speed.

What is wrong or slow in it (Triton 3.6 to 3.9) stands at each patch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from inspect import getsourcelines, signature
from types import CodeType
from typing import Any, cast

import numpy as np
import torch
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import FunctionRewriter, GridExecutor, InterpretedFunction, InterpreterBuilder, TensorHandle

from .deadlock import DeadlockError, Wait
from .interleaving import Index, Program, interleave
from .libdevice import install_libdevice, torch_ufunc
from .patches import Patches
from .reductions import install_reductions
from .session import ACTIVE, LAUNCHES, LOCK, Session

Array = np.ndarray[Any, Any]
_shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}  # numel and shape of values by their sizes
_types: dict[tuple[Any, ...], dict[str, Any]] = {}  # fields of block types by their elements' type and sizes
_dtypes: dict[str, Any] = {}  # of numpy, by the names of Triton's
_functions: dict[str, CodeType] = {}  # by text


def install_interpreter(patches: Patches) -> None:
    """Sets all patches of Triton's interpreter."""
    _interleave_launches(patches)
    _hand_over_at_atomics(patches)
    _cheap_device_calls(patches)
    _correct_bf16(patches)
    _fused_multiply_add(patches)
    _fast_erf(patches)
    _no_overflow_checks(patches)
    _remembered_dtypes(patches)
    _remembered_shapes(patches)
    _remembered_functions(patches)
    _integer_of_one_element(patches)
    _repeated_booleans(patches)
    install_reductions(patches)
    install_libdevice(patches, libdevice)


class _Grid:
    """Stands in for a kernel's function in a GridExecutor, which calls it once per program, one after another.

    The first call runs them all, interleaved. The executor looks at `__name__`, `__globals__` and the signature.
    """

    def __init__(self, function: Callable[..., None], session: Session) -> None:
        self.function = function
        self.session = session
        self.done = False
        self.__name__ = function.__name__
        # The executor patches those modules of triton.language that it finds here; device functions need both.
        self.__globals__ = {"tl": tl, "core": tl.core}
        self.__signature__ = signature(function)

    def __call__(self, **args: Any) -> None:
        if self.done:
            return
        self.done = True
        builder = interpreter.interpreter_builder
        nx, ny, nz = builder.grid_dim
        indices = [(x, y, z) for z, y, x in itertools.product(range(nz), range(ny), range(nx))]

        def body() -> None:
            with np.errstate(all="ignore"):  # the error state is a context variable: each greenlet has its own
                self.function(**args)

        def turn(index: Index) -> None:
            builder.grid_idx = index

        launch = interleave(self.__name__, body, indices, turn, self.session.next_turns(), self.session.emulation.resident)
        if len(launch.schedule) > launch.programs:
            LAUNCHES.append(launch)


def _interleave_launches(patches: Patches) -> None:
    stock = GridExecutor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        with LOCK:
            function = self.fn
            self.fn = _Grid(function, ACTIVE[-1])
            try:
                stock(self, *args, **kwargs)
            except InterpreterError as error:
                if isinstance(error.__cause__, DeadlockError):
                    raise error.__cause__ from None
                raise
            finally:
                self.fn = function

    # Outside of a graph, as under compiled autograd, Dynamo would compile the interpreter as code of the user's.
    patches.set(GridExecutor, "__call__", torch.compiler.disable(call, reason="a launch in dash_inductor's emulation"))


def _hand_over_at_atomics(patches: Patches) -> None:
    stock_cas, stock_rmw = InterpreterBuilder.create_atomic_cas, InterpreterBuilder.create_atomic_rmw

    def create_atomic_cas(self: Any, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> Any:
        def run() -> Any:
            return stock_cas(self, ptr, cmp, val, sem, scope)

        program = Program.running()
        if program is None:
            return run()
        one = ptr.data.size == cmp.data.size == val.data.size == 1
        if one and cmp.data.item() == val.data.item():
            return program.wait(Wait(ptr.data.item(), cmp.data.item(), cmp.data.dtype), run)
        return program.atomic(run)

    def create_atomic_rmw(self: Any, op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        def run() -> Any:
            return stock_rmw(self, op, ptr, val, mask, sem, scope)

        program = Program.running()
        return run() if program is None else program.atomic(run)

    patches.set(InterpreterBuilder, "create_atomic_cas", create_atomic_cas)
    patches.set(InterpreterBuilder, "create_atomic_rmw", create_atomic_rmw)


def _cheap_device_calls(patches: Patches) -> None:
    """A call of a device function patches all of triton.language once more, which the launch has done already."""
    stock = InterpretedFunction.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if Program.running() is None:
            return stock(self, *args, **kwargs)
        return self.rewrite()(*args, **kwargs)

    patches.set(InterpretedFunction, "__call__", call)


def _to_bf16(x: Array) -> Array:
    """Round float32 to the nearest bf16, ties to even, as the uint16 that the interpreter holds."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(x), np.uint32(0x7FC0) | (bits >> 16), rounded).astype(np.uint16).reshape(np.shape(x))


def _from_bf16(x: Array) -> Array:
    return (x.astype(np.uint32) << 16).view(np.float32)


def _correct_bf16(patches: Patches) -> None:
    """The interpreter cuts off instead of rounding to bf16, and its tl.dot multiplies bf16 operands as integers."""
    stock_convert, stock_dot = interpreter._convert_float, InterpreterBuilder.create_dot
    truncate = interpreter._ir.ROUNDING_MODE.RTZ

    def convert(x: Array, source: Any, target: Any, rounding: Any) -> Array:
        if source == tl.float32 and target == tl.bfloat16 and rounding != truncate:
            return _to_bf16(x)
        if source == tl.bfloat16 and target == tl.float32:
            return _from_bf16(x)
        return stock_convert(x, source, target, rounding)

    def single(x: Any) -> Any:
        """Half precision as float32: exact, and numpy has a fast product for it."""
        if x.dtype.scalar == tl.bfloat16:
            return TensorHandle(_from_bf16(x.data), tl.float32)
        if x.dtype.scalar == tl.float16:
            return TensorHandle(x.data.astype(np.float32), tl.float32)
        return x

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        return stock_dot(self, single(a), single(b), d, *options)

    patches.set(interpreter, "_convert_float", convert)
    patches.set(InterpreterBuilder, "create_dot", create_dot)


def _fused_multiply_add(patches: Patches) -> None:
    """A GPU rounds x * y + z once. The product of two fp32 numbers is exact in float64."""

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        wide = x.data.astype(np.float64) * y.data + z.data
        return TensorHandle(wide.astype(z.data.dtype), z.dtype.scalar)

    patches.set(InterpreterBuilder, "create_fma", create_fma)


def _fast_erf(patches: Patches) -> None:
    """tl.math.erf calls math.erf per element."""
    erf = torch_ufunc(torch.special.erf)
    patches.set(InterpreterBuilder, "create_erf", lambda self, x: TensorHandle(erf(x.data), x.dtype.scalar))


def _no_overflow_checks(patches: Patches) -> None:
    """Every integer operation is done in 64 bits once more, for an assertion that the interpreter then leaves out."""
    builder = interpreter.interpreter_builder
    patches.set(builder, "options", replace(builder.options, sanitize_overflow=False))


def _repeated_booleans(patches: Patches) -> None:
    """A comparison of scalars keeps the type of what it compares, and a block of it is of integers: no mask, for Triton 3.9."""
    stock = InterpreterBuilder.create_splat

    def create_splat(self: InterpreterBuilder, block: Any, value: TensorHandle) -> TensorHandle:
        made = stock(self, block, value)
        return TensorHandle(made.data.astype(np.bool_), tl.int1) if value.data.dtype == np.bool_ else made

    patches.set(InterpreterBuilder, "create_splat", create_splat)


def _remembered_dtypes(patches: Patches) -> None:
    """Every operation looks numpy's dtype up in a table that it makes for that."""
    stock = interpreter._get_np_dtype

    def numpy_dtype(of: Any) -> Any:
        if type(of) is not tl.dtype:  # a block, or a pointer
            return stock(of)
        if of.name not in _dtypes:
            _dtypes[of.name] = stock(of)
        return _dtypes[of.name]

    patches.set(interpreter, "_get_np_dtype", numpy_dtype)


def _remembered_shapes(patches: Patches) -> None:
    """Every value builds its shape of new constants, and every result of an operation a new type, with checks and a name."""
    stock_tensor, stock_type = tl.tensor.__init__, tl.block_type.__init__

    def tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()  # a block's is Triton's own tuple, slow to compare
        if sizes not in _shapes:
            stock_tensor(self, handle, type)
            _shapes[sizes] = self.numel, self.shape
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = _shapes[sizes]

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        if type(element_ty) is not tl.dtype:  # pointers have no hash
            return stock_type(self, element_ty, shape)
        key = element_ty.name, *shape
        if key not in _types:
            stock_type(self, element_ty, shape)
            _types[key] = dict(vars(self))
        vars(self).update(_types[key])

    patches.set(tl.tensor, "__init__", tensor)
    patches.set(tl.block_type, "__init__", block_type)


def _remembered_functions(patches: Patches) -> None:
    """Every function is parsed and compiled, also where another kernel has one of the same text, as those of a template have."""

    def at(code: CodeType, file: str, line: int) -> CodeType:
        """`code`, whose text begins at line 1 of no file, as that of `file` from `line`."""
        constants = tuple(at(each, file, line) if isinstance(each, CodeType) else each for each in code.co_consts)
        return code.replace(co_filename=file, co_firstlineno=code.co_firstlineno + line - 1, co_consts=constants)

    def rewrite_ast(self: Any) -> Callable[..., Any]:
        try:
            lines, first = getsourcelines(self.fn)
        except OSError:  # made of a string: the interpreter takes it as it is
            return cast(Callable[..., Any], self.fn)
        begin = self._find_def(lines)
        self.def_lineno, self.def_file_lineno = begin, 1
        text = self._prepare_source(lines)
        if text not in _functions:
            _functions[text] = compile(self._transform_ast(text), "", "exec")
        namespace = dict(self.kwargs)
        for name, value in vars(interpreter).items():
            self.fn.__globals__.setdefault(name, value)
        exec(at(_functions[text], self.fn.__code__.co_filename, first + begin - 1), self.fn.__globals__, namespace)
        return namespace[self.fn.__name__]

    patches.set(FunctionRewriter, "rewrite_ast", rewrite_ast)


def _integer_of_one_element(patches: Patches) -> None:
    """Triton 3.6 says int(array), which numpy 2.4 refuses for its arrays of one element."""
    stock = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        stock(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patches.set(interpreter, "_patch_lang_tensor", patch_lang_tensor)
