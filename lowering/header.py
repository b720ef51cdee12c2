"""What lowerings write into the head of the generated code: decisions, which survive caches there, and what kernels call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import fx
from torch._dynamo.utils import counters
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V

from dash_inductor.decision import ORIGIN, Decision, comment
from dash_inductor.op import AT_LOAD

checks: list[Callable[[fx.Node], None]] = []  # what the pass wants to hold of a node that is lowered; they raise


def record(decision: Decision) -> None:
    """Counts the decision, and writes it into the generated code, from where it is recorded whenever that is taken into use.

    Its `source` and `module` are those of the node that is lowered.

    The counter is bumped here because Inductor restores on a cache hit what counters gained while a graph was lowered.
    """
    node = V.graph.current_node
    if node is not None:
        for check in checks:
            check(node)
        decision = replace(decision, **node.meta.get(ORIGIN, {}))
    counters["inductor"]["dash_rewritten" if decision.rewritten else "dash_declined"] += 1
    graph = root_graph()
    if node is not None and AT_LOAD in node.meta:
        add_to_header(graph, node.meta[AT_LOAD])
    index = graph.__dict__["dash_decisions"] = graph.__dict__.get("dash_decisions", -1) + 1
    add_to_header(graph, comment(index, decision))


def root_graph() -> GraphLowering:
    """The graph whose module holds the code of the current one, which may be the body of a cond or a loop."""
    graph = V.graph
    while hasattr(graph, "parent"):
        graph = graph.parent
    return graph


def add_to_header(graph: GraphLowering, source: str) -> None:
    """Writes Python source, or a comment, at the top of the code generated for `graph`, once."""
    sources = graph.__dict__.setdefault("dash_header", [])
    if source in sources:
        return
    sources.append(source)
    if graph.wrapper_code is not None:
        _write(graph, source)
    elif len(sources) == 1:
        graph.init_wrapper_code = functools.partial(_init_with_header, graph, graph.init_wrapper_code)


def _init_with_header(graph: Any, init_wrapper_code: Any, is_subgraph: bool = False, *args: Any, **kwargs: Any) -> None:
    init_wrapper_code(is_subgraph, *args, **kwargs)
    if not is_subgraph:  # not again for each partition of a graph
        for source in graph.dash_header:
            _write(graph, source)


def _write(graph: Any, source: str) -> None:
    if graph.cpp_wrapper:  # nothing of ours is in C++, where just the comments have a meaning
        source = f"//{source[1:]}" if source.startswith("#") else ""
    graph.wrapper_code.header.splice(source)
