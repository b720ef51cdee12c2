"""Rewrites a call of SDPA that torch made matmuls of on its own: no other op takes its few kv heads, or the strides of its mask.

The forward stays, and also computes the logsumexp of its scores. The memory-efficient op of SDPA, which takes that, stands for the
matmuls of the backward. What the user gave is found along the shapes and scales between it and a matmul. A gradient is found by
`seq_nr`: autograd's number of the op that took the tensor, which the nodes of its backward have as well. What is not as torch makes
it is left alone.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..config import Config
from ..decision import Declined
from . import sdpa
from .math_path import Call
from .nodes import VIEWS, aten, backward_of, call, is_tensor, reached
from .stock_ops import CALLED, EFFICIENT, SDPA

COPIES = (*VIEWS, aten.expand.default, aten.unsqueeze.default, aten.clone.default)  # and what repeats heads
CONVERSION = torch.ops.prims.convert_element_type.default
TRANSPOSED = [0, 1, 3, 2]


class Unlike(Declined):
    """The graph is not what torch makes of a call that is rewritten."""

    def __init__(self, what: str) -> None:
        super().__init__(f"unlike the matmuls of SDPA: {what}", "")


@dataclass(frozen=True)
class Given:
    """A tensor [B, H, S, D] that SDPA was given, by its node.

    seq_nr: of the op that takes it. scale: by what it is multiplied on its way to a matmul. is_transposed: whether it is, there.
    """

    node: fx.Node
    seq_nr: int
    scale: float
    is_transposed: bool


def rewrite(called: Call, settings: Config) -> list[fx.Node]:
    """Puts a node of ours in the place of a call's backward; returns the nodes that are obsolete.

    Raises:
        Declined: it stays.
    """
    graph = called.scores.graph
    _require(called.scores.meta["val"].dtype == torch.float32 and not called.has_dropout, "scores in half precision, or dropout")
    query, key, value, bias, out = _forward(called)
    few_heads, mask = key.node.meta["val"].shape[1] != query.node.meta["val"].shape[1], called.given_mask
    _require(few_heads or (mask is not None and mask.stride(-1) != 1), "another op takes it")
    backward = backward_of(graph)
    gradients = [_gradient(x, backward) for x in (query, key, value)]
    grad_out, dead = _backward(called, backward, gradients, out)
    with graph.inserting_before(next(x for x in graph.nodes if x in gradients)):
        logsumexp = _logsumexp(graph, called.scores)
        node = graph.call_function(
            EFFICIENT,
            (grad_out, query.node, key.node, value.node, bias, out, logsumexp, None, None, 0.0, [True, True, True, False], False),
            {"scale": query.scale * key.scale},
        )
        like = [torch.empty_like(x.meta["val"], memory_format=torch.contiguous_format) for x in gradients]
        node.meta = {**called.scores.meta, "val": (*like, None), CALLED: SDPA}
        for index, gradient in enumerate(gradients):
            gradient.replace_all_uses_with(_strided(graph, call(graph, operator.getitem, node, index), gradient))
    return [*sdpa.rewrite(node, settings), *dead]


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise Unlike(what)


def _forward(called: Call) -> tuple[Given, Given, Given, fx.Node | None, fx.Node]:
    """Query, key, value, what is added to the scores, and the output."""
    with_keys, with_values = called.with_keys, called.with_values
    _require(with_keys is not None and with_values is not None, "its matmuls")
    assert with_keys and with_values
    query, key = (_given(called, with_keys.args[index]) for index in (0, 1))
    value = _given(called, with_values.args[1])
    _require((query.is_transposed, key.is_transposed, value.is_transposed) == (False, True, False), "what is transposed")
    _require(value.scale == 1 and len({query.seq_nr, key.seq_nr, value.seq_nr}) == 3, "what is multiplied")
    bias: Any = None
    if called.scores.target is aten.add.Tensor:
        product, bias = called.scores.args
        _require(not called.scores.kwargs and isinstance(bias, fx.Node), "what is added to the scores")
    else:
        product = called.scores
    _require(_source(called, product) is with_keys, "how scores are computed")
    out = with_values
    while users := [x for x in out.users if called.has(x) and x.target in (*VIEWS, CONVERSION)]:
        _require(len(users) == 1, "its output")
        out = users[0]
    shapes = [tuple(x.meta["val"].shape) for x in (query.node, key.node, value.node, out)]
    dtypes = {x.meta["val"].dtype for x in (query.node, key.node, value.node, out)}
    _require(all(len(shape) == 4 for shape in shapes) and len(dtypes) == 1, "its shapes and dtypes")
    (batch, heads, q_len, head_dim), (_, kv_heads, kv_len, _), (*_, value_dim), _ = shapes
    alike = [(batch, kv_heads, kv_len, head_dim), (batch, kv_heads, kv_len, value_dim), (batch, heads, q_len, value_dim)]
    _require(shapes[1:] == alike and tuple(called.scores.meta["val"].shape) == (batch, heads, q_len, kv_len), "its shapes")
    return query, key, value, bias, out


def _source(called: Call, x: Any) -> Any:
    """Of a view."""
    return x.args[0] if isinstance(x, fx.Node) and called.has(x) and x.target in VIEWS else x


def _given(called: Call, x: Any) -> Given:
    """What the user gave, of the argument of a matmul; where autocast narrows it, what that makes of it."""
    scale, is_transposed, seq_nr = 1.0, False, None
    while called.has(x) and x.meta["val"].dtype == torch.float32:
        if x.target is aten.mul.Scalar and isinstance(x.args[1], (int, float)):
            scale *= x.args[1]
        elif x.target is aten.permute.default and list(x.args[1]) == TRANSPOSED:
            is_transposed = not is_transposed
        else:
            _require(x.target in (*COPIES, CONVERSION), f"{x.target} between what is given and a matmul")
        x, seq_nr = x.args[0], x.meta.get("seq_nr")
    _require(seq_nr is not None, "the number of an op")
    assert seq_nr is not None
    return Given(x, seq_nr, scale, is_transposed)


def _gradient(given: Given, backward: set[fx.Node]) -> fx.Node:
    """The last node of the backward of the op that takes the tensor."""
    alike = [x for x in backward if x.meta.get("seq_nr") == given.seq_nr and is_tensor(x)]
    last = [x for x in alike if not any(user in alike for user in x.users)]
    _require(len(last) == 1, "its gradients")
    value, of = last[0].meta["val"], given.node.meta["val"]
    _require(value.shape == of.shape and value.dtype == of.dtype, "the shape of a gradient")
    return last[0]


def _backward(called: Call, backward: set[fx.Node], gradients: list[fx.Node], out: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """The gradient of the output, and the nodes from it to the others, which nobody else uses, users first."""
    numbers = {x.meta.get("seq_nr") for x in called.nodes} - {None}

    def is_inside(x: fx.Node) -> bool:
        return x.meta.get("seq_nr") in numbers and x.meta.get("partitioner_tag") != "is_forward" and not called.has(x)

    inside = reached(gradients, lambda x: filter(is_inside, x.all_input_nodes))
    from_outside = {x for each in inside for x in each.all_input_nodes if x not in inside}
    given = [x for x in from_outside if x in backward]
    _require(len(given) == 1 and all(called.has(x) for x in from_outside if x not in backward), "what its backward reads")
    (grad_out,), value = given, out.meta["val"]
    _require(grad_out.meta["val"].shape == value.shape and grad_out.meta["val"].dtype == value.dtype, "the gradient of its output")
    last = set(gradients)
    _require(all(x in last or inside.issuperset(x.users) for x in inside), "another gradient of its")
    return grad_out, [x for x in reversed(out.graph.nodes) if x in inside]


def _logsumexp(graph: fx.Graph, scores: fx.Node) -> fx.Node:
    """[B, H, S_q], and infinity for rows that see no key: their weights are then 0."""
    largest = call(graph, aten.amax.default, scores, [-1], True)
    hidden = call(graph, aten.eq.Scalar, largest, -math.inf)
    finite = _filled(graph, hidden, 0.0, largest)
    total = call(
        graph, aten.sum.dim_IntList, call(graph, aten.exp.default, call(graph, aten.sub.Tensor, scores, finite)), [-1], True
    )
    logsumexp = call(graph, aten.add.Tensor, call(graph, aten.log.default, total), finite)
    return call(graph, aten.squeeze.dim, _filled(graph, hidden, math.inf, logsumexp), -1)


def _filled(graph: fx.Graph, where: fx.Node, value: float, x: fx.Node) -> fx.Node:
    """x, and the value where a condition holds."""
    device = x.meta["val"].device
    filling = graph.call_function(aten.full.default, ([], value), {"dtype": torch.float32, "device": device, "pin_memory": False})
    with x.meta["val"].fake_mode:
        filling.meta["val"] = torch.full([], value, dtype=torch.float32, device=device)
    return call(graph, aten.where.self, where, filling, x)


def _strided(graph: fx.Graph, gradient: fx.Node, like: fx.Node) -> fx.Node:
    """The gradient with the strides of another node: those after it were traced with them."""
    value = like.meta["val"]
    if value.is_contiguous():
        return gradient
    _require(value.mT.is_contiguous(), "the strides of a gradient")
    transposed = graph.call_function(
        aten.clone.default, (call(graph, aten.permute.default, gradient, TRANSPOSED),), {"memory_format": torch.contiguous_format}
    )
    transposed.meta["val"] = value.mT
    return call(graph, aten.permute.default, transposed, TRANSPOSED)
