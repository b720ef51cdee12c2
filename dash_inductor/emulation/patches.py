"""Attribute replacements that can be undone."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock


class Patches(ExitStack):
    """Attributes set through it get their old values back, in reverse order, from `close`."""

    def set(self, owner: Any, name: str, value: Any, *, is_new: bool = False) -> None:
        """Set `owner.name`; RuntimeError unless it is there, or `is_new`."""
        if not is_new and not hasattr(owner, name):
            raise RuntimeError(f"emulation does not know this torch or Triton: {getattr(owner, '__name__', owner)} has no {name}")
        self.enter_context(mock.patch.object(owner, name, value, create=True))
