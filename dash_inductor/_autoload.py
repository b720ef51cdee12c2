"""The `torch.backends` entry point: runs at the end of `import torch`, imports nothing heavy, and installs the pass when Inductor comes."""

from __future__ import annotations

import logging

log = logging.getLogger("dash_inductor")


def autoload() -> None:
    from . import config
    from .import_hook import after_import
    from .install import JOINT_GRAPH, enable

    try:
        settings = config.current()
    except ValueError as error:
        # Not here, which would break `import torch` for scripts that compile nothing, and not never: who compiles gets the error.
        after_import(JOINT_GRAPH, lambda error=error: _raise(error), required=True)  # type: ignore[misc]
        return
    if not settings.enabled:
        return
    if settings.emulate:
        from .emulation import prepare_environment

        prepare_environment(seed=settings.seed, sms=settings.sms)
    try:
        enable()
    except Exception:  # ours to say, not a reason to break `import torch`
        log.exception("dash_inductor could not be installed; torch.compile is plain Inductor")


def _raise(error: Exception) -> None:
    raise error
