"""Attentions that were rewritten, in a graph of a backward whose forward has run: given back to their stock kernels.

The forward has kept what our kernels take. Flash attention's backward takes no more, and FlexAttention's node still has all that
the stock lowering takes, but where its keys' gradients are in segments. Of other ops something is missing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..config import Config
from ..decision import Declined
from ..op import FLEX_BACKWARD, MARK, REWRITTEN, SDPA_BACKWARD, SEGMENTS, FlexArguments
from .declined import leave
from .graph import rewritten
from .nodes import aten, call, size_of
from .stock_ops import FLASH, FLASH_CPU


def give_back(graph: fx.Graph, declined: Declined, settings: Config) -> bool:
    """Gives all of them back, declined; does nothing and is false where one cannot be."""
    ours = rewritten(graph)
    if not all(_has_all(node) for node in ours):
        return False
    for node in ours:
        if node.target is FLEX_BACKWARD:
            del node.meta[MARK]
            for said in [x for x in node.all_input_nodes if x.target is REWRITTEN]:
                said.replace_all_uses_with(said.all_input_nodes[0])
                graph.erase_node(said)
        else:
            with graph.inserting_before(node):
                stock = graph.call_function(*_flash(graph, node))
            stock.meta = {name: value for name, value in node.meta.items() if name != MARK}
            node.replace_all_uses_with(stock)
            graph.erase_node(node)
            node = stock
        leave(node, declined, settings)
    return True


def _has_all(node: fx.Node) -> bool:
    if node.target is FLEX_BACKWARD:
        return not node.meta[MARK].stock and SEGMENTS not in FlexArguments(*node.args).kernel_options
    return node.target is SDPA_BACKWARD and node.kwargs["stock"] in (str(FLASH), str(FLASH_CPU))


def _flash(graph: fx.Graph, node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The call that becomes of one of our op; without dropout nobody reads random bits."""
    causal, scale = node.kwargs["mask"] == "causal", {"scale": node.kwargs["scale"]}
    if node.kwargs["stock"] == str(FLASH_CPU):
        return FLASH_CPU, (*node.args, 0.0, causal), scale
    query, key = (x for x in node.args[1:3] if isinstance(x, fx.Node))
    lengths = [size_of(graph, x, 2) for x in (query, key)]
    with query.meta["val"].fake_mode:
        zeros = call(graph, aten.full.default, [2], 0, dtype=torch.uint64, device=query.meta["val"].device)
    return FLASH, (*node.args, None, None, *lengths, 0.0, causal, zeros, zeros), scale
