"""Finds the calls of SDPA that torch itself made matmuls and a softmax of, in a joint graph, and says so of each.

No op of attention stands for them in the graph. What does is the softmax: `aten._safe_softmax` is of SDPA's math path alone. Its
nodes are told by their `original_aten`, and grouped by call using `seq_nr`. A gradient flows where what came of
the softmax meets a tangent. Where a pattern of Inductor has made an op of attention of a call, its softmax is gone.

A call inside torch.cond is not found: its gradient is traced anew there, and nothing says of what.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from ..decision import UNKNOWN, Decision, Declined, size_text
from ..op import NOTE
from ..problem import dtype_name
from ..templates.tiles import HALF_DTYPES
from .declined import DROPOUT, InternalError, WithoutOp, decision_of_scores
from .nodes import aten, backward_of, first_tensor, is_one, is_tensor, original, reached

OP = "aten.scaled_dot_product_attention.default"
REASON = "SDPA took the math path"
REMEDY = "let torch take flash attention: bf16 or fp16, no sdpa_kernel(MATH), query, key and value of four dimensions"
IN_FOUR = "reshape query, key and value to four dimensions: [batch, heads, length, head dim]"
ROWS, EXPANDED = "make it contiguous in its last dimension", "call .contiguous() on it, after it is expanded"
REPEATED = "repeat key and value for each query head (repeat_interleave along dim 1): our backward reads them without the copies"
PADDED = (
    "pad the head dim of query, key and value with zeros to a multiple of 8, pass the scale that it has without them, and cut the "
    "output"
)
ALIGNED = 8  # elements of half precision: 16 bytes
OF_FUNC = (
    f"{REASON}, under vmap(grad(...)) of torch.func, in which each sample has fewer than four dimensions",
    "let each sample have four, [1, heads, length, head dim], or give the batch to SDPA without vmap",
)
SOFTMAX_BACKWARD = "aten._softmax_backward_data.default"
MATMULS = (aten.bmm.default, aten.mm.default)
UNGROUPED = (torch.nn.MultiheadAttention, F.multi_head_attention_forward)  # Dynamo does not look into them
SDPA = (F.scaled_dot_product_attention, aten.scaled_dot_product_attention, aten.scaled_dot_product_attention.default)


def calls(graph: fx.Graph, why: Mapping[fx.Node, Declined | None]) -> Iterator[WithoutOp]:
    """For each call through which a gradient flows: a gradient in its backward, its softmax, and what becomes of it. why: by the
    softmax, why one is not rewritten that could have been."""
    for gradient, call in found(graph):
        bug = why.get(call.softmax)
        declined = bug if isinstance(bug, InternalError) else _declined(call, bug)
        yield gradient, call.softmax, _decided(call, declined), declined


def found(graph: fx.Graph) -> Iterator[tuple[fx.Node, Call]]:
    """Calls through which a gradient flows that are not decided on, each with a gradient in its backward."""
    softmaxes = _softmaxes(graph)
    if not softmaxes:
        return
    of_tangents = backward_of(graph)
    # A gradient that torch.func computes in the graph depends on no tangent.
    of_func = reached((x for x in graph.nodes if original(x) == SOFTMAX_BACKWARD), lambda node: node.users)
    backward = of_tangents | of_func
    for softmax in softmaxes:
        # Up to the matmul with the values, and into the backward up to the first nodes that depend on a tangent.
        weights = reached(softmax, lambda node: () if node in backward or _is_matmul(node) else node.users)
        gradient = first_tensor(graph, weights & backward)
        if gradient is not None and not any(user.target is NOTE for user in gradient.users):
            yield gradient, Call(softmax, weights - backward, is_of_func=gradient not in of_tangents)


def _softmaxes(graph: fx.Graph) -> list[list[fx.Node]]:
    """The nodes of each SDPA's softmax. Attention by hand may have one as well, by a pattern of Inductor: it comes from no call."""
    found = defaultdict(list)
    for node in graph.nodes:
        if is_softmax(node):
            found[_call_of(node), node.meta.get("seq_nr")].append(node)
    return list(found.values())


def _call_of(node: fx.Node) -> tuple[Any, ...]:
    """What tells the user's call that the node comes from; () if nothing does. Bodies of checkpoints share names, not graphs."""
    names, sources = (name for name, _ in node.meta.get("source_fn_stack") or ()), node.meta.get("from_node") or []
    while sources and sources[-1].from_node:
        sources = sources[-1].from_node
    return *names, *((source.name, source.graph_id) for source in sources)


