"""The backwards of flash_attn and of FlashAttention 3 become others: the dense ones SDPA's, on views with the heads first, those of
packed sequences varlen_attn's. They are known by their schemas, for the kernels hub has them in namespaces with a hash.

They write gradients into their arguments, each a tensor of its own or a part of one that a packed query, key and value have. So
they stand in the graph in an `auto_functionalized_v2`, whose outputs are those tensors, the bases, with the gradients in them.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch._ops import OpOverload

from ..config import Config
from ..decision import Declined, Kernel, Stock, is_of_torch
from . import sdpa, varlen
from .declined import DROPOUT
from .mask_function import MaskFunction, in_window
from .nodes import SWAPPED, aten, call, value_of
from .score_function import OfFlashAttn
from .stock_ops import (
    CALLED,
    FLASH,
    GRADIENTS,
    KEPT,
    READ,
    SCORES,
    SEQUENCES,
    SIDES,
    VARLEN,
    WINDOW,
    forward_of,
    implementation_of,
)
from .third_party import OURS, arguments

NAME = re.compile(r"_flash_attn(_varlen)?_backward")  # of an op, in whatever namespace
FLEX = "call torch.nn.attention.flex_attention.flex_attention"
# Of an argument, the value that is rewritten, and what another one is.
LENGTHS = dict.fromkeys(("sequed_q", "sequed_k"), (None, "a length of each sequence beside its place"))
SCALES = dict.fromkeys(("q_descale", "k_descale", "v_descale"), (None, "a scale of 8-bit tensors"))
NOT_IN_FORWARD = {"qv": (None, "qv"), "attention_chunk": (0, "attention_chunk"), **SCALES}


def is_backward(node: fx.Node) -> bool:
    """Whether a node is such a backward, or called as one."""
    op = node.args[0] if node.target is auto_functionalized_v2 else None
    if not isinstance(op, OpOverload) or is_of_torch(str(op)):
        return False
    return implementation_of(op) is not None or NAME.fullmatch(str(op).split(".")[1]) is not None


def rewrite(node: fx.Node, settings: Config) -> list[fx.Node]:
    """Puts a node of ours in the place of such an op; returns the nodes that are obsolete.

    Raises:
        Declined: it keeps its kernel.
    """
    op: Any = node.args[0]
    graph, named = node.graph, {**arguments(node), **node.kwargs}
    named.setdefault("is_causal", named.get("causal"))
    of_varlen = named.get("cu_seqlens_q") is not None
    kept = _require_what_is_known(op, named)
    bases: Sequence[fx.Node] = named["_all_bases"]  # type: ignore[assignment]
    places = {name: _place(name, named, bases) for name in GRADIENTS}
    with graph.inserting_before(node):
        backward = (_of_varlen if of_varlen else _of_sdpa)(graph, named)
        values = tuple(_view(name, named, bases) for name in GRADIENTS)
        backward.meta |= {**node.meta, "val": values if of_varlen else tuple(x.permute(SWAPPED) for x in values)}
        backward.meta |= {CALLED: op, KEPT: kept}
        made = [call(graph, operator.getitem, backward, index) for index in range(3)]
        made = made if of_varlen else [call(graph, aten.permute.default, x, SWAPPED) for x in made]
        gradients, users = dict(zip(GRADIENTS, made, strict=True)), list(node.users)
        for user in (each for each in users if each.users):
            user.replace_all_uses_with(_base(graph, int(user.args[1]) - 1, bases, places, gradients))  # type: ignore[arg-type]
    return [*(varlen if of_varlen else sdpa).rewrite(backward, settings), *users, node]


def _of_sdpa(graph: fx.Graph, named: Mapping[str, Any]) -> fx.Node:
    """The backward of SDPA's flash op."""
    tensors = {name: call(graph, aten.permute.default, named[name], SWAPPED) for name in ("dout", "q", "k", "v", "out")}
    lengths, random = [value_of(tensors[name]).shape[2] for name in "qk"], named.get("rng_state")
    saved = tensors["out"], named["softmax_lse"], None, None, *lengths
    options = named.get("dropout_p", 0.0), named["is_causal"], random, random
    given: Any = (*(tensors[name] for name in ("dout", "q", "k", "v")), *saved, *options)
    backward = graph.call_function(FLASH, given, {"scale": named["softmax_scale"]})
    sides = _sides(named, *lengths)
    if window := _window(*sides, *lengths):
        backward.meta[WINDOW] = window
    if scores := _scores(named, sides, lengths[1]):
        if scores.slopes is not None and not scores.is_causal:
            _require_known("ALiBi that is not causal", *lengths)
        backward.meta[SCORES] = scores.function(0 if scores.is_causal else lengths[1] - lengths[0])
    return backward


def _sides(named: Mapping[str, Any], q_len: Any, kv_len: Any) -> varlen.Window:
    sizes = {"window_size": [named[side] for side in SIDES], "max_q": q_len, "max_k": kv_len}
    return varlen.window_of({**sizes, "is_causal": named["is_causal"]})


def _window(before: int | None, behind: int | None, q_len: Any, kv_len: Any) -> MaskFunction | None:
    """What a query sees, the last query being in line with the last key; None where that is all, or causal of one length."""
    if before is None and (behind is None or (behind == 0 and q_len == kv_len)):
        return None
    _require_known("a window", q_len, kv_len)
    return in_window(before, behind, kv_len - q_len)


