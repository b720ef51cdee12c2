"""Lowers `flex_attention_backward` where the pass has decided so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch._inductor.ir import Pointwise, TensorBox
from torch._inductor.lowering import expand, full_like, register_lowering, view
from torch._inductor.virtualized import V, ops

from dash_inductor.op import MARK, OF_SEGMENTS, REWRITTEN, FlexArguments, Mark
from dash_inductor.problem import BLOCK_MASK
from dash_inductor.resolve import Resolution

from . import captured, header
from .buffers import in_memory, with_aligned_rows
from .inputs import Inputs
from .lower import decision, gradients, preprocessed
from .mods import mods_of


@register_lowering(REWRITTEN, type_promotion_kind=None)
def rewritten(x: TensorBox, mask: str, stock: str | None, **of_marks: Any) -> TensorBox:
    """x; RuntimeError where the node that takes it would go to the stock lowering, which may lack what it needs."""
    if not header.is_in_use():
        raise RuntimeError(header.NOT_IN_FORCE)
    if not all(MARK in user.meta for user in V.graph.current_node.users):
        raise RuntimeError("a pass of the graph dropped the meta of a node of flex_attention_backward: dash_inductor needs it")
    return x


@register_lowering(OF_SEGMENTS, type_promotion_kind=None)
def of_segments(x: TensorBox, n: int) -> TensorBox:
    """[n * B, ..] as the kernel writes it -> [n, B, ..]."""
    batch, *sizes = x.get_size()
    return view(x, [n, batch // n, *sizes])


def lower_or_stock(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stands around the stock lowering."""
    mark = header.mark_in_force()
    return stock(*args, **kwargs) if mark.resolution is None else _lower(mark, mark.resolution, FlexArguments(*args))


def _lower(
    mark: Mark, resolution: Resolution, arguments: FlexArguments
) -> tuple[TensorBox, TensorBox, TensorBox, tuple[TensorBox | None, ...]]:
    """dq, dk, dv, and the gradients of captures that need one."""
    masked = resolution.problem.mask == BLOCK_MASK
    mods = mods_of(arguments, masked=masked, whole=resolution.problem.mask == "full")
    grad_out = full_like(arguments.out, 0.0) if arguments.grad_out is None else arguments.grad_out  # None: nobody uses out
    query, key, value, grad_out, out = (
        with_aligned_rows(x) for x in (arguments.query, arguments.key, arguments.value, grad_out, arguments.out)
    )
    grad_lse = arguments.grad_logsumexp
    others = [] if grad_lse is None else [in_memory(grad_lse)]
    logsumexp = in_memory(arguments.logsumexp)
    neg_lse, delta = preprocessed(resolution, out, grad_out, logsumexp, *others, FLEX=True, HAS_GRAD_LSE=bool(others))

    batch, shared = query.get_size()[0], key.get_size()[0]
    broadcast = not V.graph.sizevars.statically_known_equals(batch, shared)
    if broadcast:  # the same keys for the whole batch
        key, value = (in_memory(expand(TensorBox(x), [batch, *x.get_size()[1:]])) for x in (key, value))
    inputs = Inputs(resolution, query, key, value, grad_out, neg_lse, delta)
    found = gradients(inputs, mods, arguments.mask if masked else None)
    of_captures = captured.gradients(arguments, mods)
    header.record(decision(inputs, found, mark))
    dk, dv = (summed_over_batch(x) if broadcast else x for x in (found.dk, found.dv))
    return found.dq, dk, dv, of_captures


def summed_over_batch(x: TensorBox) -> TensorBox:
    """[1, ...], summed in fp32 from the first batch element on. Not as a reduction, whose order Inductor chooses by size hints."""
    batch, *sizes = x.get_size()
    load = x.make_loader()

    def element(index: list[sympy.Expr]) -> Any:
        total = ops.constant(0.0, torch.float32)
        for b in range(int(batch)):
            total = ops.add(total, ops.to_dtype(load([sympy.Integer(b), *index[1:]]), torch.float32))
        return ops.to_dtype(total, x.get_dtype())

    return Pointwise.create(device=x.get_device_or_error(), dtype=x.get_dtype(), inner_fn=element, ranges=[1, *sizes])
