"""Rewrites a call of SDPA that torch made matmuls of on its own: no other op takes its kv heads, head dims, dimensions or mask's
strides.

The forward stays, and also computes the logsumexp of its scores. The memory-efficient op of SDPA, which takes that, stands for the
matmuls of the backward. What the user gave is found along the shapes and scales between it and a matmul. A gradient is found by
`seq_nr`: autograd's number of the op that took the tensor, which the nodes of its backward have as well. What is not as torch makes
it is left alone.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..config import Config
from ..decision import Declined
from ..templates.tiles import HALF
from . import sdpa
from .declined import DROPOUT
from .math_path import ALIGNED, IN_FOUR, Call
from .nodes import VIEWS, aten, backward_of, call, is_tensor, reached, size_of, traced
from .stock_ops import CALLED, EFFICIENT, SDPA

COPIES = (*VIEWS, aten.expand.default, aten.unsqueeze.default, aten.clone.default)  # and what repeats heads
CONVERSION = torch.ops.prims.convert_element_type.default
DIMS = 4  # of what other ops take: batch, heads, length, head dim
SOME_GRADIENTS = "it is not seen that query, key and value all need a gradient"


class Unlike(Declined):
    """The graph is not what torch makes of a call that is rewritten. The remedy is another op's, which takes four dimensions."""

    def __init__(self, what: str) -> None:
        super().__init__(f"unlike the matmuls of SDPA: {what}", IN_FOUR)


@dataclass(frozen=True)
class Given:
    """A tensor [..., S, D] that SDPA was given, by its node, and the matmul that takes it as its argument of a number.

    seq_nrs: of the ops between them, the one that takes the tensor first. scale: by what these multiply it. is_transposed: whether
    they transpose it.
    """

    node: fx.Node
    matmul: fx.Node
    argument: int
    seq_nrs: list[int]
    scale: float
    is_transposed: bool


def rewrite(called: Call, settings: Config) -> list[fx.Node]:
    """Puts a node of ours in the place of a call's backward; returns the nodes that are obsolete.

    Raises:
        Declined: it stays.
    """
    graph = called.scores.graph
    if called.has_dropout:
        raise Declined("dropout", DROPOUT)
    if (dtype := called.scores.meta["val"].dtype) != torch.float32:
        raise Declined(f"scores in {dtype}", HALF)
    # Where the batch is a symbol, it is declined: so it is for every batch, or bits would depend on which came first.
    if called.scores.meta["val"].dim() != DIMS and settings.guarantee == "batch":
        raise Declined("guarantee='batch' takes none whose sizes have to be static", IN_FOUR)
    query, key, value, bias, out = _forward(called)
    shape, mask = query.node.meta["val"].shape, called.given_mask
    few_heads = key.node.meta["val"].shape[:-2] != shape[:-2]
    odd_dims = called.why_no_flash is not None and any(x.node.meta["val"].shape[-1] % ALIGNED for x in (query, value))
    in_columns = mask is not None and mask.stride(-1) != 1
    _require(len(shape) != DIMS or few_heads or odd_dims or in_columns, "another op takes it")
    backward = backward_of(graph)
    gradients = [_gradient(x, backward) for x in (query, key, value)]
    grad_out, grad_scores, dead = _backward(called, backward, gradients, out)
    trains_mask = grad_scores is not None
    results = {*gradients, *(x for x in (grad_scores.users if grad_scores else ()) if x not in dead)}
    with graph.inserting_before(next(x for x in graph.nodes if x in results)):
        logsumexp = traced(graph, _logsumexp, [_in_four(graph, called.scores)])
        in_four = [_in_four(graph, x) for x in (grad_out, query.node, key.node, value.node)]
        mask_in_four = None if bias is None else _mask_in_four(graph, bias, called.scores, trains_mask)
        node = graph.call_function(
            EFFICIENT,
            (*in_four, mask_in_four, _in_four(graph, out), logsumexp, None, None, 0.0, [True, True, True, trains_mask], False),
            {"scale": query.scale * key.scale},
        )
        given = [*in_four[1:], *([mask_in_four] if mask_in_four else [])]
        like = [torch.empty_like(x.meta["val"], memory_format=torch.contiguous_format) for x in given]
        node.meta = {**called.scores.meta, "val": (*like[:3], like[3] if trains_mask else None), CALLED: SDPA}
        for index, gradient in enumerate(gradients):
            ours = _reshaped(graph, call(graph, operator.getitem, node, index), gradient.meta["val"].shape)
            gradient.replace_all_uses_with(_strided(graph, ours, gradient))
        if grad_scores:
            ours = _reshaped(graph, call(graph, operator.getitem, node, 3), grad_scores.meta["val"].shape)
            grad_scores.replace_all_uses_with(call(graph, CONVERSION, ours, torch.float32))
    return [*sdpa.rewrite(node, settings), *dead]


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise Unlike(what)


