"""Puts the pass into Inductor and takes it out again.

The pass runs on the joint graph after the built-in patterns, so that hand-written attention has become SDPA by then, and the
decision is taken under Dynamo's guard on deterministic mode. A user's own custom passes are not touched. Nothing here imports
Inductor before the user does; `import torch` brings this module along, so that it imports little (not the settings either).
"""

from __future__ import annotations

import contextlib
import functools
import pkgutil
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

from ..import_hook import after_import, forget_compiled
from .installed import BACKEND_PASS, COMPILE_FX

JOINT_GRAPH = "torch._inductor.fx_passes.joint_graph"
REGISTRY = "torch.nn.attention"
EAGER = "dash_inductor.rewrite.eager:activate"  # by name: it is above this module, which it imports

_wanted = False


def enable(**settings: Any) -> None:
    """Rewrites attention in every graph compiled from now on; `settings` are those of `Config`.

    Raises:
        ValueError: a setting, or a `DASH_INDUCTOR_*` variable, that is not one of the allowed ones.
        RuntimeError: emulation is asked for, and Triton does not interpret in this process.
    """
    from ..config import configure, current

    configure(**settings)
    offer_eager()
    if not current().enabled:
        warnings.warn("DASH_INDUCTOR=0: dash_inductor stays off, torch.compile is plain Inductor", stacklevel=2)
        return
    if current().emulate:
        prepare_emulation()
    want(required=True)


def disable() -> None:
    """Takes everything out of Inductor again; what was compiled is forgotten.

    A graph whose forward ran before and whose backward did not: compiling that backward raises. What the user activated in torch's
    registry of flash attention stays active there.
    """
    global _wanted
    if _wanted:
        _wanted = False
        forget_compiled()
    uninstall()


@contextlib.contextmanager
def enabled(**settings: Any) -> Iterator[None]:
    """`enable(**settings)` inside the block; settings and state as before after it.

    Backwards are compiled together with their forwards, inside the block: they may run after it, and more than once.
    """
    from ..config import configure, current

    before, was_wanted = current(), _wanted
    enable(**settings)
    try:
        with eager_backward() if current().enabled else contextlib.nullcontext():
            yield
    finally:
        configure(**{name: getattr(before, name) for name in settings})
        if not was_wanted:
            disable()


def want(*, required: bool = False) -> None:
    """Installs the pass, as soon as the user imports Inductor; a failure is logged, or raised if the pass is `required`."""
    global _wanted
    if not _wanted:
        _wanted = True
        forget_compiled()
    for module in (JOINT_GRAPH, COMPILE_FX):
        after_import(module, _install_if_wanted, required=required)


def offer_eager() -> None:
    """Lists "DASH" among torch's flash attention implementations; what it needs is imported when the user activates it."""
    after_import(REGISTRY, _register)


def _register() -> None:
    sys.modules[REGISTRY].register_flash_attention_impl("DASH", register_fn=_activate)


def _activate() -> Any:
    return pkgutil.resolve_name(EAGER)()


def is_enabled() -> bool:
    """Whether the pass is to be in Inductor."""
    return _wanted


def _install_if_wanted() -> None:
    if _wanted:
        install()


@functools.cache
def prepare_emulation() -> None:
    """Makes Triton interpret in this process; RuntimeError where it is too late for that."""
    from .. import emulation
    from ..config import current

    if not emulation.active():
        emulation.prepare_environment(seed=current().seed, sms=current().sms)


@contextlib.contextmanager
def eager_backward() -> Iterator[None]:
    """Backwards are compiled with their forwards, not when they first run: pass, cache key and settings may be others by then.

    Whether the graph is retained is not known yet, so that no backward may overwrite what its forward saved: nothing is donated.
    """
    from torch._functorch import config

    with config.patch(force_non_lazy_backward_lowering=True), _nothing_donated():
        yield


_blocks = 0
_blocks_lock = threading.Lock()
_patched = contextlib.ExitStack()


@contextlib.contextmanager
def _nothing_donated() -> Iterator[None]:
    """Not by `config.donated_buffer`, which torch reads again when a backward runs.

    Blocks of several threads may overlap: the first patches torch, and the last one restores it.
    """
    global _blocks
    from unittest import mock

    from torch._functorch._aot_autograd import graph_compile

    with _blocks_lock:
        if not _blocks:
            nothing: Any = mock.patch.object(graph_compile, "collect_bw_donated_buffer_idxs", lambda *_: [], create=True)
            _patched.enter_context(nothing)
        _blocks += 1
    try:
        yield
    finally:
        with _blocks_lock:
            _blocks -= 1
            if not _blocks:
                _patched.close()


def install() -> None:
    """Puts the pass and the cache key into Inductor (which this imports), and watches where it leaves out the pass."""
    from torch._inductor.codegen import common
    from torch._inductor.fx_passes import joint_graph

    from ..rewrite import flex, varlen  # noqa: F401 (patterns register themselves)
    from ..rewrite.sdpa import patterns
    from . import failed, in_use, late, left_out
    from .cache_key import CacheKey

    in_use.watch()
    left_out.watch()
    failed.watch()
    late.watch()
    if patterns not in joint_graph.pass_patterns:
        joint_graph.pass_patterns.append(patterns)
    if BACKEND_PASS not in common.custom_backend_passes:
        # In front, because their order is in the cache keys, and Inductor may or may not have registered its own by now.
        others = dict(common.custom_backend_passes)
        common.custom_backend_passes.clear()
        common.custom_backend_passes.update({BACKEND_PASS: CacheKey(), **others})


def uninstall() -> None:
    """Takes pass and cache key out of Inductor, if it is there."""
    joint_graph = sys.modules.get(JOINT_GRAPH)
    if joint_graph is not None:
        from ..rewrite.sdpa import patterns
        from . import failed, in_use, late, left_out

        in_use.unwatch()
        left_out.unwatch()
        failed.unwatch()
        late.unwatch()
        if patterns in joint_graph.pass_patterns:
            joint_graph.pass_patterns.remove(patterns)
    common = sys.modules.get("torch._inductor.codegen.common")
    if common is not None:
        common.custom_backend_passes.pop(BACKEND_PASS, None)
