"""What depends on whether a module of torch is imported, or Triton is there, without importing it.

Used by the autoload entry point, which runs at the end of `import torch` and must not import Inductor itself.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

NO_TRITON = (
    "dash_inductor needs Triton, which this Python does not find: on Linux, pip install triton; elsewhere leave attention to "
    "PyTorch's own kernels, by plain torch.compile"
)

log = logging.getLogger(__name__)


def has_triton() -> bool:
    """Whether there is a Triton to import; torch has none on macOS and Windows, and its CPU builds bring none."""
    try:
        return importlib.util.find_spec("triton") is not None
    except (ImportError, ValueError):  # of another finder, or of a stand-in without a spec
        return "triton" in sys.modules


def require_triton() -> None:
    """ImportError, which says so in a sentence, where there is none."""
    if not has_triton():
        raise ImportError(NO_TRITON, name="triton") from None


def after_import(module_name: str, callback: Callable[[], None], *, required: bool = False) -> None:
    """Call `callback` once, right after the body of `module_name` has run; at once if it is imported already.

    An exception of the callback is logged and swallowed, so that it cannot break somebody else's import;
    `required=True` lets it through instead (what the user asked for cannot be had). Callbacks of one module run in
    the order of registration.
    """
    if module_name in sys.modules:
        _call(module_name, callback, required)
        return
    _FINDER.waiting.setdefault(module_name, []).append((callback, required))
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def _call(module_name: str, callback: Callable[[], None], required: bool) -> None:
    try:
        callback()
    except Exception:
        if required:
            raise
        log.warning("dash_inductor: %r failed after the import of %s", callback, module_name, exc_info=True)


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the other finders find the module and puts a loader in between that calls back."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[tuple[Callable[[], None], bool]]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.waiting:
            return None
        for finder in sys.meta_path:
            find_spec = None if finder is self else getattr(finder, "find_spec", None)
            spec = find_spec and find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None

    def executed(self, module_name: str) -> None:
        callbacks = self.waiting.pop(module_name, [])
        if not self.waiting and self in sys.meta_path:
            sys.meta_path.remove(self)
        for callback, required in callbacks:
            _call(module_name, callback, required)


class _Loader(importlib.abc.Loader):
    """Stands in for the real loader until the module's body runs; the module keeps the real one."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        _FINDER.executed(module.__name__)


_FINDER = _Finder()


def forget_compiled() -> None:
    """Resets Dynamo, if it is there: it guards on deterministic mode, not on our settings."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
