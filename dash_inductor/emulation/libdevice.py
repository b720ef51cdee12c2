"""CUDA's libdevice on numpy: under Triton's interpreter its functions are stubs that return None."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from .patches import Patches

Array = np.ndarray[Any, Any]


def torch_ufunc(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Array], Array]:
    """A function that numpy lacks, from torch, in pieces: above 2048 elements torch wakes threads, 8 ms on busy cores."""

    def apply(x: Array) -> Array:
        pieces = torch.from_numpy(np.array(x)).reshape(-1).split(2048)  # a copy: torch warns about read-only arrays
        return torch.cat([function(piece) for piece in pieces]).numpy().reshape(np.shape(x))

    return apply


def _round_half_away(x: Array) -> Array:
    whole = np.trunc(x)
    return whole + np.where(np.abs(x - whole) >= 0.5, np.copysign(x.dtype.type(1), x), x.dtype.type(0))


SAME_NAMES = (
    "abs cbrt ceil copysign cos cosh exp exp2 expm1 floor fmod hypot isinf isnan "
    "ldexp log log10 log1p log2 nextafter rint signbit sin sinh sqrt tan tanh trunc"
)
OTHER_NAMES = {
    "fabs": "abs", "acos": "arccos", "acosh": "arccosh", "asin": "arcsin", "asinh": "arcsinh", "atan": "arctan",
    "atan2": "arctan2", "atanh": "arctanh", "nearbyint": "rint", "pow": "power", "fast_tanhf": "tanh",
    "mul_rn": "multiply", "add_rn": "add", "sub_rn": "subtract", "div_rn": "divide", "sqrt_rn": "sqrt",
    "fast_expf": "exp", "fast_logf": "log", "fast_dividef": "divide", "llrint": "rint",
}  # fmt: skip
TORCH_NAMES = {
    "cyl_bessel_i0": "i0", "cyl_bessel_i1": "i1", "erf": "erf", "erfc": "erfc", "erfcx": "erfcx", "erfinv": "erfinv",
    "j0": "bessel_j0", "j1": "bessel_j1", "lgamma": "gammaln", "y0": "bessel_y0", "y1": "bessel_y1",
}  # fmt: skip

FUNCTIONS: dict[str, Callable[..., Array]] = {
    **{name: getattr(np, name) for name in SAME_NAMES.split()},
    **{name: getattr(np, numpy_name) for name, numpy_name in OTHER_NAMES.items()},
    **{name: torch_ufunc(getattr(torch.special, torch_name)) for name, torch_name in TORCH_NAMES.items()},
    "fma": lambda x, y, z: (x.astype(np.float64) * y + z).astype(x.dtype),
    "ilogb": lambda x: np.frexp(x)[1] - 1,
    "round": _round_half_away,
    "rsqrt": lambda x: x.dtype.type(1) / np.sqrt(x),
}

INTEGER_RESULTS = {
    "ilogb": tl.int32, "isinf": tl.int32, "isnan": tl.int32, "llrint": tl.int64, "signbit": tl.int32
}  # fmt: skip


def tensor_of(data: Array, dtype: tl.dtype, *, block: bool = True) -> tl.tensor:
    """A tensor of the interpreter; the interpreter holds a scalar (`block=False`) as an array of one element."""
    handle = interpreter.TensorHandle(data, dtype)
    return tl.tensor(handle, tl.block_type(dtype, list(data.shape)) if block else dtype)


def _emulated(name: str, function: Callable[..., Array]) -> Callable[..., tl.tensor]:
    def call(*args: Any, _semantic: Any = None) -> tl.tensor:
        tensors = [interpreter.interpreter_semantic.to_tensor(arg) for arg in args]
        dtype = INTEGER_RESULTS.get(name, tensors[0].dtype)
        data = np.asarray(function(*(tensor.handle.data for tensor in tensors)))
        data = data.astype(interpreter._get_np_dtype(dtype), copy=False)
        return tensor_of(data, dtype, block=any(tensor.type.is_block() for tensor in tensors))

    return call


def _missing(name: str) -> Callable[..., tl.tensor]:
    def call(*args: Any, **kwargs: Any) -> tl.tensor:
        raise NotImplementedError(f"libdevice.{name} is not emulated")

    return call


def install_libdevice(patches: Patches, module: ModuleType) -> None:
    """Replace every stub of `module`; those without a counterpart here raise instead of returning None."""
    for name, _ in inspect.getmembers(module, inspect.isfunction):
        if not name.startswith("_"):
            known = FUNCTIONS.get(name)
            patches.set(module, name, _missing(name) if known is None else _emulated(name, known))
