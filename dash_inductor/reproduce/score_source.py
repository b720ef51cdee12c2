"""A function of the scores as the Gluon kernel has it (lowering/gluon_functions.py), computed by torch in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..problem import GluonFunction
from ..text import in_one_line

MOST = 1 << 28  # elements that what it reads may have
ALIGNED = 16  # elements, so that the first has an address as tensors have it


class Unknown(Exception):
    """The source calls what torch does not have, or reads more than a trial can have."""


class _Names:
    """Triton's names for torch's operations; all floating-point numbers are float64."""

    float16 = bfloat16 = float32 = float64 = torch.float64
    int8 = int16 = int32 = int64 = uint8 = torch.int64
    int1 = torch.bool
    maximum, minimum, where = torch.maximum, torch.minimum, torch.where
    remainder_integer = torch.remainder
    div_floor_integer = functools.partial(torch.div, rounding_mode="floor")

    @staticmethod
    def full(_shape: Any, value: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor(value, dtype=dtype)

    @staticmethod
    def broadcast_to(x: Tensor, *_shape: Any) -> Tensor:
        return x

    @staticmethod
    def load(element: Any, *_others: Any, **_options: Any) -> Tensor:
        return element()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Pointer:
    """What `captures[k]` is: something to which an index is added, for a load."""

    def __init__(self, element: Callable[[Tensor], Tensor]) -> None:
        self._element = element

    def __add__(self, index: Any) -> Callable[[], Tensor]:
        return functools.partial(self._element, torch.as_tensor(index))


def scores(function: GluonFunction, captures: Sequence[Any], pre_mod: Tensor, head: int, m: Tensor, n: Tensor) -> Tensor:
    """What it makes of the scores of a query head in the first batch element: pre_mod, m and n broadcast. Raises Unknown."""
    space: dict[str, Any] = dict.fromkeys(("tl", "tl_math", "libdevice", "triton_helpers"), _Names())
    space["gluon"] = SimpleNamespace(jit=lambda f: f)
    z, hq = torch.zeros((), dtype=torch.int64), torch.tensor(head)
    try:
        exec("\n".join(line for line in function.source.splitlines() if not line.startswith("from ")), space)
        kept = space["before"](z, hq, n, captures)
        found: Tensor = space["scores_of"](pre_mod, z, hq, m, n, captures, kept)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of an operation that torch has not, or has with other arguments
        raise Unknown(f"nobody knows its values: {in_one_line(error)}") from error
    return found


def captured(function: GluonFunction, heads: int, length: int, device: torch.device) -> list[Tensor]:
    """Tensors that it may read for so many heads and positions: numbers from a half to one and a half, integers 0, and True.

    Raises:
        Unknown: nobody knows how much it reads.
    """
    dtypes = [getattr(torch, name.removeprefix("torch.")) for name in function.captures]
    ranges = [[0, 0] for _ in dtypes]

    def noting(number: int) -> _Pointer:
        def element(index: Tensor) -> Tensor:
            of = ranges[number]
            of[:] = min(of[0], int(index.min())), max(of[1], int(index.max()))
            return torch.zeros_like(index, dtype=torch.float64 if dtypes[number].is_floating_point else torch.int64)

        return _Pointer(element)

    captures = [*map(noting, range(len(dtypes))), *[length] * function.sizes]
    positions = torch.arange(length, device=device)
    with device:
        for head in range(heads):
            scores(function, captures, torch.zeros((), dtype=torch.float64), head, positions[:, None], positions)
    if any(most - least >= MOST for least, most in ranges):
        raise Unknown(f"it reads places from {min(ranges)[0]} to {max(most for _, most in ranges)}")
    generator, made = torch.Generator(device).manual_seed(1), []
    for dtype, (least, most) in zip(dtypes, ranges, strict=True):
        before = -(least // ALIGNED) * ALIGNED
        values = torch.rand(before + most + 1, generator=generator, device=device) + 0.5
        made.append((values if dtype.is_floating_point or dtype == torch.bool else values * 0).to(dtype)[before:])
    return made


def reading(tensors: Sequence[Tensor], function: GluonFunction, length: int) -> list[Any]:
    """The captures of `scores` for tensors of `captured`."""

    def pointer(x: Tensor) -> _Pointer:
        start, whole = x.storage_offset(), x.as_strided([x.untyped_storage().nbytes() // x.element_size()], [1], 0)
        wide = whole.double() if x.is_floating_point() else whole.long()
        return _Pointer(lambda index: wide[index + start])

    return [*map(pointer, tensors), *[length] * function.sizes]
