"""The `torch.backends` entry point: runs in `import torch`, imports nothing heavy, and installs the pass when Inductor comes."""

from __future__ import annotations

import logging
import os
from types import ModuleType

log = logging.getLogger("dash_inductor")


def autoload() -> None:
    """Never raises, which would break `import torch` for scripts that compile nothing."""
    try:
        from . import install

        install.offer_eager()
        if any(name.startswith("DASH_INDUCTOR") for name in os.environ) and not _asked_for(install):
            install.tell_ranks_off()
            return
        install.want()
    except ImportError as error:  # of what emulation needs, and the variables ask for
        log.error("%s; torch.compile is plain Inductor", error)
    except Exception:
        log.exception("dash_inductor could not be installed; torch.compile is plain Inductor")


def _asked_for(install: ModuleType) -> bool:
    """Whether the variables leave the package on; prepares the emulation that they may ask for."""
    from ..config import current

    try:
        settings = current()
        if settings.enabled and settings.emulate:
            install.prepare_emulation()
        return settings.enabled
    except (ValueError, RuntimeError) as error:
        # A setting that is wrong, or an emulation that cannot be had. Not passed over: each compilation raises it.
        log.error("%s. Every torch.compile of this process will raise this: mend the variable, or unset it", error)
        return True
