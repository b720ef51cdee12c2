"""The ops below SDPA's, which xformers calls: dense tensors [B, S, H, D]. The op of SDPA takes their place, on views.

Sequences one after the other, which these ops take as well, are SDPA's of jagged tensors, and stay.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from ..config import Config
from ..decision import Declined
from . import sdpa
from .nodes import SWAPPED, aten, call, value_of
from .stock_ops import CALLED, EFFICIENT, FLASH, JAGGED, arguments

TOP_LEFT, BOTTOM_RIGHT = 1, 2  # custom_mask_type of the memory-efficient op
WINDOW = "a window of the op below SDPA's is not rewritten", "use flex_attention, or varlen_attn, which takes a window_size"
ALIGNED = (
    "a causal mask that is aligned to the last query and key, of the memory-efficient op, with lengths that differ",
    "take flash attention, or give SDPA the mask",
)


def rewrite(node: fx.Node, settings: Config) -> list[fx.Node]:
    """Puts a node of ours in the place of such an op; returns the nodes that are obsolete.

    Raises:
        Declined: it keeps the stock kernel.
    """
    named, graph = arguments(node), node.graph
    is_flash = "is_causal" in named
    op, after_logsumexp = _of_flash(named) if is_flash else _of_efficient(named)
    gradients = list(node.users)
    with graph.inserting_before(node):
        query, key, value, out, grad_out = (
            call(graph, aten.permute.default, named[name], SWAPPED)
            for name in ("query", "key", "value", "out", "grad_out" if is_flash else "grad_out_")
        )
        bias = () if is_flash else (named["bias"],)
        arguments_of_sdpa = grad_out, query, key, value, *bias, out, named["logsumexp"], *after_logsumexp
        backward = graph.call_function(op, arguments_of_sdpa, {"scale": named["scale"]})
        values = [None if x is None else x.transpose(1, 2) for x in node.meta["val"][:3]]
        backward.meta = {**node.meta, "val": (*values, *node.meta["val"][3:]), CALLED: node.target}
        for gradient in gradients:
            first = call(graph, operator.getitem, backward, gradient.args[1])
            last = first if gradient.args[1] == 3 else call(graph, aten.permute.default, first, SWAPPED)
            gradient.replace_all_uses_with(last)
    return [
        *sdpa.rewrite(backward, settings),
        *gradients,
        node,
    ]


def _of_flash(named: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """SDPA's op, and its arguments behind the logsumexp."""
    if named["cum_seq_q"] is not None:
        raise Declined(*JAGGED)
    if any(value_of(named[side]) not in (None, -1) for side in ("window_size_left", "window_size_right")):
        raise Declined(*WINDOW)
    names = "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "rng_state", "unused"
    return FLASH, tuple(named[name] for name in names)


def _of_efficient(named: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    if named["cu_seqlens_q"] is not None:
        raise Declined(*JAGGED)
    if named["window_size"]:
        raise Declined(*WINDOW)
    q_len, kv_len = (value_of(named[name]).shape[1] for name in ("query", "key"))
    if named["custom_mask_type"] == BOTTOM_RIGHT and q_len != kv_len:
        raise Declined(*ALIGNED)
    wanted = [True, True, True, named["bias_requires_grad"]]
    names = "philox_seed", "philox_offset", "dropout_p"
    return EFFICIENT, (*(named[name] for name in names), wanted, named["custom_mask_type"] in (TOP_LEFT, BOTTOM_RIGHT))
