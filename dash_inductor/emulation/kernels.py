"""Kernels in Python for ops that torch has none for on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def implement(library: torch.library.Library, op: str, kernel: Callable[..., Any], dispatch_key: str) -> None:
    """Registers a kernel of an op, which Dynamo leaves alone: outside of a graph it would compile it as code of the user's."""
    library.impl(op, torch.compiler.disable(kernel, reason="a kernel of dash_inductor's emulation"), dispatch_key)
