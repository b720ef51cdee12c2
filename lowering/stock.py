"""Stock SDPA backwards that the pass left alone: lowered as before, with the reason recorded."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._inductor import config as inductor_config
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import V

from dash_inductor import install
from dash_inductor.config import current
from dash_inductor.matching import leave
from dash_inductor.record import Decision, size_text
from dash_inductor.stock_ops import DECLINED, TARGETS, arguments
from dash_inductor.target import DTYPES

from .report import report


def _declined(node: torch.fx.Node) -> Decision:
    named = arguments(node)
    query, key = named["query"].meta["val"], named["key"].meta["val"]
    batch, heads, q_len, head_dim = (size_text(size) for size in query.shape)
    return Decision(
        op=str(node.target),
        device=str(query.device),
        dtype=DTYPES.get(query.dtype, str(query.dtype)),
        mask=_mask(named),
        batch=batch,
        heads=heads,
        kv_heads=size_text(key.shape[1]),
        q_len=q_len,
        kv_len=size_text(key.shape[2]),
        head_dim=head_dim,
        reason=node.meta[DECLINED],
    )


def _mask(named: dict[str, Any]) -> str:
    if any(named.get(name) is not None for name in ("attn_mask", "attn_bias")):
        return "given"
    return "causal" if named["is_causal"] else "full"


def _passed_over() -> bool:
    """Whether Inductor left out the pass, which would have met this node."""
    on = install.is_installed() and current().enabled and torch.are_deterministic_algorithms_enabled()
    return on and not inductor_config.pattern_matcher


def _recording(stock: Any) -> Any:
    @functools.wraps(stock)
    def lower(*args: Any, **kwargs: Any) -> Any:
        node = V.graph.current_node
        if node is not None:
            if DECLINED not in node.meta and _passed_over():
                leave(node, "torch._inductor.config.pattern_matcher is off")
            if DECLINED in node.meta:
                report(_declined(node))
        return stock(*args, **kwargs)

    return lower


for _target in TARGETS:
    if _target in lowerings:
        lowerings[_target] = _recording(lowerings[_target])
