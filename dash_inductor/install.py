"""Puts the pass into Inductor and takes it out again.

The pass runs on the joint graph after the built-in patterns, so that hand-written attention has become SDPA by then, and the
decision is taken under Dynamo's guard on deterministic mode. A user's own custom passes are not touched. Nothing here imports
Inductor before the user does.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from .config import configure, current, forget_compiled
from .import_hook import after_import

JOINT_GRAPH = "torch._inductor.fx_passes.joint_graph"
BACKEND_PASS = "dash_inductor"

_wanted = False


def enable(**settings: Any) -> None:
    """Rewrites attention in every graph compiled from now on; `settings` are those of `Config`."""
    global _wanted
    configure(**settings)
    if not current().enabled:
        warnings.warn("DASH_INDUCTOR=0: dash_inductor stays off, torch.compile is plain Inductor", stacklevel=2)
        return
    if not _wanted:
        _wanted = True
        forget_compiled()
    after_import(JOINT_GRAPH, _install_if_wanted)


def disable() -> None:
    """Takes everything out of Inductor again; what was compiled is forgotten."""
    global _wanted
    if _wanted:
        _wanted = False
        forget_compiled()
    uninstall()


@contextlib.contextmanager
def enabled(**settings: Any) -> Iterator[None]:
    """`enable(**settings)` inside the block; settings and state as before after it."""
    before, was_wanted = current(), _wanted
    enable(**settings)
    try:
        yield
    finally:
        configure(**{name: getattr(before, name) for name in settings})
        if not was_wanted:
            disable()


def is_enabled() -> bool:
    return _wanted


def _install_if_wanted() -> None:
    if _wanted:
        install()


def install() -> None:
    """Puts the pass and the cache salt into Inductor (which this imports)."""
    from torch._inductor.codegen import common
    from torch._inductor.fx_passes import joint_graph

    from .matching import patterns
    from .salt import Salt

    if patterns not in joint_graph.pass_patterns:
        joint_graph.pass_patterns.append(patterns)
    common.custom_backend_passes.setdefault(BACKEND_PASS, Salt())


def remove_pass() -> None:
    """Takes the pass out, so that graphs compiled from now on keep the stock op."""
    joint_graph = sys.modules.get(JOINT_GRAPH)
    if joint_graph is not None:
        from .matching import patterns

        if patterns in joint_graph.pass_patterns:
            joint_graph.pass_patterns.remove(patterns)


def uninstall() -> None:
    """Takes pass and salt out of Inductor, if it is there."""
    remove_pass()
    common = sys.modules.get("torch._inductor.codegen.common")
    if common is not None:
        common.custom_backend_passes.pop(BACKEND_PASS, None)
