"""Attention by hand as Inductor's own patterns have it: each with the inputs that Inductor traces it with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch._inductor.fx_passes.fuse_attention import _get_sfdp_patterns

from .case import Case, filled


def patterns() -> Iterator[Case]:
    """Those for training, forward and backward; those for inference without a gradient."""
    for name, registered in _get_sfdp_patterns(torch.device("cpu")):
        yield Case(name.removeprefix("_sfdp_"), partial(_by_hand, registered, name.endswith("_training")))


def _by_hand(registered: Mapping[str, Any], trains: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    inputs = tuple(filled(x) if isinstance(x, torch.Tensor) else x for x in registered["example_inputs"])
    if not trains:
        inputs = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in inputs)
    return partial(registered["search_fn"], **registered["scalar_workaround"]), inputs