def _decided(call: Call, declined: Declined) -> Decision:
    """All but the origin, and UNKNOWN what the graph does not show."""
    decision = decision_of_scores(OP, call.scores.meta["val"], call.dtype, call.head_dims[0], declined)
    return replace(decision, mask=call.mask, kv_heads=call.kv_heads(decision.heads))


def _declined(call: Call, why: Declined | None) -> Declined:
    """With what kept all other ops from being taken, whatever the user asked for, if that is seen. why: what keeps ours from it."""
    scores = call.scores.meta["val"]
    if call.is_of_func:
        return Declined(*OF_FUNC)
    if scores.dim() not in (2, 4) and why is not None:
        return Declined(f"{REASON}, with inputs of {scores.dim()} dimensions: {why}", why.remedy)
    if scores.dim() != 4:
        return Declined(f"{REASON}: inputs of {scores.dim()} dimensions, not 4", IN_FOUR)
    on_gpu = scores.device.type != "cpu"
    if call.has_dropout and not on_gpu:
        return Declined(f"{REASON}: dropout on the CPU", DROPOUT)
    of_query, of_value = call.head_dims
    if call.dims_differ and not on_gpu:
        differ = f"head dims differ (query {of_query}, value {of_value})"
        return Declined(f"{REASON}: {differ}", "none needed: on a GPU another op takes such head dims")
    # The key is transposed, perhaps back to what it was before. A mask is refused for its strides on a GPU alone.
    given = ("query", call.query, ROWS), ("value", call.value, ROWS), ("mask", call.given_mask if on_gpu else None, EXPANDED)
    for name, x, remedy in given:
        stride = 1 if x is None or is_one(x.shape[-1]) else x.stride(-1)
        if isinstance(stride, int) and stride != 1:
            return Declined(f"{REASON}: the last stride of the {name} is {stride}, not 1", remedy)
    if on_gpu and (declined := _declined_on_gpu(call, scores)):
        return declined
    if why is not None and why.remedy != IN_FOUR:  # which it is already
        return Declined(f"{REASON}: {why}", why.remedy)
    return Declined(REASON, REMEDY)


def _declined_on_gpu(call: Call, scores: torch.Tensor) -> Declined | None:
    """What flash attention does not take, or takes only if told, and what keeps memory-efficient attention from it. Its checks are
    in torch's sdp_utils.cpp (`check_batch_size_and_num_heads_dense`, `check_head_dim_size_mem_efficient`)."""
    heads = size_text(scores.shape[1])
    kv_heads, is_half, under = call.kv_heads(heads), call.dtype in HALF_DTYPES, call.why_no_flash
    if call.mask == UNKNOWN:
        return None
    found = []
    if is_half and isinstance(heads, int) and isinstance(kv_heads, int) and kv_heads != heads:
        few = f"key and value have {kv_heads} head{'s' if kv_heads > 1 else ''}, and query {heads}"
        if under:
            found.append((few, REPEATED))
        elif kv_heads == 1:  # of several torch itself asks for enable_gqa
            return Declined(f"{REASON}: {few}, without enable_gqa", "pass enable_gqa=True")
    multiple = ALIGNED if is_half else ALIGNED // 2
    odd = next((dim for dim in call.head_dims if isinstance(dim, int) and dim % multiple), None)
    if under and odd:
        found.append((f"head dim {odd} is no multiple of {multiple}", PADDED if is_half else f"{PADDED}; take bf16 or fp16"))
    if not found:
        return None
    reasons, remedies = (" and ".join(texts) for texts in zip(*found, strict=True))
    return Declined(f"{REASON}: {reasons}, {under}, which neither flash nor memory-efficient attention takes", remedies)


