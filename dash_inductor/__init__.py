"""Deterministic attention training under torch.compile.

With `torch.use_deterministic_algorithms(True)`, the backward of `scaled_dot_product_attention` in a compiled graph becomes a Triton
kernel that sums dQ in one fixed order, by the schedules of DASH (ICLR 2026, arXiv 2601.21824). Importing this imports nothing
of torch; the names below load what they need.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

_root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class _BesideThisFolder(importlib.abc.MetaPathFinder):
    """In a source checkout lowering/ and templates/ stand beside this folder; an installed package has them inside.

    The checkout's root is not put on `__path__`: pkgutil.walk_packages, which TORCH_LOGS=dash_inductor calls, would find this
    package in itself, without end.
    """

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        parent, _, name = fullname.rpartition(".")
        if parent != __name__ or name not in ("lowering", "templates"):
            return None
        folder = os.path.join(_root, name)
        return importlib.util.spec_from_file_location(
            fullname, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
        )


if os.path.isfile(os.path.join(_root, "pyproject.toml")) and not os.path.isdir(os.path.join(__path__[0], "lowering")):
    sys.meta_path.insert(0, _BesideThisFolder())  # before the finder of an editable install, which may be of another checkout

__version__ = "0.2.0"

if TYPE_CHECKING:
    from .config import Config as Config
    from .config import configure as configure
    from .contract import Manifest as Manifest
    from .contract import ManifestError as ManifestError
    from .contract import manifest as manifest
    from .decision import Decision as Decision
    from .decision import clear_decisions as clear_decisions
    from .decision import decisions as decisions
    from .emulation import emulate as emulate
    from .explanation.explain import explain as explain
    from .hooks.install import disable as disable
    from .hooks.install import enable as enable
    from .hooks.install import enabled as enabled
    from .reproduce.check import check as check
    from .rewrite.declined import UnsupportedAttentionError as UnsupportedAttentionError

_NAMES = {
    "config": ("Config", "configure"),
    "contract": ("Manifest", "ManifestError", "manifest"),
    "decision": ("Decision", "clear_decisions", "decisions"),
    "emulation": ("emulate",),
    "explanation.explain": ("explain",),
    "hooks.install": ("disable", "enable", "enabled"),
    "reproduce.check": ("check",),
    "rewrite.declined": ("UnsupportedAttentionError",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
