"""The record of what was decided for each attention.

A decision is taken while a graph is compiled, but a warm cache skips that. So it is written into the generated code, whose
loading records it: cold, warm and in another process alike. One entry per attention of every graph this process has loaded.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict

from .decided import Decision

log = logging.getLogger("dash_inductor")

_loaded: dict[tuple[str, int], Decision] = {}


def decisions() -> list[Decision]:
    """One entry per attention of every graph that this process has compiled or loaded, in the order of loading."""
    return list(_loaded.values())


def loading_line(index: int, decision: Decision) -> str:
    """The line of generated code that records `decision`, the `index`-th of its graph."""
    text = json.dumps(asdict(decision))
    return f"from dash_inductor.decision import loaded as _loaded; _loaded(__file__, {index}, {text!r})"


def loaded(module: str, index: int, text: str) -> None:
    """Called by generated code when it is loaded; `module` is its file, which names the graph."""
    add((module, index), Decision(**json.loads(text)))


def add(key: tuple[str, int], decision: Decision) -> None:
    """Records a decision under the graph it belongs to, and logs it, unless it stands there already."""
    if _loaded.get(key) != decision:
        _loaded[key] = decision
        log.info("%s", decision)
