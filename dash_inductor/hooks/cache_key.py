"""What our code adds to Inductor's cache keys: lowerings and templates outside torch are not in them by themselves."""

from __future__ import annotations

import os
from typing import Any

from torch._dynamo import compiled_autograd
from torch._dynamo import config as dynamo_config
from torch._inductor.custom_graph_pass import CustomGraphModulePass
from torch._inductor.utils import get_donated_idxs

from .. import emulation
from ..config import current
from ..devices.cost_files import digest_of
from ..devices.target import reserved_sms, sms_of_gpus
from ..first_use.machine import driver, sources_digest
from ..resolve import as_if_small
from ..rewrite.stock_ops import active_implementation
from ..schedule.packing import as_if_long
from . import failures


def settings_key() -> tuple[Any, ...]:
    """All of ours that decides what is generated, the user's own cost file among it; torch's flash attention; the driver, with
    which a kernel was tried; and whether this is a trial of what long sequences take, or of the smaller tile."""
    settings, emulated = current(), emulation.settings()
    sms = reserved_sms(settings), sms_of_gpus(), None if emulated is None else emulated.sms
    costs = digest_of(settings.costs)
    tried = as_if_long.get(), as_if_small.get()
    return sources_digest(), settings.deciding(), costs, *sms, active_implementation(), driver(), *tried


def _is_for_compiled_autograd() -> bool:
    """Whether a backward is to be compiled again, by compiled autograd. Out of a cache torch cannot read one that has a node of
    FlexAttention with captured tensors, as attention under a mask has."""
    is_on = dynamo_config.compiled_autograd or compiled_autograd.compiled_autograd_enabled
    return is_on and not compiled_autograd.in_compiled_autograd_region


class CacheKey(CustomGraphModulePass):
    """A pass that does nothing: its uuid is part of the FX graph cache's and the AOTAutograd cache's keys."""

    def __call__(self, gm: Any) -> None:
        """Nothing."""

    def uuid(self) -> Any:
        """The key, anew for each graph where a cache hit would skip a warning or an error, or could not be compiled again."""
        is_new = current().on_unsupported != "fallback" or failures.is_uncached() or _is_for_compiled_autograd()
        nonce = os.urandom(16) if is_new else None
        # Which saved tensors a backward may overwrite is in its code, and in no key of Inductor.
        return *settings_key(), nonce, tuple(get_donated_idxs() or ())


KEY = CacheKey()
