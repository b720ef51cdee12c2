"""Finds attention that is written by hand, and that Inductor has not made SDPA of, and says so of each.

It is a softmax, the exponentials of scores over their sum, between two batched matmuls, through which a gradient flows. Layers of a
model multiply by weights, which are not batched: what is batched on both sides of a softmax attends. Other matmuls may make a bias
of the scores, or mix the heads. Attention of one sequence and one head, without such dimensions, is not found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..decision import Decision, Declined, size_text
from ..op import NOTE
from ..problem import dtype_name
from .declined import DROPOUT, WithoutOp, decision_of_scores
from .math_path import UNGROUPED, is_softmax
from .nodes import VIEWS, aten, backward_of, first_tensor, is_tensor, original, reached

OTHER_DIM = "dash_softmax_dim"  # in the notes of a node: along which dimension the softmax is that it is made of
OP = "attention written by hand"
BATCHED = (aten.bmm.default, aten.baddbmm.default)
MATMULS = (*BATCHED, aten.mm.default, aten.addmm.default)
CONVERSIONS = (torch.ops.prims.convert_element_type.default, aten._to_copy.default, aten.expand.default, aten.unsqueeze.default)
PASSED = (*VIEWS, *CONVERSIONS, aten.permute.default, aten.clone.default)
SOFTMAXES = ("aten._softmax.default", "aten._log_softmax.default", "aten._safe_softmax.default")
TOLD = {
    "mul",
    "div",
    "add",
    "masked_fill",
    "where",
    "tanh",
    "softmax",
    "exp",
    "sum",
    "native_dropout",
    "convolution",
    "cat",
}  # what a user wrote
SDPA = "torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=..., attn_mask=..., scale=...)"
CAUSAL = "is_causal=True in place of a causal mask"
SINK = (
    "call torch.nn.attention.flex_attention.flex_attention(..., return_aux=AuxRequest(lse=True)) without the column, and multiply "
    "the output with torch.sigmoid(lse - sink)"
)
IN_NO_CALL = "none: no call does that; what it is made of is deterministic in strict mode as it is"
FLEX = "torch.nn.attention.flex_attention.flex_attention(query, key, value, score_mod=..., block_mask=...)"


def softmaxes(graph: fx.Graph) -> dict[fx.Node, int]:
    """The exponentials of each, and along which dimension it is, -1 for the last."""
    exponentials = [node for node in graph.nodes if node.target in (aten.exp.default, aten.exp2.default)]
    return {node: dim for node in exponentials if (dim := _summed_dim(node)) is not None}


def mark_other_dims(graph: fx.Graph) -> None:
    """Notes what is made of softmaxes along other dimensions than the last, before Inductor's patterns: to those of some versions
    of torch any dimension is the last, and they make an op of attention of it, which computes another one.

    The op gets the notes of the node whose place it takes, by torch 2.13; before, who takes that has them.
    """
    for node, dim in softmaxes(graph).items():
        if dim == -1:
            continue
        weights = reached([node], lambda x: () if x.target in MATMULS else x.users)
        products = reached((x for x in weights if x.target in MATMULS), _passed_on)
        for x in products:
            _note(x, OTHER_DIM, dim)
            for user in x.users.keys() - products:
                _note(user, f"{OTHER_DIM} {user.all_input_nodes.index(x)}", dim)


def _note(node: fx.Node, key: str, dim: int) -> None:
    node.meta["custom"] = {**node.meta.get("custom", {}), key: dim}  # where patterns keep what users write


def _passed_on(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if user.target in PASSED]


def require_last_dim(out: fx.Node) -> None:
    """Raises Declined for the output of an op that Inductor has made of a softmax along another dimension."""
    dims = set[int]()
    for x in reached([out], _passed_on):
        notes = {OTHER_DIM: x, **{f"{OTHER_DIM} {user.all_input_nodes.index(x)}": user for user in x.users}}
        dims |= {node.meta["custom"][key] for key, node in notes.items() if key in node.meta.get("custom", {})}
    if dims:
        of_torch = f"a bug of torch {torch.__version__}"
        raise Declined(
            f"Inductor has made it of a softmax along dim {max(dims)}, and computes one along the last: {of_torch}",
            "transpose the scores: (key @ query.mT).softmax(-1).mT @ value for one along dim -2; torch 2.15 does not need that",
        )


def attentions(graph: fx.Graph) -> Iterator[WithoutOp]:
    """For each attention: a gradient in its backward, the exponentials of its scores, and what becomes of it."""
    exponentials = softmaxes(graph)
    if not exponentials or not any(node.target in BATCHED for node in graph.nodes):
        return
    backward = backward_of(graph)
    for node, dim in exponentials.items():
        if node in backward:
            continue
        heads = node.meta["val"].shape[-3] if node.meta["val"].dim() > 3 else None
        ends = {x for x in graph.nodes if x.target in MATMULS and not _mixes(x, heads)}
        before = reached([node], lambda x, ends=ends: () if x in ends else x.all_input_nodes)  # type: ignore[misc]
        weights = reached([node], lambda x, ends=ends: () if x in backward or x in ends else x.users)  # type: ignore[misc]
        with_keys, with_values = (nodes & ends - backward for nodes in (before, weights))
        gradient = first_tensor(graph, weights & backward)
        if gradient is None or any(user.target is NOTE for user in gradient.users) or any(map(is_softmax, before | weights)):
            continue
        if not (with_values and all(x.target in BATCHED for x in with_values) and len(with_values) == 1):
            continue
        (product,) = with_values
        of_keys: Any = product.args[-2]  # the weights that the values are multiplied with, without a column of a sink
        of_scores = [x for x in graph.nodes if x in with_keys and x.target in BATCHED]
        if len(with_keys) > 1:  # others make a bias
            of_scores = [x for x in of_scores if _elements(x) == _elements(of_keys)]
        if of_scores:
            after_keys = reached(with_keys, lambda x: x.users) - with_keys
            inside = (before | weights) & after_keys - backward - with_values
            between = [x for x in graph.nodes if x in inside]
            why = _why_no_call(between, heads, dim, has_sink=_elements(of_keys) != _elements(node))
            yield gradient, node, *_decided(node, of_scores[0], product, between, why)


def _why_no_call(between: list[fx.Node], heads: Any, dim: int, *, has_sink: bool) -> tuple[str, str] | None:
    """What keeps SDPA from saying it, and what to do; None if nothing does."""
    if any(x.target in MATMULS or original(x) == "aten.convolution.default" for x in between):
        return "heads that are mixed", IN_NO_CALL
    if dim != -1:
        return f"a softmax along dim {dim}", IN_NO_CALL
    return ("a column beside the keys", SINK) if has_sink else None


def _mixes(x: fx.Node, heads: Any) -> bool:
    """Whether a matmul is one with a matrix of heads and heads."""
    for operand in x.args[-2:]:  # addmm has what it adds before
        source: Any = operand
        while source.target in PASSED:
            source = source.args[0]
        sizes = [str(size) for size in operand.meta["val"].shape[-2:]]  # type: ignore[union-attr]
        if sizes == [str(heads)] * 2 and _elements(source) == str(heads * heads):
            return True
    return False


def _elements(node: fx.Node) -> str:
    """How many, as text: a comparison of symbols would guard."""
    return str(node.meta["val"].numel())


def _summed_dim(node: fx.Node) -> int | None:
    """Along which it is summed, and divided by that sum, counted from the last, -1; None if it is not."""
    following = reached([node], lambda x: x.users if x is node or x.target in (*VIEWS, aten.sum.dim_IntList, *CONVERSIONS) else ())
    dims: list[Any] = [x.args[1] for x in following if x.target is aten.sum.dim_IntList]
    divided = any(x.target in (aten.div.Tensor, aten.reciprocal.default) for x in following)
    found = {dim[0] % node.meta["val"].dim() - node.meta["val"].dim() for dim in dims if divided and len(dim) == 1}
    return max(found, default=None)


def _decided(
    exponentials: fx.Node, with_keys: fx.Node, with_values: fx.Node, between: list[fx.Node], why: tuple[str, str] | None
) -> tuple[Decision, Declined]:
    """All but the origin."""
    product = with_values.meta["val"]
    kv_len = with_values.args[-2].meta["val"].shape[-1]  # type: ignore[union-attr]
    query = with_keys.args[-2].meta["val"]  # type: ignore[union-attr] # baddbmm has what it adds before
    of_query, of_value = size_text(query.shape[-1]), size_text(product.shape[-1])
    of_torch = any(function in UNGROUPED for _, function in exponentials.meta.get("source_fn_stack") or ())
    declined = _declined([_name(x) for x in between if is_tensor(x)], of_torch, why)
    head_dim = of_query if of_query == of_value else f"{of_query}/{of_value}"
    decision = decision_of_scores(OP, exponentials.meta["val"], dtype_name(product.dtype), head_dim, declined)
    return replace(decision, kv_len=size_text(kv_len)), declined


def _declined(names: list[str], of_torch: bool, why: tuple[str, str] | None) -> Declined:
    """With the ops that were seen, by which the remedy goes."""
    seen = dict.fromkeys(name for name in names if name in TOLD)
    reason = f"it is no call of attention, but what one does: bmm, {', '.join(seen)}, bmm"
    if of_torch:
        return Declined(reason, "call torch.nn.MultiheadAttention with need_weights=False")
    if why:
        return Declined(f"{reason}, with {why[0]}", why[1])
    if "tanh" in seen:
        return Declined(reason, f"call {FLEX}, whose score_mod may change scores")
    return Declined(reason, f"call {SDPA}; {DROPOUT if 'native_dropout' in seen else CAUSAL}")


def _name(node: fx.Node) -> str:
    """The op as the user knows it: all that softmax becomes is softmax."""
    name = original(node)
    return "softmax" if name in SOFTMAXES else name.split(".")[1] if name.startswith("aten.") else str(node.target).split(".")[1]
