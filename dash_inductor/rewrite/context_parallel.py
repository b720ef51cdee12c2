"""Context parallelism: the queries are divided among ranks.

Where each rank gathers the keys of all ranks, their gradients dk and dv go into a reduce-scatter: a sum over ranks, of which each
gets the share of its own keys. The order of that sum is the backend's, and another number of ranks adds up other parts. With the
setting `segment` it becomes a sum of segments of so many queries (parallel/fold.py). Which rank has a segment does not matter then.

Whatever gathers keys: what the graph does to dk and dv before these sums is found, and done to the gradients of each segment.

A ring sends keys from rank to rank instead. It merges the outputs of parts of the keys before a backward starts.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..config import Config
from ..decision import GATHERED, RING, Declined
from ..op import OF_SEGMENTS, SEGMENTS, FlexArguments
from ..parallel.fold import FOLD_SEGMENTS
from .nodes import SQUEEZES, VIEWS, aten, call, outputs_of, reached, traced, value_of

OF_HOOK = "cplib.flex_cp_allgather_backward.default"  # of dk, dv, dimension, name of the group: by torch's hook for FlexAttention
# Of a tensor or of several, the reduction, number of ranks, name of the group.
REDUCE_SCATTERS = tuple(f"_c10d_functional.reduce_scatter_tensor{name}.default" for name in ("", "_coalesced"))
WAIT = "_c10d_functional.wait_tensor.default"
SENDS = "_c10d_functional.all_to_all_single.default"  # a ring's, and of those that exchange heads for queries
CONVERSIONS = (torch.ops.prims.convert_element_type.default, aten._to_copy.default)
MOVES = (
    *(*VIEWS, *SQUEEZES, *CONVERSIONS, operator.getitem),
    *(aten.permute.default, aten.transpose.int, aten.clone.default, aten.slice.Tensor, aten.select.int, aten.split.Tensor),
    *(aten.cat.default, aten.slice_scatter.default, aten.select_scatter.default, aten.constant_pad_nd.default),
)
# Of parts of a gradient, as where key and value are gathered together, and of the heads of a group.
ADDS = (aten.add.Tensor, aten.sum.dim_IntList)
GATHER_IT = "gather key and value for this attention alone, after all that is computed of them"

log = logging.getLogger("dash_inductor")


@dataclass(frozen=True)
class Summed:
    """A sum over ranks.

    nodes: its result, and the nodes of the collective before that. of: what is summed. dim: along which each rank gets a share.
    group: the name of the process group.
    """

    nodes: tuple[fx.Node, ...]
    of: fx.Node
    dim: int
    group: str


@dataclass(frozen=True)
class KeySums:
    """How dk and dv come to their sums over ranks.

    starts: nodes whose values they are, each with the output of the backward. between: those from there to the sums, in the graph's
    order.
    """

    starts: dict[fx.Node, int]
    between: list[fx.Node]
    sums: list[Summed]


def form_of(node: fx.Node) -> str | None:
    """Whether the keys of an attention's backward come from all ranks: GATHERED or RING; None where that is not seen."""
    dq, *others = ({str(x.target) for x in _following(outputs_of(node, index))} for index in range(3))
    found = set[str]().union(*others)
    if found & {*REDUCE_SCATTERS, OF_HOOK, str(OF_SEGMENTS)}:
        return GATHERED
    return RING if SENDS in found - dq else None


def key_sums_of(node: fx.Node, starts: dict[fx.Node, int] | None = None) -> KeySums | None:
    """How a backward's dk and dv come to sums over ranks; None where they come to none.

    starts: as `KeySums` has them; None for the outputs of the backward.

    Raises:
        Declined: something else becomes of them on the way.
    """
    starts = starts or {x: index for index in (1, 2) for x in outputs_of(node, index)}
    starts = {x: index for x, index in starts.items() if x.users}
    following = _following(starts)
    ordered = [x for x in node.graph.nodes if x in following]
    sums = [each for x in ordered for each in _sums_of(x)]
    if not sums:
        return None
    ends = {end for x in sums for end in x.nodes}
    between = [x for x in ordered if x not in ends and x not in starts]
    for x in (*starts, *between):
        if any(isinstance(value_of(y), torch.SymInt) for y in x.all_input_nodes):
            raise Declined("segment under dynamic shapes", "compile with dynamic=False")
        if x not in starts and not (_is_linear(x) and all(y in following or _is_zero(y) for y in x.all_input_nodes)):
            raise Declined(f"segment: {x.target} stands between dK or dV and their sum over ranks", GATHER_IT)
        if any(user not in following or user.op == "output" for user in x.users):
            raise Declined("segment: dK or dV are not only summed over ranks", GATHER_IT)
    return KeySums(starts, between, sums)


def key_sums_if_asked(node: fx.Node, settings: Config, starts: dict[fx.Node, int] | None = None) -> KeySums | None:
    """Those of `key_sums_of`, where the setting `segment` asks for them. If there are none, that is said once."""
    key_sums = key_sums_of(node, starts) if settings.segment else None
    if settings.segment and key_sums is None:
        warn_of_none(settings.segment, form_of(node))
    return key_sums


def _following(starts: Iterable[fx.Node]) -> set[fx.Node]:
    """These, and what is computed of them element by element or by moves and sums, up to what crosses ranks."""
    starts = list(starts)
    return reached(starts, lambda x: x.users if x in starts or _goes_on(x) else ())


def _goes_on(node: fx.Node) -> bool:
    if node.target is operator.getitem and str(node.args[0].target) == OF_HOOK:  # type: ignore[union-attr]
        return False
    if node.target is aten.sum.dim_IntList:  # of the heads of a group; not of all places, as for the weight of a norm
        x, dims, *_ = node.args
        return len(dims) == 1 and x.meta["val"].dim() > 3  # type: ignore[arg-type, union-attr]
    pointwise = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags
    return pointwise or node.target in (*MOVES, *ADDS) or str(node.target) in (*REDUCE_SCATTERS, OF_HOOK)


