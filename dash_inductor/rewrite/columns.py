"""A learnt mask of which a few columns alone are trained: an attention sink's, which is the column of one more key.

The gradient of a mask is dS, of B x H x S_q x S_k elements. That of one key j is P_j (dO . V_j - delta), which a row of the query,
the key and the value give. So where the graph takes slices of dS that are a few keys wide, these are computed by themselves, and
the backward of attention trains no mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .nodes import VIEWS, aten, call, call_of, is_tensor, outputs_of, reached, traced
from .stock_ops import SdpaBackward
from .sums import CONVERSION, put_in_order

MOST = 8  # columns of a slice
SCALED = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default, CONVERSION)
MOVED = (aten.slice_scatter.default, aten.constant_pad_nd.default)  # which put columns beside others, or take some away


class Way(NamedTuple):
    """From a mask's gradient over `path` to a slice of its last dimension, of columns from `start` to `stop` of the mask."""

    path: tuple[fx.Node, ...]
    end: fx.Node
    start: Any
    stop: Any


def ways_of(stock: SdpaBackward) -> list[Way]:
    """The ways from the gradient of an SDPA backward's mask to slices of few columns; [] where one leads elsewhere, or where a
    column is no key's."""
    node, mask, key = stock.node, stock.attn_mask, stock.key
    if mask is None or mask.meta["val"].dim() != 4 or str(mask.meta["val"].shape[3]) != str(key.meta["val"].shape[2]):
        return []
    ends = [each for each in node.graph.nodes if each.op == "output"]
    live = reached(ends, lambda each: each.all_input_nodes)  # the backward of a math path still stands where it was read from
    try:
        return [way for gradient in outputs_of(node, 3) for way in _ways((gradient,), 0, live)]
    except _ElsewhereError:
        return []


class _ElsewhereError(Exception):
    """Some use of the gradient is not of a few columns."""


def _ways(path: tuple[fx.Node, ...], moved: int, live: set[fx.Node]) -> Iterator[Way]:
    """moved: by how many columns those of the mask stand further right at the end of the path."""
    node = path[-1]
    last = node.meta["val"].dim() - 1
    for user in (each for each in node.users if each in live):
        if user.target is aten.slice.Tensor and _dim_of(user, 1) == last:
            yield _way(path, user, moved)
        elif (shift := _shift(user, node, last)) is not None:
            yield from _ways((*path, user), moved + shift, live)
        else:
            raise _ElsewhereError


def _way(path: tuple[fx.Node, ...], end: Any, moved: int) -> Way:
    given: list[Any] = list(end.args[2:])
    start, stop, step = given + [None, None, 1][len(given) :]
    columns, width, of_mask = (x.meta["val"].shape[-1] for x in (path[-1], end, path[0]))
    if step != 1 or not isinstance(width, int) or width > MOST:
        raise _ElsewhereError
    start = start or 0
    if all(isinstance(x, int) for x in (start, columns, of_mask)):
        start = start + (columns if start < 0 else 0) - moved
        stop = start + width
        is_of_mask = 0 <= start <= of_mask - width  # and not of what was put beside it
    else:
        is_from_left = not isinstance(start, int) or start >= 0
        is_of_mask = is_from_left and isinstance(stop, (int, fx.Node)) and not any(node.target in MOVED for node in path)
    if not is_of_mask:
        raise _ElsewhereError
    return Way(path, end, start, stop)


def _shift(user: Any, node: fx.Node, last: int) -> int | None:
    """By how many columns an op moves all of them, if it does the same to each; None for another op."""
    target, rest = user.target, user.args[1:]
    if target is aten.slice_scatter.default:  # into another tensor
        start = (rest[2] if len(rest) > 2 else None) or 0
        is_whole = rest[0] is node and _dim_of(user, 2) == last and len(rest) < 5
        return start if is_whole and isinstance(start, int) and start >= 0 else None
    if not is_tensor(user) or user.args[0] is not node or any(isinstance(x, fx.Node) for x in rest):
        return None
    if target is aten.constant_pad_nd.default:
        return int(rest[0][0]) if len(rest[0]) == 2 and isinstance(rest[0][0], int) else None
    if target is aten.sum.dim_IntList:
        dims = [dim % (last + 1) for dim in rest[0] or ()]
        return 0 if dims and last not in dims else None
    if target in VIEWS:
        before, after = (str(x.meta["val"].shape[-1]) for x in (node, user))  # a comparison of symbols would guard
        return 0 if before == after else None
    return 0 if target in SCALED else None


def _dim_of(node: Any, index: int) -> int:
    """The dimension that is an argument of a node."""
    return int(node.args[index] if len(node.args) > index else 0) % node.meta["val"].dim()


def train(ways: list[Way], stock: SdpaBackward, logsumexp: fx.Node) -> list[fx.Node]:
    """Puts the columns' own gradients in the place of slices of dS; returns the nodes that are obsolete, users first."""
    graph, obsolete = logsumexp.graph, dict[fx.Node, None]()
    for way in ways:
        with graph.inserting_before(way.end):
            column = _gradient(graph, stock, logsumexp, way.start, way.stop)
            found, width = column, way.end.meta["val"].shape[-1]
            for node in way.path[1:]:
                op, (_, *rest) = call_of(node)
                if op in MOVED:
                    continue
                rest = [[*rest[0][:-1], width]] if op in VIEWS else rest
                found = call(graph, op, found, *rest, **node.kwargs)
                found.meta = {**node.meta, **found.meta}
        way.end.replace_all_uses_with(found)
        obsolete |= dict.fromkeys(put_in_order(column, all_sums=True))
    obsolete |= dict.fromkeys(way.end for way in ways)
    nodes = {node: n for way in ways for n, node in enumerate(way.path)}
    for node in sorted(nodes, key=lambda node: -nodes[node]):
        if all(user in obsolete for user in node.users):  # and not also the dead backward of a math path
            obsolete[node] = None
    return [*obsolete]


def _gradient(graph: fx.Graph, stock: SdpaBackward, logsumexp: fx.Node, start: Any, stop: Any) -> fx.Node:
    """The gradient of the mask's columns, [B, H, S_q, stop - start]."""
    key, value = (call(graph, aten.slice.Tensor, x, 2, start, stop) for x in (stock.key, stock.value))
    mask = call(graph, aten.slice.Tensor, stock.attn_mask, 3, start, stop)
    scale = stock.query.meta["val"].shape[3] ** -0.5 if stock.scale is None else stock.scale

    def gradient(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, out: Tensor, grad_out: Tensor, lse: Tensor) -> Tensor:
        group = query.shape[1] // key.shape[1]
        # Not by x[:, None], for which torch asks the device, which need not be there.
        key, value = (x.float().repeat_interleave(group, 1).unsqueeze(2) for x in (key, value))
        query, out, grad_out, lse = (x.float().unsqueeze(3) for x in (query, out, grad_out, lse))
        scores = (query * key).sum(-1) * scale + mask.float()
        # A row that sees no key has no share of any.
        shares = torch.where(lse.isfinite(), (scores - lse).exp(), 0.0)
        return (shares * ((grad_out * value).sum(-1) - (grad_out * out).sum(-1))).to(mask.dtype)

    return traced(graph, gradient, [stock.query, key, value, mask, stock.out, stock.grad_out, logsumexp])  # type: ignore[no-any-return]