def _forward(called: Call) -> tuple[Given, Given, Given, fx.Node | None, fx.Node]:
    """Query, key, value, what is added to the scores, and the output."""
    with_keys, with_values = called.with_keys, called.with_values
    _require(with_keys is not None and with_values is not None, "its matmuls")
    assert with_keys and with_values
    query, key, value = _given(called, with_keys, 0), _given(called, with_keys, 1), _given(called, with_values, 1)
    _require((query.is_transposed, key.is_transposed, value.is_transposed) == (False, True, False), "what is transposed")
    _require(value.scale == 1, "what is multiplied")
    _require(len({number for x in (query, key, value) for number in x.seq_nrs[:1]}) == 3, SOME_GRADIENTS)
    product: Any = called.scores
    bias: Any = None
    if called.scores.target is aten.add.Tensor:
        product, bias = called.scores.args
        _require(not called.scores.kwargs and isinstance(bias, fx.Node), "what is added to the scores")
    is_view = isinstance(product, fx.Node) and called.has(product) and product.target in VIEWS
    _require((product.args[0] if is_view else product) is with_keys, "how scores are computed")
    out = with_values
    while users := [x for x in out.users if called.has(x) and x.target in (*VIEWS, CONVERSION)]:
        _require(len(users) == 1, "its output")
        out = users[0]
    shapes = [tuple(x.meta["val"].shape) for x in (query.node, key.node, value.node, out)]
    dtypes = {x.meta["val"].dtype for x in (query.node, key.node, value.node, out)}
    _require(len({len(shape) for shape in shapes}) == len(dtypes) == 1, "its shapes and dtypes")
    _require(len(shapes[0]) == DIMS or all(isinstance(size, int) for shape in shapes for size in shape), "sizes that are symbols")
    batch, kv_heads = shapes[0][:-3], shapes[1][-3:-2]
    of_query, (kv_len, _), (_, value_dim) = shapes[0][:-1], shapes[1][-2:], shapes[2][-2:]
    alike = [(*batch, *kv_heads, kv_len, shapes[0][-1]), (*batch, *kv_heads, kv_len, value_dim), (*of_query, value_dim)]
    _require(shapes[1:] == alike and tuple(called.scores.meta["val"].shape) == (*of_query, kv_len), "its shapes")
    return query, key, value, bias, out


