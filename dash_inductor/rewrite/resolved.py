"""What an attention of a graph gets, once it is known which kernels compile and work for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..config import Config
from ..devices.target import target_of
from ..first_use.verdict import require_fit
from ..problem import Problem
from ..resolve import Resolution, resolve


def resolved(
    problem: Problem,
    settings: Config,
    query: torch.Tensor,
    functions: tuple[fx.GraphModule, fx.GraphModule] | None = None,
    captures: Sequence[Any] = (),
) -> Resolution:
    """What it gets. query: a fake. functions: of the scores and their derivative, if there are any, which read captures, fakes too.

    Raises:
        Declined: it keeps its stock kernel.
        UnfitKernelError, UntriedKernelError: as `require_fit`.
    """
    target = target_of(query.device, settings)
    if functions:
        from ..lowering.gluon_fit import fitted  # lazily: it imports Inductor's lowerings

        problem = fitted(problem, settings, target, query, *functions, captures)
    return require_fit(resolve(problem, settings, target), query.device)