def _require_known(what: str, q_len: Any, kv_len: Any) -> None:
    if not (isinstance(q_len, int) and isinstance(kv_len, int)):
        raise Declined(f"{what}, of lengths that are known only at run time", "compile with dynamic=False, or use varlen_attn")


def _scores(named: Mapping[str, Any], window: varlen.Window, kv_len: Any) -> OfFlashAttn | None:
    """What it makes of scores; None where they stay."""
    cap, slopes, (before, behind) = max(0.0, value_of(named["softcap"])), named.get("alibi_slopes"), window
    # Which kernel it takes, on which ALiBi depends.
    is_causal = behind == 0 and (before is None or (slopes is not None and varlen.decided(lambda: before >= kv_len)))
    return OfFlashAttn(cap, slopes, is_causal) if cap or slopes is not None else None


def _of_varlen(graph: fx.Graph, named: Mapping[str, Any]) -> fx.Node:
    """The backward of varlen_attn, which has no dropout, by flash attention."""
    dropout_p = named.get("dropout_p", 0.0)
    if dropout_p != 0.0:
        raise Declined(f"{dropout_p=}: its random bits have a layout that only flash_attn knows", DROPOUT)
    given = (*(named[name] for name in (*READ, *SEQUENCES)), named["is_causal"], named.get("rng_state"))
    options = {"scale": named["softmax_scale"], "window_size": [named[side] for side in SIDES]}
    if any(argument.name == "backend" for argument in VARLEN._schema.arguments):
        options["backend"] = varlen.FLASH
    backward = graph.call_function(VARLEN, given, options)
    lengths = [value_of(named[name]) for name in SEQUENCES[2:]]
    if scores := _scores(named, _sides(named, *lengths), lengths[1]):
        if scores.slopes is not None and scores.slopes.meta["val"].dim() > 1:
            raise Declined("ALiBi with slopes of each packed sequence", f"give slopes of heads, [H], or {FLEX}")
        backward.meta[SCORES] = scores
    return backward


def _require_what_is_known(op: OpOverload, named: Mapping[str, Any]) -> Stock | None:
    """What the op keeps where it stays; None where it is not deterministic as it is called, so that ours is taken always."""
    implementation = implementation_of(op)
    if implementation is None:
        raise Declined("its arguments are those of neither flash_attn 2.8 nor FlashAttention 3", f"use one of these, or {OURS}")
    forward = forward_of(op)
    if forward is None:
        raise Declined("a backward of flash_attn, to which no forward belongs by its name", f"use flash_attn 2.8, or {OURS}")
    _require(named, LENGTHS)
    if implementation == "FA3":
        node = named["out"].args[0] if named["out"].target is operator.getitem else named["out"]
        if node.target is not forward:
            raise Declined("a backward of FlashAttention 3 whose forward is not in the graph", "compile both")
        _require(arguments(node), NOT_IN_FORWARD)
    return Stock(Kernel.FLASH, True, implementation, called=True) if named["deterministic"] is True else None


def _require(named: Mapping[str, Any], expected: Mapping[str, tuple[Any, str]]) -> None:
    for name, (value, what) in expected.items():
        if value_of(named.get(name, value)) != value:
            raise Declined(f"{what} of flash_attn is not rewritten", FLEX)


def _place(name: str, named: Mapping[str, Any], bases: Sequence[fx.Node]) -> tuple[int, int | None, int]:
    """Where a gradient lies: the number of its base, the dimension along which that is packed, None if it is not, and the place."""
    index = named.get(f"_{name}_base_index")
    if index is not None:
        base, view = bases[index].meta["val"], _view(name, named, bases)
        packed = (dim for dim in range(base.dim()) if base.shape[dim] in (2, 3))
        selected = ((dim, number, base.select(dim, number)) for dim in packed for number in range(base.shape[dim]))
        for dim, number, part in itertools.chain([(None, 0, base)], selected):
            if (part.shape, part.stride(), part.storage_offset()) == (view.shape, view.stride(), view.storage_offset()):
                return index, dim, number
    raise Declined("gradients of flash_attn that are written elsewhere than into packed or separate tensors", "call SDPA")


def _view(name: str, named: Mapping[str, Any], bases: Sequence[fx.Node]) -> Any:
    """The fake tensor into which a gradient is written."""
    base = bases[named[f"_{name}_base_index"]].meta["val"]
    if f"_{name}_size" in named:
        return base.as_strided(*(named[f"_{name}_{what}"] for what in ("size", "stride", "storage_offset")))
    if f"_{name}_slice_dim" in named:
        raise Declined("gradients of flash_attn that are written into slices", "call SDPA")
    return base


def _base(
    graph: fx.Graph,
    index: int,
    bases: Sequence[fx.Node],
    places: Mapping[str, tuple[int, int | None, int]],
    gradients: Mapping[str, Any],
) -> fx.Node:
    """A base with the gradients in it."""
    parts = {place: (dim, gradients[name]) for name, (of, dim, place) in places.items() if of == index}
    if index < 0 or not parts:
        raise Declined("the softmax sums of flash_attn's backward are used", "do not use them")
    dims = {dim for dim, _ in parts.values()}
    if dims == {None} and len(parts) == 1:
        return parts[0][1]
    (dim,) = dims if len(dims) == 1 else (None,)
    if dim is None or sorted(parts) != list(range(bases[index].meta["val"].shape[dim])):
        raise Declined("gradients of flash_attn that fill a packed tensor in part", "call SDPA")
    return call(graph, aten.cat.default, [call(graph, aten.unsqueeze.default, parts[n][1], dim) for n in sorted(parts)], dim)
