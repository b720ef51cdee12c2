"""Records decisions from inside a lowering, in a way that survives caches."""

from __future__ import annotations

import functools
from typing import Any

from torch._dynamo.utils import counters
from torch._inductor.virtualized import V

from dash_inductor import install, record, salt
from dash_inductor.stock_ops import DECIDED_UNDER


def report(decision: record.Decision) -> None:
    """Counts the decision, and writes it into the generated code, which records it whenever it is loaded.

    The counter is bumped here because Inductor restores on a cache hit what counters gained while a graph was lowered.
    """
    _require_same_settings()
    counters["inductor"]["dash_rewritten" if decision.rewritten else "dash_declined"] += 1
    graph = root_graph()
    if graph.cpp_wrapper:  # no Python is loaded there
        record.add((f"cpp_wrapper graph {id(graph)}", len(graph.operations)), decision)
        return
    noted = graph.__dict__.setdefault("dash_decisions", [])
    noted.append(decision)
    add_to_header(graph, record.loading_line(len(noted) - 1, decision))


def root_graph() -> Any:
    """The graph whose module holds the code of the current one, which may be the body of a cond or a loop."""
    graph: Any = V.graph
    while hasattr(graph, "parent"):
        graph = graph.parent
    return graph


def add_to_header(graph: Any, source: str) -> None:
    """Writes Python source at the top of the module generated for `graph`, once."""
    sources = graph.__dict__.setdefault("dash_header", [])
    if source in sources:
        return
    sources.append(source)
    if graph.wrapper_code is not None:
        graph.wrapper_code.header.splice(source)
    elif len(sources) == 1:
        graph.init_wrapper_code = functools.partial(_init_with_header, graph, graph.init_wrapper_code)


def _init_with_header(graph: Any, init_wrapper_code: Any, is_subgraph: bool = False, *args: Any, **kwargs: Any) -> None:
    init_wrapper_code(is_subgraph, *args, **kwargs)
    if not is_subgraph:  # not again for each partition of a graph
        for source in graph.dash_header:
            graph.wrapper_code.header.splice(source)


def _require_same_settings() -> None:
    """Raises if the settings are not those under which the pass rewrote the node: caches would take the code for theirs."""
    node = V.graph.current_node
    decided_under = None if node is None else node.meta.get(DECIDED_UNDER)
    if decided_under is not None and not (install.is_installed() and decided_under == salt.key()):
        raise RuntimeError(
            "dash_inductor was disabled, or its settings were changed, between the forward and the first backward of a graph "
            "(torch's SM carve-out is one of them): "
            "run the backward before that, or compile with backend='dash' or inside `with dash_inductor.enabled()`"
        )
