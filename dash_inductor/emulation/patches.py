"""A list of attribute replacements that can be undone."""

from __future__ import annotations

from typing import Any

__all__ = ["Patches"]

_MISSING = object()


class Patches:
    """Attributes set through it get their old values back, in reverse order, from :meth:`restore`."""

    def __init__(self) -> None:
        self._saved: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> Any:
        """Set ``owner.name`` and return the value it had (None if it had none)."""
        old = getattr(owner, name, _MISSING)
        self._saved.append((owner, name, old))
        setattr(owner, name, value)
        return None if old is _MISSING else old

    def restore(self) -> None:
        while self._saved:
            owner, name, old = self._saved.pop()
            if old is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, old)
