"""Attribute replacements that can be undone."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock


class Patches(ExitStack):
    """Attributes set through it get their old values back, in reverse order, from `close`."""

    def set(self, owner: Any, name: str, value: Any) -> Any:
        """Set `owner.name` and return the value it had (None if it had none)."""
        old = getattr(owner, name, None)
        self.enter_context(mock.patch.object(owner, name, value, create=True))
        return old
