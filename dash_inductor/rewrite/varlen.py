"""Finds backwards of `varlen_attn` in a joint graph, and turns each into FlexAttention's, or says why not.

Packed sequences are one batch element, in which a query sees an interval of the keys: what its own sequence, the diagonal and the
window leave. So the mask is two numbers for each query, and the blocks of the mask come from bounds of these.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.pattern_matcher import CallFunctionVarArgs, Match, register_graph_pattern
from torch.nn.attention import SDPBackend, varlen

from ..config import Config, current
from ..devices.target import target_of
from ..op import MASK_NAME
from ..problem import BLOCK_MASK, Problem
from ..resolve import mask_block, resolve
from .cache_key import key
from .declined import DECIDED_UNDER, leave, why_no_target
from .flex_node import flex_backward
from .mask_function import LARGEST, NAMES, MaskFunction
from .sdpa import patterns
from .stock_ops import VARLEN, arguments, call, value_of

aten, prims = torch.ops.aten, torch.ops.prims
FLASH: int = SDPBackend.FLASH_ATTENTION.value  # type: ignore[attr-defined]
NOWHERE = 2**30  # past all keys: where the interval of a query that sees none begins
Window = tuple[int | None, int | None]  # how far before and behind its own place a query sees; None: all
Call = Callable[..., fx.Node]  # `call` in the graph that is written


@register_graph_pattern(CallFunctionVarArgs([VARLEN]), pass_dict=patterns)
def rewrite(match: Match, *args: Any, **kwargs: Any) -> None:
    """Replaces a node of the stock op by FlexAttention's, or marks it with the reason why not."""
    node, settings, graph = match.output_node(), current(), match.graph
    try:
        problem, window = rewriting_of(node, settings)
    except ValueError as reason:
        leave(node, str(reason), settings)
        return
    assert problem.block_size
    named, new_node = arguments(node), functools.partial(call, graph)

    def one_batch(x: fx.Node) -> fx.Node:
        """[T, H, D] -> [1, H, T, D]."""
        return new_node(aten.unsqueeze.default, new_node(aten.permute.default, x, [1, 0, 2]), 0)

    with graph.inserting_before(node), value_of(named["query"]).fake_mode:
        rows, keys = problem.block_size
        bounds = intervals(new_node, named["query"], named["cu_seq_q"], named["cu_seq_k"], window, rows)
        matrix = block_matrix(new_node, *bounds, named["key"], keys)
        first, last = (new_node(aten.reshape.default, x, [-1]) for x in bounds)
        mask = MaskFunction(_within_interval(), (first, last), by_batch=False, by_head=False)
        query, key_, value, out, grad_out = (one_batch(named[name]) for name in ("query", "key", "value", "out", "grad_out"))
        tensors = query, key_, value, out, _logsumexp(new_node, named["lse"], first), grad_out
        # The strides of the stock op's gradients: the nodes after it were traced with them, and the lowering takes them from here.
        gradients = [_one_batch(x) for x in node.meta["val"]]
        new = flex_backward(graph, problem, mask, tensors, _scale(problem), gradients, matrix)
        new.meta = {**node.meta, **new.meta, "dash_op": str(node.target), MASK_NAME: "varlen", DECIDED_UNDER: key()}
        for gradient in list(node.users):
            of_one_batch = new_node(operator.getitem, new, gradient.args[1])
            packed = new_node(aten.permute.default, new_node(aten.squeeze.dim, of_one_batch, 0), [1, 0, 2])
            gradient.replace_all_uses_with(packed)
            graph.erase_node(gradient)
    graph.erase_node(node)


