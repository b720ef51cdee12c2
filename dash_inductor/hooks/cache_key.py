"""What our code adds to Inductor's cache keys: lowerings and templates outside torch are not in them by themselves."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
from pathlib import Path
from typing import Any

from torch._inductor.custom_graph_pass import CustomGraphModulePass
from torch._inductor.utils import get_donated_idxs

from .. import emulation
from ..config import current
from ..devices.target import reserved_sms, sms_of_gpus
from . import failures

PACKAGES = ("dash_inductor", "dash_inductor.lowering", "dash_inductor.templates")
SUFFIXES = (".py", ".jinja", ".toml")


@functools.cache
def sources_digest() -> str:
    """SHA-256 over every source file of the three packages."""
    roots = []
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.submodule_search_locations is not None
        roots.append(Path(next(iter(spec.submodule_search_locations))))
    return digest_of(roots)


def digest_of(roots: list[Path]) -> str:
    """SHA-256 over the names and bytes of the source files under `roots`."""
    digest = hashlib.sha256()
    for root in roots:
        for path in sorted(p for p in root.rglob("*") if p.suffix in SUFFIXES):
            for part in (path.relative_to(root).as_posix().encode(), path.read_bytes()):
                digest.update(len(part).to_bytes(8, "little"))
                digest.update(part)
    return digest.hexdigest()


def settings_key() -> tuple[Any, ...]:
    """All of ours that decides what is generated."""
    settings, emulated = current(), emulation.settings()
    return sources_digest(), settings.deciding(), reserved_sms(settings), sms_of_gpus(), None if emulated is None else emulated.sms


def uuid() -> tuple[Any, ...]:
    """The key, anew for each graph where a cache hit would skip a warning or an error."""
    nonce = None if current().on_unsupported == "fallback" and not failures.is_uncached() else os.urandom(16)
    # Which saved tensors a backward may overwrite is in its code, and in no key of Inductor.
    return *settings_key(), nonce, tuple(get_donated_idxs() or ())


class CacheKey(CustomGraphModulePass):
    """A pass that does nothing: its uuid is part of the FX graph cache's and the AOTAutograd cache's keys."""

    def __call__(self, gm: Any) -> None:
        """Nothing."""

    def uuid(self) -> Any:
        """As `uuid`."""
        return uuid()


KEY = CacheKey()
