"""Whether the pass is in Inductor at the moment."""

from __future__ import annotations

import sys

COMPILE_FX = "torch._inductor.compile_fx"
BACKEND_PASS = "dash_inductor"  # its name among Inductor's custom backend passes


def is_installed() -> bool:
    """Whether pass and cache key are in Inductor, which need not be imported."""
    common = sys.modules.get("torch._inductor.codegen.common")
    return common is not None and BACKEND_PASS in common.custom_backend_passes
