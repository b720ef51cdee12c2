"""Attention by hand as Inductor's own patterns have it: each with the inputs that Inductor traces it with."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch._inductor.fx_passes import fuse_attention

from .case import Case


def patterns() -> Iterator[Case]:
    """Those for training, forward and backward; those for inference without a gradient and without dropout."""
    for name, registered in fuse_attention._get_sfdp_patterns(torch.device("cpu")):
        pattern = re.match(r"_sfdp_pattern_\d+", name)
        assert pattern is not None, name
        function = getattr(fuse_attention, pattern[0])
        yield Case(name.removeprefix("_sfdp_"), partial(_by_hand, function, registered, name.endswith("_training")))


def _by_hand(
    function: Callable[..., Any], registered: Mapping[str, Any], trains: bool
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    scalars = dict(registered["scalar_workaround"])
    if not trains and "dropout_p" in inspect.signature(function).parameters:
        scalars["dropout_p"] = 0.0
    inputs = tuple(_filled(x) if isinstance(x, torch.Tensor) else x for x in registered["example_inputs"])
    if not trains:
        inputs = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in inputs)
    # Dynamo does not trace what stands in a file of Inductor's.
    traced = FunctionType(function.__code__.replace(co_filename=__file__), function.__globals__, function.__name__)
    return partial(traced, **scalars), inputs


def _filled(like: torch.Tensor) -> torch.Tensor:
    """A tensor of random values, of the same shape, strides, dtype; it requires a gradient if that one does."""
    if like.dim() == 0:
        return like
    values = torch.rand(like.shape) < 0.7 if like.dtype == torch.bool else torch.randn(like.shape)
    return torch.empty_like(like).copy_(values).detach().requires_grad_(like.requires_grad)
