"""A case: a function and its inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """`make()` gives a function and its arguments, the same ones after the same seed. A gradient is asked of each leaf that
    requires one."""

    name: str
    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
