"""Turns backwards of `varlen_attn` in a joint graph into FlexAttention's.

Packed sequences are one batch element, in which a query sees an interval of the keys: what its own sequence, the diagonal and the
window leave. So the mask is two numbers for each query, and the blocks of the mask come from bounds of these.

At the level `batch` the sequences are moved apart first: then tiles are cut from the start of each, whatever it is packed with.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.attention import SDPBackend, varlen

from ..config import Config
from ..decision import Declined
from ..devices.target import target_of
from ..op import Mark
from ..problem import BLOCK_MASK, Problem
from ..resolve import Resolution, mask_block
from .context_parallel import KeySums, fold, key_sums_if_asked, segments_of
from .declined import why_no_target
from .flex_node import flex_backward
from .mask_function import LARGEST, NAMES, MaskFunction
from .nodes import call, outputs_of, reached, traced, value_of
from .offsets import InPlace, Moved, Offsets, moved_length
from .origin import origin_of
from .resolved import resolved
from .score_function import OfFlashAttn
from .sdpa import SCALE
from .stock_ops import CALLED, KEPT, SCORES, VARLEN, arguments, implementation_for, stock_of

FLASH: int = SDPBackend.FLASH_ATTENTION.value  # type: ignore[attr-defined]
TENSORS = "query", "key", "value", "out", "lse", "grad_out", "cu_seq_q", "cu_seq_k"
OPTIONS = "max_q", "max_k", "is_causal", "rng_state", "scale", "window_size", "backend"
LOGSUMEXP = (
    "the graph computes with its logsumexp, and torch's backward of varlen_attn leaves out what that gives query and key: their "
    "gradients are wrong",
    "take flex_attention, whose logsumexp (return_aux=AuxRequest(lse=True)) has a gradient, or detach the logsumexp",
)
FORWARDS = torch.ops.torch_attn._varlen_attn, torch.ops.torch_attn._varlen_attn.default
USED = "dash_logsumexp_is_used"  # in the annotations of a node, which AOTAutograd hands on
DETACHING = "detach", "detach_", "_get_data_attr"
NOWHERE = 2**30  # past all keys: where the interval of a query that sees none begins
Window = tuple[int | None, int | None]  # how far before and behind its own place a query sees; None: all


def note_used_logsumexps(gm: fx.GraphModule) -> None:
    """Notes at each forward of Dynamo's graph whether a gradient should flow through its logsumexp to query and key.

    Joint graphs do not tell: torch's backward takes no gradient of the logsumexp, and what was detached is not seen there.
    """
    for each in gm.modules():
        for node in each.graph.nodes if isinstance(each, fx.GraphModule) else ():
            if node.target in FORWARDS and _is_logsumexp_used(node):
                node.meta["custom"] = {**node.meta.get("custom", {}), USED: True}


def _is_logsumexp_used(node: fx.Node) -> bool:
    """Whether an output of the graph is computed of it and of the attention's output. What is returned alone may be a figure."""
    if not any(value.requires_grad for x in node.args[:2] if (value := _example(x)) is not None):
        return False
    is_on, without_gradient = True, set()
    for each in node.graph.nodes:
        if each.target is torch._C._set_grad_enabled:
            is_on = each.args[0]
        value = _example(each)
        if not is_on or _name(each.target) in DETACHING or not (value is None or value.is_floating_point()):
            without_gradient.add(each)
    flows = [reached(outputs_of(node, index), lambda x: set(x.users) - without_gradient) for index in (0, 1)]
    return any(x.op == "output" for x in set[fx.Node].intersection(*flows) for x in x.users)


