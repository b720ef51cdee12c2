"""Two tensors bit for bit: where they differ first, and by how much."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BY_ROWS, _BY_COLUMNS = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), _BY_ROWS),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), _BY_COLUMNS),
}


@dataclass(frozen=True)
class TensorDifference:
    """How two tensors differ.

    Attributes:
        what: the difference in words.
        index: of the first element that differs; None where shape, dtype or presence differ.
        ulps: floating-point numbers of the dtype from one element to the other; None for NaN and for what is no float.
    """

    what: str
    index: tuple[int, ...] | None = None
    ulps: int | None = None


def parts(tensor: Tensor) -> dict[str, Tensor]:
    """What a sparse tensor consists of, by name; of another, itself by an empty name."""
    return {name.strip("_"): getattr(tensor, name)() for name in _PARTS.get(tensor.layout, ())} or {"": tensor}


def bits(tensor: Tensor) -> Tensor:
    """The elements' bits as integers; a complex number is two of them, in a last dimension."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(INTEGERS[tensor.dtype.itemsize])


def difference(first: Tensor | None, second: Tensor | None) -> TensorDifference | None:
    """How `second` differs from `first`, or None if every bit is the same. None is a gradient that is not there."""
    if first is None or second is None:
        if first is second:
            return None
        return TensorDifference("there is no gradient " + ("in the first run" if first is None else "in this run"))
    for name in ("dtype", "shape"):
        a, b = (getattr(x, name) if name == "dtype" else list(x.shape) for x in (first, second))
        if a != b:
            return TensorDifference(f"its {name} is {a} in the first run and {b} in this one")
    first, second = first.cpu(), second.cpu()
    differs = bits(first) != bits(second)
    if first.is_complex():
        differs = differs.any(-1)
    if not differs.any():
        return None
    flat = int(differs.flatten().to(torch.uint8).argmax())  # of several, the first
    index = tuple(map(int, torch.unravel_index(torch.tensor(flat), first.shape)))
    a, b = first[index], second[index]
    counted = f"{int(differs.sum()):,} of {differs.numel():,} elements differ"
    return TensorDifference(f"{counted}; the first is {_text(a)} in the first run and {_text(b)} in this one", index, ulps(a, b))


def ulps(first: Tensor, second: Tensor) -> int | None:
    """How many steps to the next number of their dtype lead from one float to the other; both are tensors of one element.

    +0 and -0 are one number, and infinity follows the largest finite one. None if either is a NaN, or their dtype is no float.

    >>> ulps(torch.tensor(1.0), torch.tensor(1.0).nextafter(torch.tensor(2.0)))
    1
    >>> ulps(torch.tensor(-0.0), torch.tensor(0.0)), ulps(torch.tensor(1.0), torch.tensor(math.nan))
    (0, None)
    """
    if not first.is_floating_point() or first.double().isnan().any() or second.double().isnan().any():
        return None
    return abs(_position(first) - _position(second))


def _position(x: Tensor) -> int:
    """Where the number stands among those of its dtype, zero at 0: its bits are a sign and a magnitude."""
    sign = 1 << (8 * x.dtype.itemsize - 1)
    pattern = int(bits(x)) & (2 * sign - 1)
    return -(pattern & (sign - 1)) if pattern & sign else pattern


def _text(x: Tensor) -> str:
    """The value, so that two that differ read differently."""
    value = x.item()
    if isinstance(value, float):
        pattern = int(bits(x)) & ((1 << 8 * x.dtype.itemsize) - 1)
        return f"nan ({pattern:#x})" if math.isnan(value) else f"{value:.{17 if x.dtype == torch.float64 else 9}g}"
    return str(value)
