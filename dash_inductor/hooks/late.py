"""Backwards that are compiled when they first run, and do not compile with our kernels: compiled once more with stock ones.

Their forward has run by then, and has kept what our kernels take. Flash attention's backward takes no more, and FlexAttention's
node still has all that the stock lowering takes. Of other ops something is missing: the compiler's error stays.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..config import current
from ..op import DECIDED, FLEX_BACKWARD, FLEX_PROBLEM, SDPA_BACKWARD, STOCK, FlexArguments
from ..rewrite.declined import DECIDED_UNDER, DECLINED
from ..rewrite.nodes import call
from ..rewrite.stock_ops import FLASH, FLASH_CPU
from .cache_key import key
from .failed import compiles_as_a_whole, reason_of
from .installed import COMPILE_FX
from .wrapped import unwrap, wrap

COMPILER = "compile_fx_backward"
aten = torch.ops.aten


def watch() -> None:
    """Sees backwards that fail from now on, as soon as Inductor is imported."""
    wrap(sys.modules.get(COMPILE_FX), COMPILER, _compile)


def unwatch() -> None:
    """Gives Inductor its own function back."""
    unwrap(sys.modules.get(COMPILE_FX), COMPILER)


def _compile(stock: Callable[..., Any], gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    under = {node.meta[DECIDED_UNDER] for node in gm.graph.nodes if DECIDED_UNDER in node.meta}
    if compiles_as_a_whole() or current().on_unsupported == "error" or under != {key()}:
        return stock(gm, *args, **kwargs)
    spare = _copied(gm)  # passes change the other one
    try:
        return stock(gm, *args, **kwargs)
    except Exception as failure:
        reason = reason_of(failure)
        if not _back_to_stock(spare.graph, reason):
            raise
    spare.recompile()  # its code is what Inductor's cache knows a graph by
    compiled = stock(spare, *args, **kwargs)
    warnings.warn(f"dash_inductor leaves a backward to the stock kernels: {reason}", stacklevel=2)
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
    """As a function that AOTAutograd's cache does not take: the key is that of the graph that did not compile."""

    def run(inputs: Any) -> Any:
        return compiled(inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _back_to_stock(graph: fx.Graph, reason: str) -> bool:
    """Gives all attentions that were rewritten back to the stock kernels; does nothing and is false where one cannot be."""
    ours = [node for node in graph.nodes if DECIDED_UNDER in node.meta]
    if not all(_has_all(node) for node in ours):
        return False
    for node in ours:
        if node.target is FLEX_BACKWARD:
            options = {name: value for name, value in FlexArguments(*node.args).kernel_options.items() if name != DECIDED}
            node.update_arg(FlexArguments._fields.index("kernel_options"), options)
            stock = node
        else:
            with graph.inserting_before(node):
                stock = graph.call_function(*_flash(graph, node))
            stock.meta = {**node.meta}
            node.replace_all_uses_with(stock)
            graph.erase_node(node)
        for name in (DECIDED_UNDER, FLEX_PROBLEM):
            stock.meta.pop(name, None)
        stock.meta[DECLINED] = reason
    return True


def _has_all(node: fx.Node) -> bool:
    if node.target is FLEX_BACKWARD:
        return STOCK not in FlexArguments(*node.args).kernel_options
    return node.target is SDPA_BACKWARD and node.kwargs["stock"] in (str(FLASH), str(FLASH_CPU))


def _flash(graph: fx.Graph, node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The call that becomes of one of our op; without dropout nobody reads random bits."""
    causal, scale = node.kwargs["mask"] == "causal", {"scale": node.kwargs["scale"]}
    if node.kwargs["stock"] == str(FLASH_CPU):
        return FLASH_CPU, (*node.args, 0.0, causal), scale
    query, key = (x for x in node.args[1:3] if isinstance(x, fx.Node))
    lengths = [_length(graph, x) for x in (query, key)]
    zeros = graph.call_function(aten.full.default, ([2], 0), {"dtype": torch.uint64, "device": query.meta["val"].device})
    with query.meta["val"].fake_mode:
        zeros.meta["val"] = torch.empty([2], dtype=torch.uint64, device=query.meta["val"].device)
    return FLASH, (*node.args, None, None, *lengths, 0.0, causal, zeros, zeros), scale


def _length(graph: fx.Graph, x: fx.Node) -> Any:
    length = x.meta["val"].shape[2]
    return length if isinstance(length, int) else call(graph, aten.sym_size.int, x, 2)
