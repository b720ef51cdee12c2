"""Puts the package into Inductor and takes it out again.

The pass runs on the joint graph after the built-in patterns, so that hand-written attention has become SDPA by then, and the
decision is taken under Dynamo's guard on deterministic mode. A user's own custom passes are not touched. Nothing here imports
Inductor before the user does; `import torch` brings this module along, so that it imports little (not the settings either).
"""

from __future__ import annotations

import contextlib
import functools
import pkgutil
import sys
import warnings
from collections.abc import Iterator
from types import CodeType
from typing import TYPE_CHECKING, Any

from ..import_hook import after_import, forget_compiled, has_triton, require_triton
from .hook import PATCHES, Hooks
from .table import COMPILATION, EAGER_BACKWARD, EVERYBODY, LIMIT, OFF, OUTSIDE

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing's, from Python 3.11 on

    from ..config import Settings

INDUCTOR = "torch._inductor.compile_fx"
REGISTRY = "torch.nn.attention"
DISTRIBUTED = "torch.distributed"
EAGER, HERE = "dash_inductor.hooks.eager:activate", "dash_inductor.hooks.backend:in_this_thread"  # by name: they import Inductor

_wanted = False
_installed = False
_eager_backward = Hooks()
_outside = Hooks()
_limit = Hooks()
_off = Hooks()
_skipped: list[CodeType] = []  # of frames that Dynamo no longer compiles, at its limit of recompilations


def enable(**settings: Unpack[Settings]) -> None:
    """Rewrites attention in every graph compiled from now on; `settings` are those of `Config`.

    Raises:
        ValueError: a setting, or a `DASH_INDUCTOR_*` variable, that is not one of the allowed ones.
        RuntimeError: emulation is asked for, and Triton does not interpret in this process.
        ImportError: there is no Triton.
    """
    from ..config import configure, current

    configure(**settings)
    offer_eager()
    if not current().enabled:
        warnings.warn("DASH_INDUCTOR=0: dash_inductor stays off, torch.compile is plain Inductor", stacklevel=2)
        return
    if current().emulate:
        prepare_emulation()
    require_triton()
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
def enabled(**settings: Unpack[Settings]) -> Iterator[None]:
    """`enable(**settings)` inside the block; settings and state as before after it.

    Backwards are compiled together with their forwards, inside the block: they may run after it, and more than once.
    """
    from ..config import chosen, configure, current

    before, was_wanted = chosen(), _wanted
    enable(**settings)
    try:
        with eager_backward() if current().enabled else contextlib.nullcontext():
            yield
    finally:
        configure(**{name: getattr(before, name) for name in settings})
        if not was_wanted:
            disable()


def want(*, required: bool = False) -> None:
    """Installs the package, as soon as the user imports Inductor; a failure is logged, or raised if the package is `required`."""
    global _wanted
    if not _wanted:
        _wanted = True
        forget_compiled()
    after_import(INDUCTOR, _install_if_wanted, required=required)


def offer_eager() -> None:
    """Lists "DASH" among torch's flash attention implementations; what it needs is imported when the user activates it."""
    after_import(REGISTRY, _register)


def _register() -> None:
    sys.modules[REGISTRY].register_flash_attention_impl("DASH", register_fn=_activate)


def _activate() -> Any:
    require_triton()
    return pkgutil.resolve_name(EAGER)()


def tell_ranks_off() -> None:
    """Has the ranks of a job know that the package is off in this process, as soon as there is a job."""
    after_import(DISTRIBUTED, lambda: _off.ask_if(True, *OFF))


def is_enabled() -> bool:
    """Whether the package is to be in Inductor."""
    return _wanted


def is_installed() -> bool:
    """Whether it is there now."""
    return _installed


def _install_if_wanted() -> None:
    if _wanted and has_triton():  # without it nothing could be compiled for a GPU, and on a CPU nothing is rewritten
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
    Not by `config.donated_buffer`, which torch reads again when a backward runs. Blocks of several threads may overlap.
    """
    from torch._functorch import config

    _eager_backward.ask(*EAGER_BACKWARD)
    try:
        with config.patch(force_non_lazy_backward_lowering=True):
            yield
    finally:
        _eager_backward.leave()


def nothing_donated(*_: Any) -> list[int]:
    """The indices of what a backward may overwrite."""
    return []


def install() -> None:
    """Puts the package into Inductor, which this imports, for all compilations."""
    global _installed
    if not _installed:
        _installed = True
        PATCHES.ask(*EVERYBODY, *COMPILATION)
        watch_limit()
        _follow_settings()


def uninstall() -> None:
    """Takes it out of Inductor, if it is there."""
    global _installed
    if _installed:
        _installed = False
        PATCHES.leave()
        forget_limit()


def watch_limit() -> None:
    """Has `skip` be called where Dynamo comes to its limit of recompilations."""
    _limit.ask_if(True, *LIMIT)


def forget_limit() -> None:
    """When Dynamo has forgotten what it compiled, or the package is taken out."""
    _limit.ask_if(_installed, *LIMIT)
    _skipped.clear()
    _follow_settings()


def skip(code: CodeType, *, skipped: bool) -> None:
    """Dynamo skips the frames of this code from now on, or has compiled one."""
    if skipped != is_skipped(code):
        _skipped[:] = [*_skipped, code] if skipped else [x for x in _skipped if x is not code]
        _follow_settings()


def is_skipped(code: CodeType) -> bool:
    """Whether Dynamo skips frames of this code. Code is equal to that of the same lines in another file."""
    return any(x is code for x in _skipped)


def _follow_settings() -> None:
    """Lets attention outside of graphs be told of where the settings or a skipped frame ask for that, now and when they change."""
    from .. import config

    config.followers.add(_follow_settings)
    with contextlib.suppress(ValueError):  # of a wrong variable, which each compilation raises
        _outside.ask_if(bool(_skipped) or (_installed and config.current().on_unsupported != "fallback"), *OUTSIDE)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Inside, in this thread, the package is in Inductor, whether or not it is enabled."""
    if _installed:
        yield
        return
    from torch._inductor import config

    with pkgutil.resolve_name(HERE)(config.joint_custom_post_pass):
        yield
