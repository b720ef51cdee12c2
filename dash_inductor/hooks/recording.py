"""Compiled graphs as they are taken into use: what was decided in them is recorded, logged and traced.

Inductor hands out every graph through `CompiledFxGraph.post_compile`, whether it was compiled just now or comes out of a cache, and
in the context of Dynamo's compilation, which a backward that is compiled late has too.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._guards import CompileContext
from torch._logging import trace_structured

from ..config import current
from ..contract import live
from ..contract.graphs import graph_of
from ..decision import Decision, Graph, decisions_in, is_of_torch, report, take
from ..first_use.kind import Kind
from ..first_use.verdict import is_trial, require_fit_kinds
from ..rewrite.stock_ops import active_implementation
from ..rewrite.varlen import LOGSUMEXP
from ..templates.tiles import EMULATED
from . import ranks

DYNAMO = "torch._dynamo.symbolic_convert"
GONE = (
    "dash_inductor left an attention of this graph to {0}, which was active in torch's registry when the graph was compiled and is "
    "not now, so that the backward need not be deterministic. Call torch._dynamo.reset() after another implementation is activated "
    "or restored, or activate {0} again"
)
COMPILED = "dash_compiled"  # in a compile context: `compiled_by`
_warned: set[str] = set()


def post_compile(stock: Callable[..., None], graph: Any, inputs: Sequence[Any], constants: Any, options: Any) -> None:
    """Stands around the function that takes a graph into use."""
    stock(graph, inputs, constants, options)
    if is_trial.get():
        return
    context = CompileContext.try_get()
    name = _compiled_by_dynamo() or getattr(context, COMPILED, "")
    if context is not None:
        setattr(context, COMPILED, name)  # a backward that is compiled late has the forward's context, and no Dynamo around it
    code = getattr(graph, "source_code", "")
    found, is_backward = decisions_in(code), bool(options["is_backward"])
    compile_id = None if context is None or context.compile_id is None else str(context.compile_id)
    if not found:
        if torch.are_deterministic_algorithms_enabled():
            _keep(graph, code, found, Graph(0, compile_id, name, is_backward))
            ranks.compare()
        return
    _require_fit(graph, found)
    _require_implementations(graph, found)
    _keep(graph, code, found, Graph(0, compile_id, name, is_backward))
    _warn_whatever_settings_say(found)
    ranks.compare(found, is_backward=is_backward)
    taken = take(found, compile_id=compile_id, compiled=name, is_backward=is_backward)
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "dash_inductor", "encoding": "json"},
        payload_fn=lambda: json.dumps(report(taken, found), indent=1),
    )


def _keep(graph: Any, code: str, found: Sequence[Decision], named: Graph) -> None:
    """For manifests; ManifestError where this process is held to one that has another graph."""
    live.take(graph_of(code, found, str(named), getattr(graph, "guards_expr", None)))


def _require_fit(graph: Any, found: Sequence[Decision]) -> None:
    """Asks for the verdicts on a graph's kernels: out of a cache it comes without the pass, which asks for them too.

    Raises:
        UnfitKernelError, Declined, UntriedKernelError: as `first_use.verdict.require_fit_kinds`.
    """
    kinds = [Kind.of_text(text) for decision in found for text in decision.kinds]
    if kinds:
        gpus = [torch.device("cuda", index) for index in sorted(graph.device_idxs)] or [torch.device("cuda")]
        for device in [torch.device("cpu")] if kinds[0].arch == EMULATED else gpus:
            require_fit_kinds(kinds, device)


def _require_implementations(graph: Any, found: Sequence[Decision]) -> None:
    """Has a graph see, whenever it runs, that the implementations of flash attention to which it leaves attentions are active."""
    needed = sorted({decision.left_to for decision in found if decision.left_to})
    if not needed:
        return
    run = graph.current_callable

    def checked(inputs: Any) -> Any:
        for implementation in needed:
            if active_implementation() != implementation and torch.are_deterministic_algorithms_enabled():
                raise RuntimeError(GONE.format(implementation))
        return run(inputs)

    graph.current_callable = checked


def _warn_whatever_settings_say(found: Sequence[Decision]) -> None:
    """Once, of wrong gradients, and of another package's op: where torch's own raises or warns, for it is not deterministic, that
    says nothing."""
    for decision in found:
        told = decision.op in _warned or current().silences(decision.op)
        is_worst = decision.reason == LOGSUMEXP[0] or (decision.stock_differs and not is_of_torch(decision.op))
        if is_worst and not told:
            _warned.add(decision.op)
            warnings.warn(f"dash_inductor: {decision}", stacklevel=2)


def _compiled_by_dynamo() -> str:
    """The class of the module whose method Dynamo compiles at the moment, or the name of the function; "" if there is none."""
    translator = getattr(getattr(sys.modules.get(DYNAMO), "tls", None), "current_tx", None)
    if translator is None:
        return ""
    first = translator.f_locals.get(next(iter(translator.f_code.co_varnames), None))
    return type(first).__name__ if isinstance(first, torch.nn.Module) else translator.f_code.co_name
