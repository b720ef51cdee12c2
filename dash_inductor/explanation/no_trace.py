"""Compilations that leave nothing behind in torch."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch._dynamo import convert_frame, eval_frame
from torch._dynamo.guards import DeletedGuardManagerWrapper
from torch._dynamo.utils import counters

# Of a process that has compiled as much as it likes; a failure is a failure.
DYNAMO = {
    "recompile_limit": 2**16,
    "accumulated_recompile_limit": 2**16,
    "suppress_errors": False,
}
NO_CACHE = {"fx_graph_cache": False, "fx_graph_remote_cache": False}


@contextlib.contextmanager
def leaving_no_trace() -> Iterator[None]:
    """What torch counts, draws and remembers is as before afterwards."""
    counted, drawn = copy.deepcopy(dict(counters)), random.getstate()
    numpy = sys.modules.get("numpy")
    drawn_by_numpy = numpy.random.get_state() if numpy else None
    with contextlib.ExitStack() as stack:
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(dynamo_config.patch(DYNAMO))
        stack.enter_context(inductor_config.patch(NO_CACHE))
        stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
        stack.enter_context(_code_caches_restored())
        try:
            yield
        finally:
            counters.clear()
            counters.update(counted)
            random.setstate(drawn)
            if numpy:
                numpy.random.set_state(drawn_by_numpy)


@contextlib.contextmanager
def _code_caches_restored() -> Iterator[None]:
    """What Dynamo compiles inside is found by nobody afterwards; what it compiled before, is."""
    before: dict[types.CodeType, list[Any]] = {}
    here = threading.get_ident()

    def remember(code: types.CodeType, new_code: types.CodeType) -> None:
        if threading.get_ident() == here:
            before.setdefault(code, [entry.guard_manager for entry in eval_frame._debug_get_cache_entry_list(code)])

    handle = convert_frame.register_bytecode_hook(remember)
    try:
        yield
    finally:
        handle.remove()
        for code, guards in before.items():
            if not guards:
                eval_frame.reset_code(code)
            else:
                _invalidate(code, guards)


def _invalidate(code: types.CodeType, kept: list[Any]) -> None:
    """Entries of the code but those with the guards `kept`, which the user's own calls have made, never match again."""
    for entry in eval_frame._debug_get_cache_entry_list(code):
        guards: Any = entry.guard_manager
        if not any(guards is x for x in kept):
            deleted: Any = DeletedGuardManagerWrapper("of dash_inductor.explain")
            # Dynamo limits how often it compiles for one object: this is said to be of another one than any frame has.
            deleted.id_matched_objs = {"dash_inductor.explain": weakref.ref(_invalidate)}
            guards.extra_state.invalidate(entry, deleted)
