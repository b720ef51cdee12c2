"""Finds what becomes of an SDPA backward in a joint graph, and rewrites it."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from .. import op
from ..config import Config
from ..decision import Declined, Stock, is_of_torch
from ..devices.target import target_of
from ..dropout import OPERATIONS, Dropout
from ..op import MARK, Mark
from ..op.captured import why_too_many
from ..problem import BLOCK_MASK, Problem
from ..resolve import Resolution, mask_block
from .by_hand import require_last_dim
from .columns import Way, train, ways_of
from .context_parallel import KeySums, fold, key_sums_if_asked, segments_of
from .declined import DROPOUT, why_no_target
from .drops import bits_at_load, dropout_of, why_bits_unknown
from .flex_node import flex_backward
from .grouped_keys import Repeated, repeated, return_unrepeated
from .mask_bounds import require_32_bits
from .mask_function import MaskFunction, in_window
from .mask_reader import read
from .nodes import call, outputs_of
from .origin import origin_of
from .probe import line_at_load, why_distrusted
from .resolved import resolved
from .score_function import ScoreFunction
from .stock_ops import (
    EFFICIENT,
    SDPA,
    SDPA_OPS,
    UNSUPPORTED,
    SdpaBackward,
    contract_logsumexp,
    sdpa_backward_of,
    stock_of,
)
from .sums import put_in_order

ADDS_NOTHING = "a learnt mask that adds nothing to the scores", "leave it out, or detach it"
SCALE = "a scale that is not a constant", "pass scale as a Python number"


@dataclass(frozen=True)
class Rewriting:
    """A backward that is rewritten: what it gets, the function of its mask where that has no closed form, that of its scores where
    they do not stay, and what its key and value repeat, if they do; `stock` has them unrepeated. `keys`: tensors before GQA
    expansion. dropout: what its forward dropped, if it did. columns: of a learnt mask, where those alone are trained. key_sums: how
    its dk and dv come to sums over ranks, where those are of segments."""

    stock: SdpaBackward
    resolution: Resolution
    function: MaskFunction | None
    scores: ScoreFunction | None
    keys: list[Repeated]
    dropout: Dropout | None
    columns: list[Way]
    key_sums: KeySums | None


def rewriting_of(node: fx.Node, settings: Config) -> Rewriting:
    """What becomes of an SDPA backward. Comparisons of symbolic sizes guard: the answer holds for all shapes.

    Raises:
        Declined: it keeps the stock kernel.
    """
    if node.target in UNSUPPORTED:
        raise Declined(*UNSUPPORTED[node.target])
    stock = sdpa_backward_of(node)
    require_last_dim(stock.out)
    dropout = dropout_of(stock)
    columns = ways_of(stock) if stock.trains_mask and dropout is None and not stock.is_causal else []
    stock = replace(stock, trains_mask=stock.trains_mask and not columns)
    if not isinstance(stock.scale, (float, int, type(None))):
        raise Declined(*SCALE)
    device = stock.query.meta["val"].device
    if declined := why_no_target(device):
        raise declined
    if stock.called is stock.op and device.type not in SDPA_OPS[stock.op].devices:
        remedy = "take flash or memory-efficient attention (torch.nn.attention.sdpa_kernel)"
        raise Declined(f"{stock.op} on device {device.type}", remedy)
    keys = [x for output, of in ((1, stock.key), (2, stock.value)) if (x := repeated(node, of, output))]
    keys = keys if len(keys) == 2 else []
    if keys:
        stock = replace(stock, key=keys[0].source, value=keys[1].source)
    key_sums = key_sums_if_asked(node, settings, {x: output for output, each in enumerate(keys, start=1) for x in each.sums})
    if key_sums and dropout:
        raise Declined("segment with dropout: what a forward drops depends on the number of ranks", DROPOUT)
    target = target_of(device, settings)
    mask, function, scores = _mask(stock, in_blocks=key_sums is not None)
    if stock.trains_mask and (mask != BLOCK_MASK or scores is None):
        raise Declined(*ADDS_NOTHING)
    query, key, value = (x.meta["val"] for x in (stock.query, stock.key, stock.value))
    if stock.trains_mask and (declined := why_too_many((*query.shape[:3], key.shape[2]))):
        raise declined
    block_size = mask_block(target, settings, (query.shape[3], value.shape[3])) if mask == BLOCK_MASK else None
    segments = segments_of(query.shape[2], block_size[0], settings) if key_sums and block_size else 0
    function_ops = (scores.operations if scores else 0) + (OPERATIONS[dropout.generator] if dropout else 0)
    others = {
        "block_size": block_size,
        "masks": function.masks(*query.shape[:2]) if function else 1,
        "function_ops": function_ops,
        "stock": _kept(stock, mask),
        "dropout": dropout,
        "changes_scores": scores is not None,
        "trains_captures": stock.trains_mask,
        "segments": segments,
    }
    problem = Problem.of(query, key, value, mask=mask, scale=stock.scale, **others)
    functions = (scores.module, scores.derivative) if scores else None
    captures = [x.meta["val"] for x in scores.captures] if scores else []
    resolution = resolved(problem, settings, query, functions, captures)
    if declined := why_distrusted(stock) or (why_bits_unknown(stock, dropout) if dropout else None):
        raise declined
    return Rewriting(stock, resolution, function, scores, keys, dropout, columns, key_sums)


def _kept(stock: SdpaBackward, mask: str) -> Stock | None:
    """What may be kept. Torch's own flash attention never is: under full and causal masks ours may have two passes."""
    if stock.called is SDPA:
        return None
    if not is_of_torch(str(stock.called)):
        return stock.kept
    kept = stock_of(stock.op, {"attn_bias": stock.attn_mask, "dropout_p": stock.dropout_p})
    return kept if kept and (kept.implementation or (mask == BLOCK_MASK and stock.op is EFFICIENT)) else None