def _is_linear(node: fx.Node) -> bool:
    """Whether a node moves or adds up tensors, and nothing else: then it may do so to parts of them."""
    if node.target in CONVERSIONS:
        return bool(node.meta["val"].is_floating_point())
    if node.target is aten.add.Tensor:
        return all(isinstance(x, fx.Node) for x in node.args)
    if node.target is aten.constant_pad_nd.default:
        return node.args[2:] in ((), (0,), (0.0,))
    return node.target in (*MOVES, *ADDS)


def _sums_of(node: fx.Node) -> list[Summed]:
    """What a node sums over ranks, if it does."""
    name, arguments = str(node.target), list[Any](node.args)
    if name == OF_HOOK:
        *of, dim, group = arguments
        return [Summed((x, node), of[index], dim, group) for index in (0, 1) for x in outputs_of(node, index)]
    if name not in REDUCE_SCATTERS:
        return []
    summed, reduction, _, group = arguments
    if reduction != "sum":
        raise Declined(f"segment: dK and dV are reduced over ranks by {reduction!r}", "reduce them by 'sum'")
    results = [(node, summed)]
    if isinstance(summed, (list, tuple)):
        results = [(result, of) for index, of in enumerate(summed) for result in outputs_of(node, index)]
    return [
        Summed((user, result, node), of, 0, group) for result, of in results for user in result.users if str(user.target) == WAIT
    ]


def _is_zero(node: fx.Node) -> bool:
    return node.target is aten.full.default and bool(node.args[1] == 0)


@functools.cache
def warn_of_none(segment: int, form: str | None = None) -> None:
    """Says once of a setting that an attention has nothing to do with it."""
    why = "has no keys that its own graph gathers from all ranks: its dK and dV stay whole. Under context parallelism compile what "
    why += "gathers them too, such as the module with torch's hook, not flex_attention alone"
    if form == RING:
        why = "takes keys that go around a ring of ranks: its bits depend on their number. Gather keys instead"
    log.warning("segment=%d is set, but an attention %s", segment, why)


def segments_of(length: Any, block: Any, settings: Config) -> int:
    """How many segments the queries of this rank have. block: queries of a block of the mask.

    Raises:
        Declined: they are not a whole number of them, or a segment does not end where blocks of the mask do.
    """
    segment = settings.segment
    if not (isinstance(length, int) and isinstance(block, int)):
        raise Declined(f"segment={segment} under dynamic shapes", "compile with dynamic=False")
    if length % segment:
        reason = f"segment={segment} does not divide the {length} queries of this rank"
        raise Declined(reason, f"set segment to a divisor of {length}, and of the queries of every rank in runs to compare")
    if segment % block:
        remedy = f"set segment to a multiple of {block}; a BlockMask has blocks of its own, and none is one block of all"
        raise Declined(f"segment={segment} is no multiple of the mask's block of {block} queries", remedy)
    return length // segment


def fold(node: fx.Node, key_sums: KeySums, segments: int, to_start: Callable[[Tensor], Tensor] | None = None) -> list[fx.Node]:
    """Lets a FlexAttention's backward give dk and dv of each segment, and folds what comes of these; returns what is obsolete then.

    to_start: makes of a gradient as the backward gives it the value of a node of `key_sums.starts`; None: by its shape.
    """
    graph = node.graph
    arguments = FlexArguments(*node.args)
    node.update_arg(FlexArguments._fields.index("kernel_options"), {**arguments.kernel_options, SEGMENTS: segments})

    def of_segment(*gradients: Tensor) -> list[Tensor]:
        """What is summed over ranks, of dk and dv of a segment."""
        values: dict[fx.Node, Any] = {}
        for start, index in key_sums.starts.items():
            gradient = gradients[index - 1]
            values[start] = to_start(gradient) if to_start else gradient.reshape(start.meta["val"].shape)
        for x in key_sums.between:
            values[x] = _taken_anew(x, values)
        return [values[x.of] for x in key_sums.sums]

    def of_segments(dk: Tensor, dv: Tensor) -> list[Tensor]:
        return torch.vmap(of_segment)(*(OF_SEGMENTS(x, segments) for x in (dk, dv)))

    results = [x.nodes[0] for x in key_sums.sums]
    first = next(x for x in graph.nodes if x in results)
    with graph.inserting_before(first):
        summed = traced(graph, of_segments, [call(graph, operator.getitem, node, index) for index in (1, 2)])
        for each, result, x in zip(key_sums.sums, results, summed, strict=True):
            folded = call(graph, FOLD_SEGMENTS, x, each.dim, result.meta["val"].dtype, each.group)
            result.replace_all_uses_with(folded)
    obsolete = {*key_sums.between, *(x for each in key_sums.sums for x in each.nodes)}
    return [x for x in reversed(graph.nodes) if x in obsolete]


def _taken_anew(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """What a node between makes of other values, in fp32: it converts to no other dtype."""
    if node.target in CONVERSIONS:
        return values[node.all_input_nodes[0]]
    args: Any
    args, options = fx.map_arg(
        (node.args, node.kwargs),
        lambda x: values[x] if x in values else torch.zeros(x.meta["val"].shape, device=x.meta["val"].device),
    )
    target: Any = aten.reshape.default if node.target in VIEWS else node.target
    if target is aten.slice_scatter.default and len(args) == 5:  # under vmap an end behind the last element is one too many
        args = *args[:4], min(args[4], args[0].shape[args[2]])
    return target(*args, **options)
