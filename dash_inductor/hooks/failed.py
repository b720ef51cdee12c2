"""Graphs with rewritten attention that do not compile: compiled once more without the pass, so that they keep their stock kernels.

That is possible as long as no part of a graph has run: where the backward is compiled together with the forward, as under
backend="dash" and inside `enabled()`. late.py has the others.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from torch._dynamo.exc import RestartAnalysis

from ..decision import NOT_COMPILED
from .wrapped import unwrap, wrap

BACKENDS = "torch._dynamo.backends.common"
COMPILER = "AotAutograd"  # a call compiles a graph and, unless that comes late, its backward

_rewritten: ContextVar[bool | None] = ContextVar("rewritten", default=None)  # None where no graph is compiled
_reason: ContextVar[str | None] = ContextVar("reason", default=None)


def watch() -> None:
    """Sees graphs that fail from now on, as soon as Inductor is imported."""
    wrap(getattr(sys.modules.get(BACKENDS), COMPILER, None), "__call__", _compile)


def unwatch() -> None:
    """Gives Inductor its own function back."""
    unwrap(getattr(sys.modules.get(BACKENDS), COMPILER, None), "__call__")


def note_rewritten() -> None:
    """The graph that is compiled now has attentions that were rewritten."""
    if compiles_as_a_whole():
        _rewritten.set(True)


@contextlib.contextmanager
def ours_if_it_fails() -> Iterator[None]:
    """What fails inside is taken for a failure of rewritten attentions."""
    was = _rewritten.get()
    note_rewritten()
    yield
    _rewritten.set(was)


def compiles_as_a_whole() -> bool:
    """Whether what is compiled now can be tried again with all of its graph: nothing of it has run."""
    return _rewritten.get() is not None


def reason_of(failure: Exception) -> str:
    """The reason of attentions that lose their kernels for it."""
    first_line = next(iter(str(failure).splitlines()), "")
    return f"{NOT_COMPILED} ({type(failure).__name__}: {first_line})"


def why_failed() -> str | None:
    """Why the graph that is compiled now, for the second time, keeps its stock kernels; None where it is the first time."""
    return _reason.get()


def _compile(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    was_rewritten = _rewritten.set(False)
    try:
        return stock(*args, **kwargs)
    except RestartAnalysis:  # Dynamo's, and no failure
        raise
    except Exception as failure:
        # Whose failure it is shows in the second try: what is not ours fails there as well.
        if not _rewritten.get() or why_failed():
            raise
        return _second_try(lambda: stock(*args, **kwargs), failure)
    finally:
        _rewritten.reset(was_rewritten)


def _second_try(compile_graph: Callable[[], Any], failure: Exception) -> Any:
    reason = reason_of(failure)
    was = _reason.set(reason)
    try:
        compiled = compile_graph()
    except Exception:  # under on_unsupported="error" always
        compiled = None
    finally:
        _reason.reset(was)
    if compiled is None:
        raise failure
    warnings.warn(f"dash_inductor leaves a graph to the stock kernels: {reason}", stacklevel=2)
    return compiled
