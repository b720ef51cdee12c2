"""A case: a function and its inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Case:
    """`make()` gives a function and its arguments, the same ones after the same seed. A gradient is asked of each leaf that
    requires one."""

    name: str
    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]


Suite = Callable[[], Iterator[Case]]


def filled(like: Tensor) -> Tensor:
    """A tensor of random values, of the same shape, strides, dtype; it requires a gradient if that one does."""
    import torch

    if like.dim() == 0:
        return like
    values = torch.rand(like.shape) < 0.7 if like.dtype == torch.bool else torch.randn(like.shape)
    return torch.empty_like(like).copy_(values).detach().requires_grad_(like.requires_grad)