class Call:
    """What the nodes of a call of SDPA show; `query` and `value` are as the user gave them, or None if that is not seen.

    softmax: its first node. weights: from the softmax to the matmul with the values. is_of_func: whether its gradient is one that
    torch.func computes inside of the graph.
    """

    def __init__(self, softmax: list[fx.Node], weights: set[fx.Node], *, is_of_func: bool) -> None:
        self.softmax, self.is_of_func = softmax[0], is_of_func
        self._id = _call_of(softmax[0])
        self._function = softmax[0].meta["source_fn_stack"][-1][1]
        self.scores = next(x for node in softmax for x in node.all_input_nodes if x not in softmax)
        self._to_scores = reached([self.scores], lambda node: () if _is_matmul(node) else self._inputs(node))
        self.with_keys = _only(node for node in self._to_scores if node.target in MATMULS)
        self.with_values = _only(node for node in weights if node.target in MATMULS)
        self.query, self.value = self._given(self.with_keys, 0), self._given(self.with_values, -1)
        self.has_dropout = any(original(node) == "aten.native_dropout.default" for node in weights)

    @property
    def mask(self) -> str:
        if self.with_keys is None:
            return UNKNOWN
        added = {*filter(is_tensor, self._to_scores)} - reached([self.with_keys], lambda node: node.users)
        if not all(map(self.has, added)):
            return "given"
        if any(original(node) == "aten.tril.default" for node in added):
            return "causal"
        return UNKNOWN if added else "full"

    @property
    def given_mask(self) -> torch.Tensor | None:
        """The mask as the user gave it."""
        given = _only(n for n in self._to_scores if not self.has(n) and is_tensor(n)) if self._function in SDPA else None
        return None if given is None else given.meta["val"]

    @property
    def dtype(self) -> str:
        """The dtype of what it returns: it may compute in another."""
        if self.with_values is None:
            return UNKNOWN
        after = reached([self.with_values], lambda node: (x for x in node.users if self.has(x) and is_tensor(x)))
        last = _only(node for node in after if after.isdisjoint(node.users))
        return UNKNOWN if last is None else dtype_name(last.meta["val"].dtype)

    @property
    def head_dims(self) -> tuple[int | str, int | str]:
        """The head dim of query and key, and that of value."""
        with_keys, with_values = self.with_keys, self.with_values
        of_query = UNKNOWN if with_keys is None else size_text(with_keys.all_input_nodes[0].meta["val"].shape[-1])
        return of_query, UNKNOWN if with_values is None else size_text(with_values.meta["val"].shape[-1])

    @property
    def dims_differ(self) -> bool:
        of_query, of_value = self.head_dims
        return isinstance(of_query, int) and isinstance(of_value, int) and of_query != of_value

    @property
    def why_no_flash(self) -> str | None:
        """What flash attention does not take, whatever the dtype and the heads; None if there is nothing."""
        if self.mask == "given":
            return "under a mask"
        q_len, kv_len = map(size_text, self.scores.meta["val"].shape[-2:])
        if self.mask == "causal" and q_len != kv_len:
            return "under a causal mask of unlike lengths"
        return "with another head dim of value" if self.dims_differ else None

    def kv_heads(self, heads: int | str) -> int | str:
        if self._function in UNGROUPED:
            return heads
        key = self._given(self.with_keys, -1)
        if key is None:
            return UNKNOWN
        return size_text(key.shape[-3]) if key.dim() > 2 else 1

    def has(self, node: fx.Node) -> bool:
        """Whether the node is one of its forward."""
        return _call_of(node) == self._id

    def _inputs(self, node: fx.Node) -> list[fx.Node]:
        return node.all_input_nodes if self.has(node) else []

    def _given(self, matmul: fx.Node | None, index: int) -> torch.Tensor | None:
        """The argument of SDPA that became the matmul's: the one tensor from outside that goes into it."""
        if matmul is None or self._function not in SDPA:
            return None
        given = _only(n for n in reached([matmul.all_input_nodes[index]], self._inputs) if not self.has(n) and is_tensor(n))
        return None if given is None else given.meta["val"]


def is_softmax(node: fx.Node) -> bool:
    """Whether the node is of the softmax of SDPA's math path."""
    stack = node.meta.get("source_fn_stack")
    if not stack:
        return False
    # A nested_compile_region is traced twice: the second time it is of other ops already.
    again = original(node) == str(node.target) == "aten.amax.default" and stack[-1][1] in SDPA
    return again or original(node) == "aten._safe_softmax.default"


def _is_matmul(node: fx.Node) -> bool:
    return node.target in MATMULS or original(node) in map(str, MATMULS)


def _only(nodes: Iterable[fx.Node]) -> fx.Node | None:
    """The one node; None if there are none, or several."""
    found = list(nodes)
    return found[0] if len(found) == 1 else None