def rewriting_of(node: fx.Node, settings: Config) -> tuple[Problem, Window]:
    """The problem of a node, and its window. Comparisons of symbolic sizes guard: the answer holds for all shapes.

    Raises:
        ValueError: with the reason why it keeps the stock kernel.
    """
    named = arguments(node)
    query, key, value, cu_q, cu_k = (value_of(named[name]) for name in ("query", "key", "value", "cu_seq_q", "cu_seq_k"))
    if reason := why_no_target(query.device):
        raise ValueError(reason)
    if not _takes_flash(named, query.device):
        raise ValueError("varlen_attn takes cuDNN, which is not rewritten: under sdpa_kernel(SDPBackend.FLASH_ATTENTION) it takes flash")
    if not isinstance(named["scale"], (float, int, type(None))):
        raise ValueError("a scale that is not a constant")
    if cu_q.dtype != torch.int32 or cu_k.dtype != torch.int32 or cu_q.shape != cu_k.shape or cu_q.shape[0] < 2:
        offsets = " and ".join(f"{x.dtype} {list(x.shape)}" for x in (cu_q, cu_k))
        raise ValueError(f"offsets cu_seq_q and cu_seq_k of {offsets} are none of flash attention's")
    target = target_of(query.device, settings)
    tensors = (_one_batch(x) for x in (query, key, value))
    problem = Problem.of(*tensors, mask=BLOCK_MASK, scale=named["scale"], block_size=mask_block(target))
    resolve(problem, settings, target)
    return problem, _window(named)


def _takes_flash(named: dict[str, Any], device: torch.device) -> bool:
    if "backend" in named:
        return named["backend"] == FLASH
    return device.type != "cuda" or not varlen._should_use_cudnn(device.index)  # before torch 2.15


def _window(named: dict[str, Any]) -> Window:
    left, right = (int(value_of(size)) for size in named["window_size"] or (-1, -1))
    if named["is_causal"]:
        right = 0
    max_q, max_k = value_of(named["max_q"]), value_of(named["max_k"])
    if 0 <= left < max_k and not 0 <= right < max_k and max_q > max_k:
        raise ValueError("a window to the left alone, and more queries than keys: flash attention then ends it on the right too")
    before, behind = (None if size < 0 else min(size, LARGEST) for size in (left, right))
    return before, behind


def _scale(problem: Problem) -> float:
    return 1 / math.sqrt(problem.head_dim) if problem.scale is None else problem.scale


def _one_batch(x: Tensor) -> Tensor:
    return x.permute(1, 0, 2).unsqueeze(0)


def intervals(new_node: Call, query: fx.Node, cu_q: fx.Node, cu_k: fx.Node, window: Window, rows: int) -> tuple[fx.Node, fx.Node]:
    """The first and last key that each query sees, int32 [blocks, rows] of Q; NOWHERE and -1 where it sees none.

    Queries of no sequence see none, nor do those that fill the last block. Whatever the offsets hold, nothing is read out of range.
    """
    integers = {"dtype": torch.int32, "device": value_of(query).device}

    def count(n: Any, step: int) -> fx.Node:
        return new_node(prims.iota.default, n, start=0, step=step, **integers, requires_grad=False)

    def each_sequence(offsets: fx.Node, start: int, end: int) -> fx.Node:
        # Clamped, for memory of its own: before torch 2.15 Inductor's bucketize reads a view from where its base begins.
        return new_node(aten.clamp_min.default, new_node(aten.slice.Tensor, offsets, 0, start, end), 0)

    begin_of_block = new_node(aten.unsqueeze.default, count(_blocks(new_node, query, rows), rows), 1)
    token = new_node(aten.add.Tensor, begin_of_block, count(rows, 1))
    # Counted from the offsets between sequences, and so in range for every token.
    sequence = new_node(aten.bucketize.Tensor, token, each_sequence(cu_q, 1, -1), out_int32=True, right=True)
    begin_q, begin_k = (new_node(aten.index.Tensor, each_sequence(cu, 0, -1), [sequence]) for cu in (cu_q, cu_k))
    end_q, end_k = (new_node(aten.index.Tensor, each_sequence(cu, 1, sys.maxsize), [sequence]) for cu in (cu_q, cu_k))
    place = new_node(aten.add.Tensor, token, new_node(aten.sub.Tensor, end_k, end_q))  # the key in line with the query
    before, behind = window
    first, last = begin_k, new_node(aten.sub.Tensor, end_k, 1)
    if before is not None:
        first = new_node(aten.maximum.default, first, new_node(aten.sub.Tensor, place, before))
    if behind is not None:
        last = new_node(aten.minimum.default, last, new_node(aten.add.Tensor, place, behind))
    inside = _both(new_node, new_node(aten.ge.Tensor, token, begin_q), new_node(aten.lt.Tensor, token, end_q))
    sees = _both(new_node, inside, new_node(aten.le.Tensor, first, last))
    nowhere, none = (new_node(aten.full.default, [], value, **integers) for value in (NOWHERE, -1))
    return new_node(aten.where.self, sees, first, nowhere), new_node(aten.where.self, sees, last, none)