def _example(x: Any) -> Tensor | None:
    """The fake tensor that Dynamo has of a node; None of what is none."""
    value = x.meta.get("example_value") if isinstance(x, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def _name(target: Any) -> str:
    """A method's, or a function's."""
    return target if isinstance(target, str) else getattr(target, "__name__", "").partition(".")[0]


def rewrite(node: fx.Node, settings: Config) -> list[fx.Node]:
    """Puts FlexAttention's node in the place of the stock op's; returns the nodes that are obsolete. Raises as `rewriting_of`."""
    (resolution, window, key_sums), graph = rewriting_of(node, settings), node.graph
    assert resolution.problem.block_size
    named = arguments(node)
    mark = Mark(resolution, str(node.meta.get(CALLED, node.target)), "varlen", *origin_of(node)[:2])
    layouts = functools.partial(_layouts, resolution)
    users = list(node.users)
    with graph.inserting_before(node):
        inputs = [named[name] for name in TENSORS]
        of_one_batch = functools.partial(_of_one_batch, window, resolution.problem.block_size, layouts)
        *tensors, first, last, matrix = traced(graph, of_one_batch, inputs)
        made: OfFlashAttn | None = node.meta.get(SCORES)
        (place,) = traced(graph, functools.partial(places, made.is_causal, layouts), inputs) if made and made.slopes else (0,)
        scores = made.function(place) if made else None
        # The strides of the stock op's gradients: the nodes after it were traced with them, and the lowering takes them from here.
        # Those of moved sequences are another tensor's.
        is_moved = resolution.settings.guarantee == "batch"
        like = [x.meta["val"] for x in tensors[:3]] if is_moved else map(_one_batch, node.meta["val"])
        new = flex_backward(graph, MaskFunction(_in_interval(), (first, last)), tensors, [*like], mark, matrix, scores)
        new.meta = {**node.meta, **new.meta}
        folded = fold(new, key_sums, resolution.problem.segments, _of_packed) if key_sums else []
        unpacked = [call(graph, operator.getitem, new, index) for index in range(1 if key_sums else 3)]
        packed = traced(graph, functools.partial(_packed, layouts, len(unpacked)), [*unpacked, *inputs])
        for gradient in users:
            if gradient.args[1] < len(packed):  # type: ignore[operator]
                gradient.replace_all_uses_with(packed[gradient.args[1]])  # type: ignore[index]
    return [*folded, *users, node]


def rewriting_of(node: fx.Node, settings: Config) -> tuple[Resolution, Window, KeySums | None]:
    """What a node gets, its window, and how its dk and dv come to sums over ranks, if those are of segments.

    Comparisons of symbolic sizes guard: the answer holds for all shapes.

    Raises:
        Declined: it keeps the stock kernel.
    """
    named = arguments(node)
    forward = named["lse"].args[:1]
    if any(isinstance(x, fx.Node) and USED in x.meta.get("custom", {}) for x in forward):
        raise Declined(*LOGSUMEXP)
    query, key, value, cu_q, cu_k = (value_of(named[name]) for name in ("query", "key", "value", "cu_seq_q", "cu_seq_k"))
    if declined := why_no_target(query.device):
        raise declined
    if unknown := [name for name, given in named.items() if name not in (*TENSORS, *OPTIONS) and given is not None]:
        raise Declined(f"varlen_attn's backward takes {', '.join(unknown)}, which is not known here", "use a newer dash_inductor")
    implementation = implementation_for(str(VARLEN), named)
    if not _takes_flash(named):
        raise Declined(
            "varlen_attn takes cuDNN, which is not rewritten",
            "call it under torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION); torch 2.14, which does not look at that, "
            "takes flash attention for a window_size as long as the sequences",
            stock_differs=implementation != "CUDNN",
        )
    # Its `sdpa_fwd` takes TOP_LEFT where nothing else is asked for (cudnn-frontend's torch_op.py).
    if (
        implementation == "CUDNN"
        and named["cu_seq_q"] is not named["cu_seq_k"]
        and (named["is_causal"] or _sides(named) != (-1, -1))
    ):
        raise Declined(
            "cudnn-frontend's varlen_attn puts the first query of a sequence in line with the first key, flash attention the last",
            "where their lengths are equal, give cu_seq_q and cu_seq_k as one tensor; or call restore_flash_attention_impl()",
        )
    if not isinstance(named["scale"], (float, int, type(None))):
        raise Declined(*SCALE)
    if cu_q.dtype != torch.int32 or cu_k.dtype != torch.int32 or cu_q.shape != cu_k.shape or cu_q.shape[0] < 2:
        offsets = " and ".join(f"{x.dtype} {list(x.shape)}" for x in (cu_q, cu_k))
        raise Declined(
            f"offsets cu_seq_q and cu_seq_k of {offsets} are none of flash attention's",
            "give offsets as int32 tensors of one shape, [sequences + 1]",
        )
    key_sums = key_sums_if_asked(node, settings)
    if key_sums and settings.guarantee == "batch":
        by_place = "segment with guarantee='batch': which segment a query is in depends on what its sequence is packed with"
        raise Declined(by_place, "take guarantee='device'")
    target = target_of(query.device, settings)
    tensors = (_one_batch(x) for x in (query, key, value))
    scores: OfFlashAttn | None = node.meta.get(SCORES)
    place = fx.Graph().placeholder("place") if scores and scores.slopes else 0  # for a node that `rewrite` writes
    function = scores.function(place) if scores else None
    function_ops = function.operations if function else 0
    block_size = mask_block(target, settings, (query.shape[-1], value.shape[-1]))
    stock = node.meta[KEPT] if CALLED in node.meta else stock_of(VARLEN, named)
    segments = segments_of(query.shape[0], block_size[0], settings) if key_sums else 0
    others: dict[str, Any] = {"segments": segments}
    others |= {"block_size": block_size, "function_ops": function_ops, "changes_scores": scores is not None, "stock": stock}
    problem = Problem.of(*tensors, mask=BLOCK_MASK, scale=named["scale"], **others)
    if settings.guarantee == "batch":
        rows, keys = (moved_length(x.shape[0], cu_q, block) for x, block in zip((query, key), block_size, strict=True))
        problem = replace(problem, q_len=rows, kv_len=keys)
    functions = (function.module, function.derivative) if function else None
    captures = [scores.slopes.meta["val"], cu_q.new_empty(query.shape[0])] if scores and scores.slopes else []
    return resolved(problem, settings, query, functions, captures), window_of(named), key_sums


def _takes_flash(named: dict[str, Any]) -> bool:
    """Whether the op takes flash attention: since torch 2.15 an argument decides, in 2.14 the problem, before the GPU."""
    if "backend" in named:
        return named["backend"] == FLASH
    query, key, value, max_q = (value_of(named[name]) for name in ("query", "key", "value", "max_q"))
    if hasattr(varlen, "_can_use_cudnn"):
        return not varlen._can_use_cudnn(query, key, value, max_q, [*_sides(named)])
    return not query.is_cuda or not varlen._should_use_cudnn(query.device.index)


def _sides(named: dict[str, Any]) -> tuple[int, int]:
    left, right = (int(value_of(size)) for size in named["window_size"] or (-1, -1))
    return left, right


def window_of(named: dict[str, Any]) -> Window:
    """By window_size, is_causal, max_q and max_k. Raises Declined where flash attention has another one than they say."""
    left, right = _sides(named)
    if named["is_causal"]:
        right = 0
    max_q, max_k = value_of(named["max_q"]), value_of(named["max_k"])
    more_queries = (left >= 0 or right > 0) and decided(lambda: max_q > max_k)
    if more_queries and 0 <= left < max_k and not 0 <= right < max_k:
        reason = "a window to the left alone, and more queries than keys: flash attention then ends it on the right too"
        raise Declined(reason, "give both sides of window_size")
    if more_queries and max_k <= right < max_q:
        reason = "a window to the right of all keys, and more queries than that: flash attention then has none"
        raise Declined(reason, "give window_size a right side of -1, or of less than the keys")
    before, behind = (None if size < 0 else min(size, LARGEST) for size in (left, right))
    return before, behind


def decided(compare: Callable[[], Any]) -> bool:
    """What a comparison of lengths comes to; Declined where they are elements of a tensor."""
    try:
        return bool(compare())
    except GuardOnDataDependentSymNode:
        raise Declined(
            "lengths that are read from a tensor, and a window that depends on them", "give them as Python numbers"
        ) from None


def _layouts(resolution: Resolution, query: Tensor, key: Tensor, cu_q: Tensor, cu_k: Tensor) -> tuple[InPlace, InPlace]:
    """Where the sequences of queries and of keys lie for the kernel."""
    blocks = resolution.problem.block_size
    assert blocks
    if resolution.settings.guarantee == "batch":
        return Moved(cu_q, query.shape[0], blocks[0]), Moved(cu_k, key.shape[0], blocks[1])
    return InPlace(cu_q, query.shape[0]), InPlace(cu_k, key.shape[0])


def _of_one_batch(
    window: Window,
    block_size: tuple[int, int],
    layouts: Callable[..., tuple[InPlace, InPlace]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    grad_out: Tensor,
    *cu_seqlens: Tensor,
) -> tuple[Tensor, ...]:
    """What `flex_backward` takes: its tensors, the captures of the mask, and the matrix of blocks."""
    rows, keys = block_size
    of_q, of_k = layouts(query, key, *cu_seqlens)
    first, last = intervals(of_q.length, of_q.offsets, of_k.offsets, window, rows)
    matrix = block_matrix(first, last, of_k.length, keys)
    first, last = first.flatten(), last.flatten()
    # Of queries of no sequence the stock op leaves memory as it was.
    logsumexp = of_q.there(logsumexp, 1).masked_fill(first.narrow(0, 0, of_q.length) == NOWHERE, math.inf).unsqueeze(0)
    query, out, grad_out = (_one_batch(of_q.there(x)) for x in (query, out, grad_out))
    key, value = (_one_batch(of_k.there(x)) for x in (key, value))
    return query, key, value, out, logsumexp, grad_out, first, last, matrix


def _one_batch(x: Tensor) -> Tensor:
    """[T, H, D] -> [1, H, T, D]."""
    return x.permute(1, 0, 2).unsqueeze(0)


def _of_packed(x: Tensor) -> Tensor:
    """[1, H, T, D] -> [T, H, D]."""
    return x.squeeze(0).permute(1, 0, 2)


def _packed(layouts: Callable[..., tuple[InPlace, InPlace]], count: int, *tensors: Tensor) -> list[Tensor]:
    """Gradients [T, H, D] of `count` of one batch, dq first, which the inputs of `_of_one_batch` follow."""
    gradients, (query, key, *others) = tensors[:count], tensors[count:]
    of_q, of_k = layouts(query, key, *others[-2:])
    return [layout.back(_of_packed(gradient)) for layout, gradient in zip((of_q, of_k, of_k), gradients, strict=False)]


def intervals(length: Any, queries: Offsets, keys: Offsets, window: Window, rows: int) -> tuple[Tensor, Tensor]:
    """The first and last key that each of `length` queries sees, int32 [blocks of Q, rows]; NOWHERE and -1 where it sees none.

    Queries of no sequence see none, nor do those that fill the last block. Whatever the offsets hold, nothing is read out of range.
    """
    token = torch.arange(_blocks(length, rows) * rows, dtype=torch.int32, device=queries.begin.device).view(-1, rows)
    number = queries.sequence(token)
    (begin_q, end_q), (begin_k, end_k) = queries.bounds(number), keys.bounds(number)
    place = token + (end_k - end_q)  # the key in line with the query
    before, behind = window
    first = begin_k if before is None else torch.maximum(begin_k, place - before)
    last = end_k - 1 if behind is None else torch.minimum(end_k - 1, place + behind)
    blind = (token < begin_q) | (token >= end_q) | (first > last)
    return first.masked_fill(blind, NOWHERE), last.masked_fill(blind, -1)


def places(
    is_causal: bool, layouts: Callable[..., tuple[InPlace, InPlace]], query: Tensor, key: Tensor, *others: Tensor
) -> tuple[Tensor]:
    """int32 [T], as `OfFlashAttn.function` takes them, of the inputs of `_of_one_batch`."""
    of_q, of_k = layouts(query, key, *others[-2:])
    token = torch.arange(of_q.length, dtype=torch.int32, device=query.device)
    number = of_q.offsets.sequence(token)
    (_, end_q), (begin_k, end_k) = of_q.offsets.bounds(number), of_k.offsets.bounds(number)
    return (begin_k if is_causal else token + (end_k - end_q),)


def block_matrix(first: Tensor, last: Tensor, length: Any, keys: int) -> Tensor:
    """The matrix of `MaskArguments`, of the intervals of queries, for `length` keys in blocks of `keys`.

    A block that lies between the keys of its queries, and in none of their intervals, is 1 as well.
    """
    begin = torch.arange(_blocks(length, keys), dtype=torch.int32, device=first.device).unsqueeze(1) * keys
    end = begin + (keys - 1)
    some = (begin <= last.amax(1)) & (end >= first.amin(1))
    all_ = (begin >= first.amax(1)) & (end <= last.amin(1))
    return (some.to(torch.int8) + all_.to(torch.int8)).unsqueeze(0).unsqueeze(0)


def _blocks(length: Any, size: int) -> Any:
    return (length + size - 1) // size


def _in_interval() -> fx.GraphModule:
    """first[m] <= n <= last[m], of the intervals."""
    graph, aten = fx.Graph(), torch.ops.aten
    _, _, m, n, *interval = (graph.placeholder(name) for name in (*NAMES, "first", "last"))
    first, last = (graph.call_function(aten.index.Tensor, (x, [m])) for x in interval)
    bounds = graph.call_function(aten.ge.Tensor, (n, first)), graph.call_function(aten.le.Tensor, (n, last))
    graph.output(graph.call_function(aten.bitwise_and.Tensor, bounds))
    return fx.GraphModule(torch.nn.Module(), graph)
