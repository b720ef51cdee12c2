"""Deterministic mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch._inductor.config as inductor_config


@contextmanager
def deterministic(mode: bool = True, *, warn_only: bool = False) -> Iterator[None]:
    """Deterministic mode, strict unless `warn_only`, or none, and the caller's afterwards.

    The mode is the process's. So it is left alone where it is on as it should be.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with inductor_config.patch(deterministic=mode):  # as torch.use_... sets it
        if before != (mode, warn_only):
            torch.use_deterministic_algorithms(mode, warn_only=warn_only)
        try:
            yield
        finally:
            if before != (mode, warn_only):
                torch.use_deterministic_algorithms(before[0], warn_only=before[1])