def _mask(stock: SdpaBackward, *, in_blocks: bool) -> tuple[str, MaskFunction | None, ScoreFunction | None]:
    """full, causal, or block_mask and its function; and that of the scores. in_blocks: it is block_mask, whatever it hides."""
    q_len, kv_len = stock.query.meta["val"].shape[2], stock.key.meta["val"].shape[2]
    if stock.window is not None:
        return BLOCK_MASK, stock.window, stock.scores
    top_left = stock.is_causal and not SDPA_OPS[stock.op].ends_aligned and q_len != kv_len
    if stock.attn_mask is None and not top_left:
        if in_blocks:
            offset = kv_len - q_len if SDPA_OPS[stock.op].ends_aligned else 0
            return BLOCK_MASK, in_window(None, 0, offset) if stock.is_causal else None, stock.scores
        return "causal" if stock.is_causal else "full", None, stock.scores
    if stock.attn_mask is not None:
        require_32_bits(stock.attn_mask)
    function, scores = read(stock.attn_mask, stock.query.meta["val"].device, causal=stock.is_causal)
    kind = None if in_blocks else function.kind(q_len, kv_len)
    if kind == "full" or (kind == "causal" and q_len == kv_len):
        return kind, None, scores
    return BLOCK_MASK, function, scores


def rewrite(node: fx.Node, settings: Config) -> list[fx.Node]:
    """Puts a node of ours in the place of a stock op's; returns the nodes that are obsolete. Raises as `rewriting_of`."""
    rewriting, graph = rewriting_of(node, settings), node.graph
    stock, problem = rewriting.stock, rewriting.resolution.problem
    # The strides of the stock op's gradients: the nodes after it were traced with them, and the lowering takes them from here. The
    # fourth gradient is that of a mask.
    gradients = (node.meta["val"][0], *(x.gradient for x in rewriting.keys)) if rewriting.keys else node.meta["val"][:3]
    lines = line_at_load(stock), rewriting.dropout and bits_at_load(stock, rewriting.dropout)
    at_load = "\n".join(line for line in lines if line) or None
    mark = Mark(rewriting.resolution, str(stock.called), problem.mask, *origin_of(node)[:2], at_load)
    options: dict[str, Any]
    with graph.inserting_before(node):
        logsumexp = contract_logsumexp(graph, stock)
        if problem.is_lowered_as_flex:
            tensors = stock.query, stock.key, stock.value, stock.out, logsumexp, stock.grad_out
            learnt = stock.attn_mask if stock.trains_mask else None
            options = {"scores": rewriting.scores, "learnt": learnt}
            if rewriting.dropout:
                options["dropout"] = rewriting.dropout, call(graph, op.RANDOM_STATE, *stock.random, stock.query)
            new = flex_backward(graph, rewriting.function, tensors, gradients, mark, **options)
        else:
            tensors = stock.grad_out, stock.query, stock.key, stock.value, stock.out, logsumexp
            options = {"mask": problem.mask, "scale": stock.scale, "stock": str(stock.op)}
            options |= {"at_load": mark.at_load} if mark.at_load else {}
            new = graph.call_function(op.SDPA_BACKWARD, tensors, options)
            new.meta["val"] = gradients
    new.meta = {**node.meta, **new.meta, MARK: mark}
    node.replace_all_uses_with(new)
    sums = _take_last_of_fourth(new) if stock.trains_mask else train(rewriting.columns, stock, logsumexp)
    folded = fold(new, rewriting.key_sums, problem.segments) if rewriting.key_sums else []
    copies = [each for output, x in enumerate(rewriting.keys, start=1) for each in return_unrepeated(new, output, x)]
    return [*folded, *sums, *copies, *(user for user in new.users if user.target is operator.getitem and not user.users), node]


def _take_last_of_fourth(node: fx.Node) -> list[fx.Node]:
    """Whoever took the fourth output of the stock op, a tensor, takes the last of ours, which is a tuple. Returns the sums that
    are obsolete."""
    obsolete = []
    for user in outputs_of(node, 3):
        with node.graph.inserting_before(user):
            fourth = call(node.graph, operator.getitem, node, 3)
        user.args = (fourth, len(fourth.meta["val"]) - 1)
        obsolete += put_in_order(user)
    return obsolete
