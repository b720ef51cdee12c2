"""Graphs with rewritten attention that do not compile: compiled once more without ours, so that they keep their stock kernels.

No cache keeps such a graph, nor one in which the pass met a bug of its own: where the bug is mended, the attention is rewritten.

Where the backward is compiled together with the forward, as under backend="dash" and inside `enabled()`, that is possible for the
whole graph: nothing of it has run. Else the backward is compiled when it first runs. Then stock ops are put back where the forward
has kept what they take; where one cannot be, the compiler's error stays.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from torch import fx
from torch._dynamo.exc import RestartAnalysis

from ..config import current
from ..decision import Declined
from ..devices.cost_files import CostFileError
from ..first_use.verdict import UnfitKernelError, UntriedKernelError
from ..op import MARK
from ..rewrite.back_to_stock import give_back
from ..rewrite.declined import InternalError, UnsupportedAttentionError, report_bug
from ..rewrite.graph import rewritten
from ..rewrite.varlen import note_used_logsumexps
from .ranks import RanksDifferError

WHAT = "the graph did not compile with our kernels: "

_has_ours: ContextVar[bool | None] = ContextVar("has_ours", default=None)  # None where no graph is compiled as a whole
_failure: ContextVar[InternalError | None] = ContextVar("failure", default=None)
_is_uncached: ContextVar[bool] = ContextVar("is_uncached", default=False)


class _UncachedError(Exception):
    """Ends a compilation whose key others may have."""


def note_rewritten() -> None:
    """The graph that is compiled now has attentions that were rewritten."""
    if _has_ours.get() is not None:
        _has_ours.set(True)


def failure() -> InternalError | None:
    """Why the graph that is compiled now, for the second time, keeps its stock kernels; None where it is the first time."""
    return _failure.get()


def is_uncached() -> bool:
    """Whether the graph that is compiled now is to have a key of its own in caches."""
    return _is_uncached.get()


def keep_out_of_caches() -> None:
    """The graph that is compiled now is not to be found in a cache. Its key is made before the pass runs, so it begins anew."""
    if _has_ours.get() is not None and current().on_unsupported == "fallback" and not is_uncached():
        raise _UncachedError


def compile_graph(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stands around what compiles a graph and, unless that comes late, its backward."""
    for gm in args:
        if isinstance(gm, fx.GraphModule):
            note_used_logsumexps(gm)
    had_ours = _has_ours.set(False)
    try:
        try:
            return stock(*args, **kwargs)
        except (_UncachedError, UnfitKernelError, Declined):  # the latter of a graph out of a cache: the pass says what it gets
            return _uncached(stock, *args, **kwargs)
    # Dynamo's, which are no failures, and errors that the user asked for.
    except (RestartAnalysis, UnsupportedAttentionError, CostFileError, UntriedKernelError, RanksDifferError):
        raise
    except Exception as error:
        # Whose failure it is shows in the second try: what is not ours fails there as well.
        if not _has_ours.get() or failure():
            raise
        bug = InternalError(error, WHAT)
        was = _failure.set(bug)
        try:
            compiled = _uncached(stock, *args, **kwargs)
        except Exception:
            raise error from None
        finally:
            _failure.reset(was)
    finally:
        _has_ours.reset(had_ours)
    report_bug(bug)
    return compiled


def _uncached(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    was = _is_uncached.set(True)
    try:
        return stock(*args, **kwargs)
    finally:
        _is_uncached.reset(was)


def compile_late(stock: Callable[..., Any], gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    """Stands around what compiles a backward, perhaps when it first runs."""
    settings = current()
    ours = rewritten(gm.graph)
    if not ours or _has_ours.get() is not None or settings.on_unsupported == "error":
        return stock(gm, *args, **kwargs)
    if not all(node.meta[MARK].is_in_force(node.meta["val"][0].device) for node in ours):
        return stock(gm, *args, **kwargs)  # which says that the settings were changed
    spare = _copied(gm)  # passes change the other one
    try:
        return stock(gm, *args, **kwargs)
    except Exception as error:
        bug = InternalError(error, WHAT)
        if not give_back(spare.graph, bug, settings):
            raise
    spare.recompile()  # its code is what Inductor's cache knows a graph by
    compiled = stock(spare, *args, **kwargs)
    report_bug(bug)
    return _without_cache(compiled)


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    """Graphs of its own, inner ones too, over the same tensors."""
    spare = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    spare.meta = gm.meta
    for name, inner in gm.named_children():
        if isinstance(inner, fx.GraphModule):
            setattr(spare, name, _copied(inner))
    return spare


def _without_cache(compiled: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A compilation that AOTAutograd's cache does not take: the key is that of the graph that did not compile."""
    run = functools.partial(compiled)
    run._boxed_call = True  # type: ignore[attr-defined]
    return run
