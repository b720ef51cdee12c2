"""What we ask of Dynamo."""

from __future__ import annotations

import sys


def forget_compiled() -> None:
    """Resets Dynamo, if it is there: it guards on deterministic mode, not on our settings."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
