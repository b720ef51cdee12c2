"""Deterministic attention training under torch.compile.

With `torch.use_deterministic_algorithms(True)`, the backward of `scaled_dot_product_attention` in a compiled graph becomes a Triton
kernel that sums dQ in one fixed order, by the schedules of DASH (ICLR 2026, arXiv 2601.21824). Importing this imports nothing
of torch; the names below load what they need.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

# In a source checkout lowering/ and templates/ stand beside this folder; an installed package has them inside.
_root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if os.path.isfile(os.path.join(_root, "pyproject.toml")) and not os.path.isdir(os.path.join(__path__[0], "lowering")):
    __path__.append(_root)

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .config import Config, configure
    from .emulation import emulate
    from .install import disable, enable, enabled
    from .matching import UnsupportedAttentionError
    from .record import Decision, decisions

__all__ = [
    "Config",
    "Decision",
    "UnsupportedAttentionError",
    "configure",
    "decisions",
    "disable",
    "emulate",
    "enable",
    "enabled",
]

_HOME = {
    "Config": "config",
    "configure": "config",
    "Decision": "record",
    "decisions": "record",
    "UnsupportedAttentionError": "matching",
    "disable": "install",
    "enable": "install",
    "enabled": "install",
    "emulate": "emulation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
