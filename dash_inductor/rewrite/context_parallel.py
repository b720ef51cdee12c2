"""FlexAttention under torch's context parallelism: keys gathered from all ranks, their gradients summed over all ranks.

Each rank has some of the queries. The gathered keys' gradients go from FlexAttention's backward into a reduce-scatter, whose order
is the backend's, and of other parts for another number of ranks. With the setting `segment` that sum is one of segments of so many
queries (parallel/fold.py), in whose place the ranks' do not matter.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import fx

from ..config import Config
from ..decision import Declined
from ..op import SEGMENTS, FlexArguments
from ..parallel.fold import FOLD_SEGMENTS
from .nodes import call_of, outputs_of

REDUCE_SCATTER = "cplib.flex_cp_allgather_backward.default"  # of dk, dv, dimension, name of the process group
LENGTH = 2  # the dimension of the keys

log = logging.getLogger("dash_inductor")


def reduce_scatter_of(node: fx.Node) -> fx.Node | None:
    """The node that sums the dk and dv of a FlexAttention's backward over ranks; None where there is none."""
    gradients = [*outputs_of(node, 1), *outputs_of(node, 2)]
    users = [user for gradient in gradients for user in gradient.users]
    found = next((user for user in users if str(user.target) == REDUCE_SCATTER), None)
    if found is None or len(users) != 2 or found.args[:3] != (*gradients, LENGTH):
        return None
    return found


@functools.cache
def warn_of_none(segment: int) -> None:
    """Says once of a setting that an attention has nothing to do with it."""
    log.warning(
        "segment=%d is set, but an attention has no keys that its own graph gathers from all ranks: its dK and dV stay whole. "
        "Under context parallelism compile the module whose hook gathers keys, not flex_attention alone",
        segment,
    )


def segments_of(arguments: FlexArguments, settings: Config) -> int:
    """How many segments the queries of this rank have.

    Raises:
        Declined: they are not a whole number of them, or a segment does not end where blocks of the mask do.
    """
    query, key = (x.meta["val"] for x in (arguments.query, arguments.key))
    length, segment, block = query.shape[2], settings.segment, arguments.mask.q_block
    if not (isinstance(length, int) and isinstance(block, int)):
        raise Declined(f"segment={segment} under dynamic shapes", "compile with dynamic=False")
    if length % segment:
        reason = f"segment={segment} does not divide the {length} queries of this rank"
        raise Declined(reason, f"set segment to a divisor of {length}, and of the queries of every rank in runs to compare")
    if segment % block:
        remedy = "give a BlockMask, and set segment to a multiple of its block"
        raise Declined(f"segment={segment} is no multiple of the mask's block of {block} queries", remedy)
    if query.shape[0] != key.shape[0]:
        raise Declined(f"a batch of {query.shape[0]} shares its keys under segment={segment}", "expand key and value to the batch")
    return length // segment


def fold(node: fx.Node, reduce_scatter: fx.Node, segments: int) -> list[fx.Node]:
    """Lets a FlexAttention's backward give dk and dv of each segment, and folds these; returns what is obsolete then."""
    graph, arguments = node.graph, FlexArguments(*node.args)
    dk, dv, _, group = call_of(reduce_scatter)[1]
    dq, *whole, of_captures = node.meta["val"]
    parts = [x.new_empty([segments * x.shape[0], *x.shape[1:]], dtype=torch.float32) for x in whole]
    with graph.inserting_after(reduce_scatter):
        summed = graph.call_function(FOLD_SEGMENTS, (dk, dv, segments, whole[0].dtype, group))
    summed.meta = {name: value for name, value in reduce_scatter.meta.items() if name != "eager_input_vals"}  # of other arguments
    reduce_scatter.replace_all_uses_with(summed)
    node.update_arg(FlexArguments._fields.index("kernel_options"), {**arguments.kernel_options, SEGMENTS: segments})
    for gradient, part in zip((dk, dv), parts, strict=True):
        gradient.meta = {**gradient.meta, "val": part}
    node.meta["val"] = (dq, *parts, of_captures)
    return [reduce_scatter]
