"""Everything Inductor generates, run on the CPU by Triton's interpreter, with the CTAs of a launch interleaved from a seed.

Importing this costs nothing; Triton and Inductor are imported when emulation starts.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ..import_hook import after_import, require_triton
from .patches import Patches
from .session import ACTIVE, LAUNCHES, LOCK, Emulation, Launch, Session

__all__ = ["Emulation", "Launch", "active", "clear_launches", "emulate", "launches", "prepare_environment", "settings", "start"]

_PATCHES = Patches()


@contextmanager
def emulate(seed: int = 0, *, sms: int = 6, resident: int | None = None) -> Iterator[Emulation]:
    """Let Inductor generate Triton for CPU tensors and run it, and every other Triton kernel, interleaved, on the CPU.

    Args:
        seed: decides in which order the programs of a launch start and take turns; the same seed, the same order.
        sms: SMs of the emulated device; acts on graphs compiled from now on.
        resident: how many programs of a launch are started at a time, at most (None: all).

    What was compiled in one `emulate` runs in another, without recompiling, and they nest. It is on in every thread, and threads
    take turns: one at a time compiles or launches. All patches of Triton and Inductor are undone when the outermost one ends.

    Raises:
        RuntimeError: Triton does not interpret in this process.
        DeadlockError (from a launch): no program can go on; the message says who waits for which semaphore.
    """
    session = _enter(Emulation(seed, sms, resident))
    try:
        yield session.emulation
    finally:
        with LOCK:
            ACTIVE.remove(session)
            if not ACTIVE:
                _PATCHES.close()


def start(seed: int = 0, *, sms: int = 6, resident: int | None = None) -> None:
    """`emulate` for the rest of the process, and around the blocks of `emulate` that have begun."""
    _enter(Emulation(seed, sms, resident), outermost=True)


def active() -> bool:
    """Whether emulation is on."""
    return bool(ACTIVE)


def settings() -> Emulation | None:
    """The device emulated now, or None."""
    return ACTIVE[-1].emulation if ACTIVE else None


def launches() -> list[Launch]:
    """The last launches (at most 1024) of kernels that use atomics, oldest first."""
    return list(LAUNCHES)


def clear_launches() -> None:
    """Forgets the launches so far."""
    LAUNCHES.clear()


def prepare_environment(seed: int = 0, *, sms: int = 6) -> None:
    """Make this process emulate, when Inductor is imported, without importing Triton or Inductor now.

    Raises:
        RuntimeError: Triton was imported before and compiles instead of interpreting.
        ImportError: Triton, or the packages of the extra `emulate` are missing.
    """
    if "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns where nobody says so; nothing is compiled here
    _require_interpreter()
    after_import("torch._inductor.compile_fx", lambda: start(seed, sms=sms), required=True)


def _enter(emulation: Emulation, *, outermost: bool = False) -> Session:
    _require_interpreter()
    session = Session(emulation)
    with LOCK:
        ACTIVE.insert(0 if outermost else len(ACTIVE), session)
        if len(ACTIVE) == 1:
            try:
                _install()
            except BaseException:
                ACTIVE.remove(session)
                _PATCHES.close()
                raise
    return session


def _require_interpreter() -> None:
    require_triton()
    missing = [name for name in ("greenlet", "numpy") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"emulation needs {' and '.join(missing)}: pip install 'dash-inductor[emulate]'")
    # Triton reads the variable at every @triton.jit, those of its own library included, so its first import decides.
    language = sys.modules.get("triton.language.standard")
    interprets = language is None or type(language.cdiv).__name__ == "InterpretedFunction"
    value = os.environ.get("TRITON_INTERPRET")
    if value == "1" and interprets:
        return
    if not interprets:
        remedy = "triton was imported before TRITON_INTERPRET=1 was set: set it when Python starts"
    elif value is not None:
        remedy = f"TRITON_INTERPRET={value!r} must be '1'"
    else:
        remedy = "set TRITON_INTERPRET=1 before anything imports triton"
    raise RuntimeError(f"emulation runs kernels in Triton's interpreter, which is off in this process: {remedy}")


def _install() -> None:
    from .efficient import install_efficient
    from .flex import install_flex
    from .inductor import install_inductor
    from .interpreter import install_interpreter
    from .varlen import install_varlen

    install_interpreter(_PATCHES)
    install_inductor(_PATCHES)
    install_flex(_PATCHES)
    install_efficient(_PATCHES)
    install_varlen(_PATCHES)
