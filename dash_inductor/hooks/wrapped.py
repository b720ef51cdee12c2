"""Functions of torch that ours stand around while the package is on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

STOCK = "dash_stock"  # what ours stand around, in their attributes


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """From now on, `owner.name(...)` is `around(stock, ...)`; nothing if there is no such function, or ours is there already."""
    stock = getattr(owner, name, None)
    if stock is None or hasattr(stock, STOCK):
        return

    @functools.wraps(stock)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(stock, *args, **kwargs)

    setattr(wrapped, STOCK, stock)
    setattr(owner, name, wrapped)


def unwrap(owner: Any, name: str) -> None:
    """Gives torch its own function back."""
    stock = getattr(getattr(owner, name, None), STOCK, None)
    if stock is not None:
        setattr(owner, name, stock)
