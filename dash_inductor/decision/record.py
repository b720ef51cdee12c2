"""The record of what was decided for each attention.

A decision is taken while a graph is compiled, but a warm cache skips that. So it is written into the generated code, as a comment,
and read from there whenever a compiled graph is taken into use: cold, warm and in another process alike.
"""

from __future__ import annotations

import itertools
import logging
import re
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from ..schedule.formulas import formula_for
from .decided import Decision, Graph

MOST = 10_000  # entries: a process that compiles without end drops its oldest ones

log = logging.getLogger("dash_inductor")

_COMMENT = re.compile(r"^(?:#|//) dash_inductor decision \d+: (\{.*\})$", re.MULTILINE)
_entries: deque[Decision] = deque(maxlen=MOST)
_places: set[object] = set()  # of eager calls
_numbers = itertools.count()
_lock = threading.Lock()  # threads may compile at once


def decisions() -> list[Decision]:
    """One entry per attention of every compiled graph that this process took into use, in that order.

    Each time anew: of a graph out of a cache too, and of a second model with the same graph; `Decision.graph` tells them apart.
    The newest 10,000, since `clear_decisions()` if that was called. While the package is disabled nothing is recorded.
    """
    with _lock:
        return list(_entries)


def clear_decisions() -> None:
    """Empties the list of `decisions()`. Graphs compiled or loaded from then on are recorded again."""
    with _lock:
        _entries.clear()
        _places.clear()


def comment(index: int, decision: Decision) -> str:
    """The line of generated code that holds `decision`, the `index`-th of its graph; in C++ it begins with // instead."""
    return f"# dash_inductor decision {index}: {decision.text()}"


def decisions_in(code: str) -> list[Decision]:
    """Those that generated code holds, in the order of its comments."""
    return [Decision.of_text(text) for text in _COMMENT.findall(code)]


def take(found: Sequence[Decision], *, compile_id: str | None, compiled: str, is_backward: bool) -> Graph:
    """Records the decisions of a compiled graph that is taken into use, and logs them."""
    with _lock:
        graph = Graph(next(_numbers), compile_id, compiled, is_backward)
        _entries.extend(replace(decision, graph=graph) for decision in found)
    _log(str(graph), found)
    return graph


def add_eager(decision: Decision) -> None:
    """Records and logs what an eager call got, which is in no graph, unless such a call is recorded already."""
    with _lock:
        if decision in _entries:
            return
        _entries.append(decision)
    _log("eager call", [decision])


def is_new(place: object) -> bool:
    """Whether nobody has asked this of the place of an eager call since decisions were cleared."""
    with _lock:
        known = place in _places
        _places.add(place)
        return not known


def _log(subject: str, found: Sequence[Decision]) -> None:
    rewritten = sum(decision.rewritten for decision in found)
    attentions = "attention" if rewritten == 1 else "attentions"
    log.info("%s: %d %s rewritten, %d declined", subject, rewritten, attentions, len(found) - rewritten)
    for decision in found:
        log.debug("%s", decision)


def report(graph: Graph, found: Sequence[Decision]) -> dict[str, Any]:
    """What is known of a graph's attentions, for JSON; the formulas of candidates that have a time stand beside them, by mask."""
    formulas: dict[str, dict[str, dict[str, str]]] = {}
    for decision in found:
        for candidate in decision.candidates:
            formula = formula_for(candidate.family, decision.mask) if candidate.ns is not None else None
            if formula is not None:
                text = {"ns": str(formula), "applies_if": str(formula.applies)}
                formulas.setdefault(decision.mask, {})[candidate.family] = text
    return {"graph": asdict(graph), "attentions": [_row(decision) for decision in found], "formulas": formulas}


def _row(decision: Decision) -> dict[str, Any]:
    values = asdict(decision) | {"candidates": [candidate.row() for candidate in decision.candidates]}
    del values["graph"]
    return {"rewritten": decision.rewritten, "template": decision.template, **values}
