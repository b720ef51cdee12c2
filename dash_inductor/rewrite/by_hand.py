"""Finds attention that is written by hand, and that Inductor has not made SDPA of, and says so of each.

It is a softmax, the exponentials of scores over their sum, between two batched matmuls, through which a gradient flows. Layers of a
model multiply by weights, which are not batched: what is batched on both sides of a softmax attends. Other matmuls may make a bias
of the scores. Attention of one sequence and one head, without such dimensions, is not found, nor one that mixes its heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import fx

from ..decision import UNKNOWN, Decision, Declined, size_text
from ..op import NOTE
from ..problem import dtype_name
from .declined import DROPOUT, WithoutOp
from .math_path import UNGROUPED, is_softmax
from .nodes import VIEWS, backward_of, is_tensor, original, reached

aten = torch.ops.aten

OP = "attention written by hand"
BATCHED = (aten.bmm.default, aten.baddbmm.default)
MATMULS = (*BATCHED, aten.mm.default, aten.addmm.default)
CONVERSIONS = (torch.ops.prims.convert_element_type.default, aten._to_copy.default, aten.expand.default, aten.unsqueeze.default)
SOFTMAXES = ("aten._softmax.default", "aten._log_softmax.default", "aten._safe_softmax.default")
TOLD = {"mul", "div", "add", "masked_fill", "where", "tanh", "softmax", "exp", "sum", "native_dropout"}  # what a user wrote
SDPA = "torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=..., attn_mask=..., scale=...)"
CAUSAL = "is_causal=True in place of a causal mask"
FLEX = "torch.nn.attention.flex_attention.flex_attention(query, key, value, score_mod=..., block_mask=...)"


def attentions(graph: fx.Graph) -> Iterator[WithoutOp]:
    """Of each a gradient in its backward, the exponentials of its scores, and what becomes of it."""
    exponentials = [node for node in graph.nodes if node.target in (aten.exp.default, aten.exp2.default) and _is_summed(node)]
    if not exponentials or not any(node.target in BATCHED for node in graph.nodes):
        return
    place = {node: index for index, node in enumerate(graph.nodes)}
    backward = backward_of(graph)
    for node in exponentials:
        if node in backward:
            continue
        before = reached([node], lambda x: () if x.target in MATMULS else x.all_input_nodes)
        weights = reached([node], lambda x: () if x in backward or x.target in MATMULS else x.users)
        with_keys, with_values = ({x for x in nodes - backward if x.target in MATMULS} for nodes in (before, weights))
        gradient = min(filter(is_tensor, weights & backward), key=place.__getitem__, default=None)
        if gradient is None or any(user.target is NOTE for user in gradient.users) or any(map(is_softmax, before | weights)):
            continue
        of_scores = [x for x in sorted(with_keys, key=place.__getitem__) if x.target in BATCHED]
        if len(with_keys) > 1:  # others make a bias
            of_scores = [x for x in of_scores if _elements(x) == _elements(node)]
        if of_scores and len(with_values) == 1 and all(x.target in BATCHED for x in with_values):
            after_keys = reached(with_keys, lambda x: x.users) - with_keys
            between = sorted((before | weights) & after_keys - backward - with_values, key=place.__getitem__)
            yield gradient, node, *_decided(node, of_scores[0], with_values.pop(), between)


def _elements(node: fx.Node) -> str:
    """How many, as text: a comparison of symbols would guard."""
    return str(node.meta["val"].numel())


def _is_summed(node: fx.Node) -> bool:
    """Along the last dimension, and divided by that."""
    following = reached([node], lambda x: x.users if x is node or x.target in (*VIEWS, aten.sum.dim_IntList, *CONVERSIONS) else ())
    sums = [x for x in following if x.target is aten.sum.dim_IntList]
    divided = any(x.target in (aten.div.Tensor, aten.reciprocal.default) for x in following)
    return divided and any(x.args[1] in ([-1], [node.meta["val"].dim() - 1]) for x in sums)


def _decided(exponentials: fx.Node, with_keys: fx.Node, with_values: fx.Node, between: list[fx.Node]) -> tuple[Decision, Declined]:
    """All but the origin."""
    scores, product = exponentials.meta["val"], with_values.meta["val"]
    *batch, heads, q_len, kv_len = scores.shape if scores.dim() > 3 else (1, 1, *scores.shape)[-4:]
    query = with_keys.args[-2].meta["val"]  # type: ignore[union-attr] # baddbmm has what it adds before
    of_query, of_value = size_text(query.shape[-1]), size_text(product.shape[-1])
    of_torch = any(function in UNGROUPED for _, function in exponentials.meta.get("source_fn_stack") or ())
    declined = _declined([_name(x) for x in between if is_tensor(x)], of_torch)
    decision = Decision(
        op=OP,
        device=str(scores.device),
        dtype=dtype_name(product.dtype),
        mask=UNKNOWN,
        batch=size_text(math.prod(batch)),
        heads=size_text(heads),
        kv_heads=size_text(heads),  # as the matmuls see them
        q_len=size_text(q_len),
        kv_len=size_text(kv_len),
        head_dim=of_query if of_query == of_value else f"{of_query}/{of_value}",
        reason=str(declined),
        remedy=declined.remedy,
    )
    return decision, declined


def _declined(names: list[str], of_torch: bool) -> Declined:
    """With the ops that were seen, by which the remedy goes."""
    seen = dict.fromkeys(name for name in names if name in TOLD)
    reason = f"it is no call of attention, but what one does: bmm, {', '.join(seen)}, bmm"
    if of_torch:
        return Declined(reason, "call torch.nn.MultiheadAttention with need_weights=False")
    if "tanh" in seen:
        return Declined(reason, f"call {FLEX}, whose score_mod may change scores")
    return Declined(reason, f"call {SDPA}; {DROPOUT if 'native_dropout' in seen else CAUSAL}")


def _name(node: fx.Node) -> str:
    """The op as the user knows it: all that softmax becomes is softmax."""
    name = original(node)
    return "softmax" if name in SOFTMAXES else name.split(".")[1] if name.startswith("aten.") else str(node.target).split(".")[1]
