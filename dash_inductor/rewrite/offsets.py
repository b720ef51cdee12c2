"""Where packed sequences begin and end, and how they are moved apart so that no tile holds tokens of two of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Offsets(NamedTuple):
    """Where sequences begin and end, int32 [sequences + 1].

    Of sequence i, counted from 1, `begin[i - 1]` is the first token and `end[i]` the one after the last.

    They may hold anything: whatever is looked up by them is clamped first.
    """

    begin: Tensor
    end: Tensor

    def sequence(self, token: Tensor) -> Tensor:
        """The number of each token's sequence."""
        # Clamped, for memory of its own: in torch 2.11 Inductor's bucketize reads a view from where its base begins.
        number = torch.bucketize(token, self.begin.clamp(min=0), out_int32=True, right=True)
        return number.clamp(1, self.begin.shape[0] - 1)

    def bounds(self, number: Tensor) -> tuple[Tensor, Tensor]:
        """Where sequences begin and end."""
        return torch.ops.aten.index(self.begin, [number - 1]), torch.ops.aten.index(self.end, [number])


class InPlace:
    """`length` tokens as they are packed.

    Attributes:
        offsets: where the sequences are.
        length: the tokens that there are, some of them perhaps of no sequence.
    """

    def __init__(self, cu_seqlens: Tensor, length: Any) -> None:
        self.offsets, self.length = Offsets(cu_seqlens, cu_seqlens), length

    def there(self, x: Tensor, dim: int = 0) -> Tensor:
        """The tensor of all packed tokens, along `dim`, in this layout."""
        return x

    def back(self, x: Tensor) -> Tensor:
        """What `there` undoes."""
        return x


class Moved(InPlace):
    """Each sequence moved to where a block begins. Rows between them hold zeros."""

    def __init__(self, cu_seqlens: Tensor, length: Any, block: int) -> None:
        sizes = cu_seqlens.diff().clamp(0, length)
        ends = ((sizes + (block - 1)) // block * block).cumsum(0, dtype=torch.int32)
        begin = torch.nn.functional.pad(ends, (1, 0))
        self.offsets = Offsets(begin, torch.nn.functional.pad(begin.narrow(0, 0, sizes.shape[0]) + sizes, (1, 0)))
        self.length = moved_length(length, cu_seqlens, block)
        before = InPlace(cu_seqlens, length)
        self._there, self._back = _places(self, before), _places(before, self)

    def there(self, x: Tensor, dim: int = 0) -> Tensor:
        """The tensor of all packed tokens, along `dim`, in this layout."""
        return _taken(x, dim, *self._there)

    def back(self, x: Tensor) -> Tensor:
        """What `there` undoes. Tokens of no sequence are zero."""
        return _taken(x, 0, *self._back)


def moved_length(length: Any, cu_seqlens: Tensor, block: int) -> Any:
    """What `length` tokens take at most, each sequence filling up its last block."""
    return (length + (cu_seqlens.shape[0] - 1) * (block - 1)) // block * block


def _places(at: InPlace, source: InPlace) -> tuple[Tensor, Tensor]:
    """For each token in the layout `at`: its place in another, and whether it has none; clamped then."""
    token = torch.arange(at.length, dtype=torch.int32, device=at.offsets.begin.device)
    number = at.offsets.sequence(token)
    begin, end = at.offsets.bounds(number)
    place = token - begin + source.offsets.bounds(number)[0]
    is_none = (token < begin) | (token >= end) | (place < 0) | (place >= source.length)
    return place.clamp(0, source.length - 1), is_none


def _taken(x: Tensor, dim: int, place: Tensor, is_none: Tensor) -> Tensor:
    """Rows along `dim`, zeros where there is no token, whatever stands in memory."""
    shape = [-1 if d == dim else 1 for d in range(x.dim())]
    taken = torch.ops.aten.index(x, [*[None] * dim, place])
    return taken.masked_fill(is_none.view(shape), 0)
