"""Finds what becomes of a FlexAttention's backward in a joint graph; the lowering reads that in the node's meta.

The HOP stays in the graph: its subgraphs, fake and functionalisation are torch's.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..config import Config
from ..decision import Declined, LeftToStock, Stock
from ..devices.stock_kernels import published
from ..devices.target import target_of
from ..op import FlexArguments, Mark
from ..op.captured import BEFORE_CAPTURES, shares_of, why_too_many
from ..problem import BLOCK_MASK, Problem
from ..resolve import Resolution
from . import context_parallel
from .autotuned import chosen_by_timing
from .declined import why_no_target
from .flex_node import say_rewritten
from .nodes import module_of, value_of
from .origin import origin_of
from .proofs import mask_of
from .resolved import resolved
from .score_function import is_identity, operations
from .stock_ops import stock_of

MOST_SHARED = 64  # batch elements whose gradients of shared keys are summed in an unrolled loop


def rewrite(node: fx.Node, settings: Config) -> list[fx.Node]:
    """Marks a node with what it gets; returns what is obsolete then. Raises as `rewriting_of`."""
    try:
        key_sums = context_parallel.key_sums_if_asked(node, settings)
    except Declined as declined:
        declined.stock_differs = any(_why_stock_differs(node))
        raise
    resolution = rewriting_of(node, settings, gathered=key_sums is not None)
    obsolete = [] if key_sums is None else context_parallel.fold(node, key_sums, resolution.problem.segments)
    mark = Mark(resolution, "", resolution.problem.mask, *origin_of(node)[:2])
    say_rewritten(node, replace(mark, chosen_by_timing=chosen_by_timing(node, rewritten=True)))
    return obsolete


def rewriting_of(node: fx.Node, settings: Config, *, gathered: bool = False, mask: str | None = None) -> Resolution:
    """What a node gets. Comparisons of symbolic sizes guard: the answer holds for all shapes.

    gathered: whether its keys are those of all ranks, and dk and dv are asked for in segments. mask: its kind, where that is known.

    Raises:
        Declined: it keeps the stock kernel, which sums the gradients of captured tensors by atomics, in strict mode too, and may be
            chosen by timing.
    """
    captures_learnt, timed = _why_stock_differs(node)
    stock_differs = captures_learnt or timed
    try:
        stock = None if stock_differs else stock_of(node.target, {})
        return _rewriting_of(node, settings, captures_learnt, stock, gathered, mask)
    except Declined as declined:
        declined.stock_differs = declined.stock_differs or stock_differs
        raise


def _why_stock_differs(node: fx.Node) -> tuple[bool, bool]:
    """Whether captured tensors get a gradient, and whether Inductor chooses the stock backward by timing."""
    *_, output = module_of(node, FlexArguments(*node.args).joint).graph.nodes
    captures_learnt = any(gradient is not None for gradient in output.args[0][BEFORE_CAPTURES - 1 :])
    return captures_learnt, "backward" in (chosen_by_timing(node, rewritten=False) or "")


def _rewriting_of(
    node: fx.Node, settings: Config, captures_learnt: bool, stock: Stock | None, gathered: bool, kind: str | None
) -> Resolution:
    arguments = FlexArguments(*node.args)
    query, key, value = (x.meta["val"] for x in (arguments.query, arguments.key, arguments.value))
    mask = arguments.mask
    mask_mod = module_of(node, mask.mask_mod)
    if declined := (
        why_no_target(query.device)
        or _why_no_backend(arguments, mask_mod, settings, captures_learnt)
        or _why_no_batches(query, key, settings)
    ):
        raise declined
    if captures_learnt:
        sizes = (*query.shape[:3], key.shape[2])
        if declined := why_too_many(sizes, shares_of(module_of(node, arguments.joint).graph)):
            raise declined
    segments = context_parallel.segments_of(query.shape[2], mask.q_block, settings) if gathered else 0
    if segments and query.shape[0] != key.shape[0]:
        reason = f"a batch of {query.shape[0]} shares its keys under segment={settings.segment}"
        raise Declined(reason, "expand key and value to the batch")
    masks = mask.q_num.meta["val"].shape[:2]
    # It may be another one on another rank, or of a batch whose size is known at run time only.
    is_open = gathered or (settings.guarantee == "batch" and masks[0] != 1)
    if kind is None:
        kind = (None if is_open else mask_of(mask, mask_mod)) or BLOCK_MASK
    in_blocks = kind == BLOCK_MASK
    functions = module_of(node, arguments.score_mod), module_of(node, arguments.joint)
    problem = Problem.of(
        query,
        key,
        value,
        mask=kind,
        scale=arguments.scale,
        block_size=(_known(mask.q_block), _known(mask.kv_block)) if in_blocks else None,
        masks=math.prod(masks) if in_blocks else 1,
        is_flex=True,
        function_ops=sum(operations(each, loads=True) for each in functions) + operations(mask_mod),
        stock=stock,
        segments=segments,
        changes_scores=not is_identity(functions[0]),
        trains_captures=captures_learnt,
    )
    return resolved(problem, settings, query, functions, [value_of(x) for x in arguments.score_mod_captures])


def _why_no_backend(arguments: FlexArguments, mask_mod: fx.GraphModule, settings: Config, captures_learnt: bool) -> Declined | None:
    """Whoever asks for a backend keeps it, its forward too: what that saves is not known to fit our backward."""
    backend = arguments.kernel_options.get("BACKEND", "AUTO")
    if backend not in ("FLASH", "TRITON_DECODE"):
        return None
    reason, remedy = f"BACKEND={backend!r} is asked for", "leave BACKEND out of kernel_options"
    if backend == "TRITON_DECODE":
        return Declined(reason, remedy)
    query, value = (x.meta["val"] for x in (arguments.query, arguments.value))
    arch = target_of(query.device, settings).arch
    if captures_learnt or not _flash_is_deterministic(arch, arguments, mask_mod):
        order = ", or make the BlockMask by create_block_mask(..., compute_dq_write_order=True)" if arch in (100, 103) else ""
        return Declined(reason, f"{remedy}{order}", stock_differs=True)
    asked = settings.guarantee != "run" or settings.template != "auto" or settings.schedule != "auto"
    if asked:
        return Declined(f"{reason}, with settings that ask for our kernels", remedy)
    figure = published("FA4", arch, (query.shape[3], value.shape[3]), mask_of(arguments.mask, mask_mod) or BLOCK_MASK)
    known = f": {figure}" if figure else ", with no published speed"
    return LeftToStock(f"{reason}, FlashAttention 4, which is deterministic here{known}", f"none needed: for ours, {remedy}")


def _flash_is_deterministic(arch: int | str, arguments: FlexArguments, mask_mod: fx.GraphModule) -> bool:
    """Whether its backward is deterministic, in either mode.

    By `create_flex_flash_attention_backward_kernel` in torch's flex_flash_attention.py: without a mask, or on
    sm_100 with an order of dQ's sums in the block mask, which may have one since torch 2.13.
    """
    (output,) = (n for n in mask_mod.graph.nodes if n.op == "output")
    if getattr(output.args[0], "target", None) is torch.ops.aten.full.default:
        return arch in (90, 100, 103)
    orders: list[Any] = [*arguments.block_mask[10:-3], None, None, None, None]
    order, order_of_full, kv_order, kv_order_spt = orders[:4]
    of_full = arguments.mask.full_q_num is None or order_of_full is not None
    return arch in (100, 103) and order is not None and of_full and (kv_order is not None or kv_order_spt is not None)


def _why_no_batches(query: torch.Tensor, key: torch.Tensor, settings: Config) -> Declined | None:
    remedy = "expand key and value to the batch of the query"
    if query.shape[0] == key.shape[0]:
        return None
    if settings.guarantee == "batch":
        return Declined("a batch shares its keys: guarantee='batch' takes none whose size has to be static", remedy)
    if not (isinstance(query.shape[0], int) and query.shape[0] <= MOST_SHARED):
        reason = f"a batch of {query.shape[0]} shares its keys: at most {MOST_SHARED}, of a static shape, may"
        return Declined(reason, remedy)
    return None


def _known(size: int | fx.Node) -> int:
    """A size that may be an input of the graph, where all shapes are dynamic; guarded then."""
    return int(size.meta["val"] if isinstance(size, fx.Node) else size)
