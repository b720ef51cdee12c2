"""What lowerings write into the head of the generated code: decisions, which survive caches there, and what kernels call."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from torch._dynamo.utils import counters
from torch._inductor.graph import GraphLowering
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import V

from dash_inductor.decision import Decision, comment
from dash_inductor.first_use.kind import kinds_of
from dash_inductor.op import FLEX_BACKWARD, MARK, Mark
from dash_inductor.text import digest

NOT_IN_FORCE = (
    "dash_inductor was disabled, or its settings were changed, between the forward and the first backward of a graph "
    "(torch's SM carve-out is one of them): "
    "run the backward before that, or compile with backend='dash' or inside `with dash_inductor.enabled()`"
)


def is_in_use() -> bool:
    """Whether the package is in Inductor, its cache key too: then the lowering of FlexAttention's backward is ours."""
    return hasattr(lowerings.get(FLEX_BACKWARD), "dash_inductor")


def mark_in_force() -> Mark:
    """What the pass says of the node that is lowered; an empty mark where it says nothing.

    Raises:
        RuntimeError: the package was disabled, or its settings were changed, since the pass saw the node: caches would take the
            code for that of other settings.
    """
    node = V.graph.current_node
    mark: Mark = node.meta.get(MARK, Mark())
    if mark.resolution is None:
        return mark
    if is_in_use() and mark.is_in_force(node.meta["val"][0].device):
        return mark
    raise RuntimeError(NOT_IN_FORCE)


def add_kernel(*decides: object) -> None:
    """Notes what decides the code of a kernel, for the next decision that is recorded."""
    root_graph().__dict__.setdefault("dash_kernels", []).append(repr(decides))


def record(decision: Decision) -> None:
    """Counts the decision, and writes it into the generated code, from where it is recorded whenever that is taken into use.

    Its `source`, `module` and `joint` are those of the node that is lowered, its `code` is of the kernels that were added since the
    last one.

    The counter is bumped here because Inductor restores on a cache hit what counters gained while a graph was lowered.
    """
    mark: Mark = V.graph.current_node.meta.get(MARK, Mark())
    kinds = tuple(kind.text() for kind in kinds_of(mark.resolution)) if mark.resolution else ()
    graph = root_graph()
    code = digest("\n".join(graph.__dict__.pop("dash_kernels", ()))) if decision.rewritten else ""
    decision = replace(decision, source=mark.source, module=mark.module, joint=mark.joint, kinds=kinds, code=code)
    counters["inductor"]["dash_rewritten" if decision.rewritten else "dash_declined"] += 1
    if mark.at_load:
        add_to_header(graph, mark.at_load)
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
