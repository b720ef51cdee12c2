"""What a sum in one order is, step by step in numpy, and numbers of which another order is another sum."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

QUERIES, KEYS = 2, 3  # axes of [B, H, S_q, S_k]


def large(sizes: Sequence[int]) -> Tensor:
    """1e8, 1 and -1e8, by which gradients are multiplied."""
    return torch.tensor([1e8, 1.0, -1e8])[torch.randint(3, tuple(sizes), generator=torch.Generator().manual_seed(1))]


@dataclass(frozen=True)
class Sum:
    """How the gradient of a tensor of a shape is summed: at which index an element of [B, H, S_q, S_k] adds to it, which axes are
    dims of the tensor, and from which its index is computed."""

    shape: tuple[int, ...]
    at: Callable[..., tuple[Any, ...]]
    kept: tuple[int, ...]
    mixed: tuple[int, ...]

    @staticmethod
    def of(*shape: int, at: Callable[..., tuple[Any, ...]], kept: tuple[int, ...] = (), mixed: tuple[int, ...] = ()) -> Sum:
        return Sum(shape, at, kept, mixed)

    def expected(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Of what is summed, fp32 [B, H, S_q, S_k], in order: the axes that are summed, then those that an index is computed of."""
        summed = [axis for axis in range(4) if axis not in (*self.kept, *self.mixed)]
        lists: dict[tuple[int, ...], list[Any]] = {}
        order = [*self.kept, *summed, *self.mixed]
        places = list(itertools.product(*(range(values.shape[axis]) for axis in order)))
        by_axis = torch.tensor(places).T
        b, h, m, n = (by_axis[order.index(axis)] for axis in range(4))
        indices = torch.stack(self.at(b, h, m, n)).T.tolist()
        for index, *place in zip(indices, b.tolist(), h.tolist(), m.tolist(), n.tolist(), strict=True):
            lists.setdefault(tuple(index), []).append(values[tuple(place)])
        splits = 32 if {QUERIES, KEYS} & {*summed, *self.mixed} else 1
        block = 1024 if self.mixed or KEYS not in self.kept else 16
        found = np.zeros(self.shape, np.float32)
        for index, each in lists.items():
            found[index] = in_order(each, splits, block)
        return found

    def is_expected(self, values: Tensor, actual: Tensor) -> bool:
        """Whether `actual` is the sum of the values in order, bit by bit, and not in another one: of all that run backwards along
        axes, one is another sum, whatever rounding makes of the rest."""
        axes = [axes for count in range(1, 5) for axes in itertools.combinations(range(4), count)]
        others = (torch.from_numpy(self.expected(values.flip(each).numpy())) for each in axes)
        in_this_one = torch.equal(actual, torch.from_numpy(self.expected(values.numpy())))
        return in_this_one and any(not torch.equal(actual, other) for other in others)


def in_order(values: list[Any], splits: int, block: int) -> Any:
    """Each split adds up its blocks element by element, and then their elements. The splits are added from the first on."""
    of_split = math.ceil(math.ceil(len(values) / splits) / block) * block
    total = None
    for split in range(splits):
        own = np.array(values[split * of_split : (split + 1) * of_split], np.float32)
        blocks = np.pad(own, (0, -len(own) % block)).reshape(-1, block)
        added = np.zeros((1, block), np.float32)
        for each in blocks:
            added += each
        part = added.sum(1)[0]
        total = part if total is None else total + part
    return total