def _in_four(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """[..., H, S, D] as [B, H, S, D]; three dimensions are heads of one batch, two are one head."""
    shape: list[Any] = [1, *x.meta["val"].shape]
    return _reshaped(graph, x, [math.prod(shape[:-3]), *shape[-3:]])


def _mask_in_four(graph: fx.Graph, mask: fx.Node, like: fx.Node, trains: bool) -> fx.Node:
    """The mask with as many batches as the scores, or one, where it had fewer dimensions. One that trains has all elements, as its
    gradient has."""
    scores = like.meta["val"].shape
    if trains:
        sizes = [size_of(graph, like, dim) for dim in range(len(scores))]
        return _in_four(graph, call(graph, aten.expand.default, mask, sizes))
    if len(scores) == DIMS:
        return mask
    size = max(len(scores), DIMS)
    shape, of_scores = ([1] * (size - len(x)) + [*x] for x in (mask.meta["val"].shape, scores))
    if any(each != 1 for each in shape[:-3]) and shape[:-3] != of_scores[:-3]:
        if 1 not in shape[-2:]:  # it would be copied
            raise Declined("a mask of queries and keys that some batches share", f"expand it to all of them, or {IN_FOUR}")
        shape[:-3] = of_scores[:-3]
        mask = call(graph, aten.expand.default, mask, shape)
    return call(graph, aten.reshape.default, mask, [math.prod(shape[:-3]), *shape[-3:]])


def _reshaped(graph: fx.Graph, x: fx.Node, shape: Sequence[Any]) -> fx.Node:
    return x if len(x.meta["val"].shape) == len(shape) else call(graph, aten.reshape.default, x, list(shape))


def _given(called: Call, matmul: fx.Node, argument: int) -> Given:
    """What the user gave; where autocast narrows it, what that makes of it."""
    x: Any = matmul.args[argument]
    scale, is_transposed, seq_nrs = 1.0, False, []
    while called.has(x) and x.meta["val"].dtype == torch.float32:
        if x.target is aten.mul.Scalar and isinstance(x.args[1], (int, float)):
            scale *= x.args[1]
        elif x.target is aten.permute.default and list(x.args[1]) == _transposed(x):
            is_transposed = not is_transposed
        else:
            _require(x.target in (*COPIES, CONVERSION), f"{x.target} between what is given and a matmul")
        seq_nrs.append(x.meta.get("seq_nr"))
        x = x.args[0]
    _require(None not in seq_nrs, "the number of an op")
    return Given(x, matmul, argument, seq_nrs[::-1], scale, is_transposed)


def _transposed(x: fx.Node) -> list[int]:
    """The sizes of a tensor, the last two exchanged."""
    dims = len(x.meta["val"].shape)
    return [*range(dims - 2), dims - 1, dims - 2]


def _gradient(given: Given, backward: set[fx.Node]) -> fx.Node:
    """The last node of the backward of the op that takes the tensor. An op that changes nothing, such as an expansion to the same
    shape, has none: then it is that of the op after it, or of the matmul."""
    numbered = ([x for x in backward if x.meta.get("seq_nr") == number and is_tensor(x)] for number in given.seq_nrs)
    alike = next(filter(None, numbered), None) or [x for x in backward if _is_gradient(x, given)]
    last = [x for x in alike if not any(user in alike for user in x.users)]
    _require(len(last) == 1, SOME_GRADIENTS)
    value, of = last[0].meta["val"], given.node.meta["val"]
    _require(value.shape == of.shape and value.dtype == of.dtype, SOME_GRADIENTS)
    return last[0]


def _is_gradient(x: fx.Node, given: Given) -> bool:
    """Whether a node is the gradient of a matmul's argument: a matmul of the other argument, transposed."""
    matmul, other = given.matmul, 1 - given.argument
    if x.meta.get("seq_nr") != matmul.meta.get("seq_nr") or not x.target is matmul.target is aten.bmm.default:
        return False
    factor: Any = x.args[other]
    return factor.target is aten.permute.default and factor.args[0] is matmul.args[other]


def _backward(
    called: Call, backward: set[fx.Node], gradients: list[fx.Node], out: fx.Node
) -> tuple[fx.Node, fx.Node | None, list[fx.Node]]:
    """The gradient of the output; that of the scores, if a mask that is added to them has one; and the nodes from the first to all
    others, which nobody else uses, users first."""
    numbers = {x.meta.get("seq_nr") for x in out.graph.nodes if called.has(x)} - {None}

    def is_inside(x: fx.Node) -> bool:
        return x.meta.get("seq_nr") in numbers and x.meta.get("partitioner_tag") != "is_forward" and not called.has(x)

    inside = reached(gradients, lambda x: filter(is_inside, x.all_input_nodes))
    from_outside = {x for each in inside for x in each.all_input_nodes if x not in inside and is_tensor(x)}
    given = [x for x in from_outside if x in backward]
    _require(len(given) == 1 and all(called.has(x) for x in from_outside if x not in backward), "what its backward reads")
    (grad_out,), value = given, out.meta["val"]
    _require(grad_out.meta["val"].shape == value.shape and grad_out.meta["val"].dtype == value.dtype, "the gradient of its output")
    used = [x for x in inside.difference(gradients) if not inside.issuperset(x.users)]
    grad_scores = used[0] if used else None
    of_softmax = {called.softmax.meta.get("seq_nr")}
    _require(
        grad_scores is None or (len(used) == 1 and called.scores.target is aten.add.Tensor and _is_last(grad_scores, of_softmax)),
        "another gradient of its",
    )
    return grad_out, grad_scores, [x for x in reversed(out.graph.nodes) if x in inside]


def _is_last(x: fx.Node, numbers: set[Any]) -> bool:
    """Whether a node is the last of the backward of ops with these numbers."""
    return x.meta.get("seq_nr") in numbers and not any(user.meta.get("seq_nr") in numbers for user in x.users)


def _logsumexp(scores: Tensor) -> Tensor:
    """[B, H, S_q], and infinity for rows that see no key: their weights are then 0."""
    largest = scores.amax(-1, keepdim=True)
    hidden = largest == -math.inf
    finite = largest.masked_fill(hidden, 0.0)
    total = (scores - finite).exp().sum(-1, keepdim=True)
    return (total.log() + finite).masked_fill(hidden, math.inf).squeeze(-1)


def _strided(graph: fx.Graph, gradient: fx.Node, like: fx.Node) -> fx.Node:
    """The gradient with the strides of another node: those after it were traced with them."""
    value = like.meta["val"]
    if value.is_contiguous():
        return gradient
    _require(value.mT.is_contiguous(), "the strides of a gradient")
    order = _transposed(gradient)
    transposed = call(graph, aten.permute.default, gradient, order)
    transposed = call(graph, aten.clone.default, transposed, memory_format=torch.contiguous_format)
    return call(graph, aten.permute.default, transposed, order)
