"""The `torch.backends` entry point: runs in `import torch`, imports nothing heavy, and installs the pass when Inductor comes."""

from __future__ import annotations

import logging

log = logging.getLogger("dash_inductor")


def autoload() -> None:
    """Never raises, which would break `import torch` for scripts that compile nothing."""
    try:
        from . import install
        from .config import current

        try:
            if not current().enabled:
                return
            if current().emulate:
                install.prepare_emulation()
        except (ValueError, RuntimeError):
            # A setting that is wrong, or an emulation that cannot be had. Not passed over: each compilation raises it again.
            log.debug("dash_inductor cannot be set up", exc_info=True)
        install.want()
    except Exception:
        log.exception("dash_inductor could not be installed; torch.compile is plain Inductor")