def block_matrix(new_node: Call, first: fx.Node, last: fx.Node, key: fx.Node, keys: int) -> fx.Node:
    """As `BlockMask` has it, of the intervals of queries, for blocks of so many keys. A block that lies between the keys of its
    queries, and in none of their intervals, is 1 as well."""
    count = _blocks(new_node, key, keys)
    device = value_of(first).device
    begin = new_node(prims.iota.default, count, start=0, step=keys, dtype=torch.int32, device=device, requires_grad=False)
    begin = new_node(aten.unsqueeze.default, begin, 1)
    end = new_node(aten.add.Tensor, begin, keys - 1)

    def of_block(reduction: Any, x: fx.Node) -> fx.Node:
        return new_node(reduction, x, [1])

    some = _both(
        new_node,
        new_node(aten.le.Tensor, begin, of_block(aten.amax.default, last)),
        new_node(aten.ge.Tensor, end, of_block(aten.amin.default, first)),
    )
    whole = _both(
        new_node,
        new_node(aten.ge.Tensor, begin, of_block(aten.amax.default, first)),
        new_node(aten.le.Tensor, end, of_block(aten.amin.default, last)),
    )
    kinds = (new_node(prims.convert_element_type.default, x, torch.int32) for x in (some, whole))
    matrix = new_node(aten.add.Tensor, *kinds)
    return new_node(aten.unsqueeze.default, new_node(aten.unsqueeze.default, matrix, 0), 0)


def _both(new_node: Call, x: fx.Node, y: fx.Node) -> fx.Node:
    return new_node(aten.bitwise_and.Tensor, x, y)


def _length(new_node: Call, x: fx.Node, dim: int) -> Any:
    """A number, or where that is known at run time only, a node."""
    length = value_of(x).shape[dim]
    return length if isinstance(length, int) else new_node(aten.sym_size.int, x, dim)


def _blocks(new_node: Call, x: fx.Node, size: int) -> Any:
    """Of so many tokens; as `_length`."""
    length = _length(new_node, x, 0)
    if isinstance(length, int):
        return -(-length // size)
    return new_node(operator.floordiv, new_node(operator.add, length, size - 1), size)


def _within_interval() -> fx.GraphModule:
    """first[m] <= n <= last[m]."""
    graph = fx.Graph()
    _, _, m, n, first, last = (graph.placeholder(name) for name in (*NAMES, "first", "last"))
    first, last = (graph.call_function(aten.index.Tensor, (x, [m])) for x in (first, last))
    bounds = graph.call_function(aten.ge.Tensor, (n, first)), graph.call_function(aten.le.Tensor, (n, last))
    graph.output(graph.call_function(aten.bitwise_and.Tensor, bounds))
    return fx.GraphModule(torch.nn.Module(), graph)


def _logsumexp(new_node: Call, logsumexp: fx.Node, first: fx.Node) -> fx.Node:
    """[H, T] -> [1, H, T], infinite where a query sees no key: of queries of no sequence the stock op leaves memory as it was."""
    length = _length(new_node, logsumexp, 1)
    none = new_node(aten.eq.Scalar, new_node(aten.slice.Tensor, first, 0, 0, length), NOWHERE)
    infinite = new_node(aten.full.default, [], math.inf, dtype=torch.float32, device=value_of(logsumexp).device)
    return new_node(aten.unsqueeze.default, new_node(aten.where.self, none, infinite, logsumexp), 0)
