"""Lowers `flex_attention_backward` where the pass has decided so; all others go to the stock lowering."""

from __future__ import annotations

import functools
from typing import Any

import sympy
import torch
from torch._inductor.ir import Pointwise, TensorBox
from torch._inductor.lowering import expand, full_like, lowerings
from torch._inductor.virtualized import V, ops

from dash_inductor.config import current
from dash_inductor.devices.target import target_of
from dash_inductor.op import DECIDED, FLEX_BACKWARD, FLEX_PROBLEM, STOCK, FlexArguments
from dash_inductor.problem import BLOCK_MASK, Problem
from dash_inductor.resolve import resolve

from . import block_mask, one_pass
from .buffers import in_memory, with_aligned_rows
from .header import record
from .inputs import Inputs
from .lower import decision, preprocessed
from .mods import mods_of


def take_over() -> None:
    """From now on, the lowering of the HOP asks the node's meta."""
    stock = lowerings[FLEX_BACKWARD]

    @functools.wraps(stock)
    def lower_or_stock(*args: Any, **kwargs: Any) -> Any:
        node = V.graph.current_node
        if node is not None and FLEX_PROBLEM in node.meta:
            return lower(*args, **kwargs)
        if DECIDED in FlexArguments(*args).kernel_options:
            raise RuntimeError("a pass of the graph dropped the meta of a node of flex_attention_backward: dash_inductor needs it")
        return stock(*args, **kwargs)

    lowerings[FLEX_BACKWARD] = lower_or_stock


def lower(*args: Any) -> tuple[TensorBox, TensorBox, TensorBox, tuple[None, ...]]:
    """dq, dk, dv, and no gradient of any capture; ValueError where the settings in force give the attention no kernel."""
    settings, arguments = current(), FlexArguments(*args)
    problem: Problem = V.graph.current_node.meta[FLEX_PROBLEM]
    query = arguments.query
    resolution = resolve(problem, settings, target_of(query.get_device_or_error(), settings))
    mods = mods_of(arguments, masked=problem.mask == BLOCK_MASK)
    grad_out = full_like(arguments.out, 0.0) if arguments.grad_out is None else arguments.grad_out  # None: nobody uses out
    query, key, value, grad_out, out = (
        with_aligned_rows(x) for x in (query, arguments.key, arguments.value, grad_out, arguments.out)
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
    if problem.mask == BLOCK_MASK:
        gradients = block_mask.gradients(inputs, arguments.mask, mods)
    else:
        gradients = one_pass.gradients(inputs, mods)
    record(decision(inputs, gradients, arguments.kernel_options.get(STOCK)))
    dk, dv = (summed_over_batch(x) if broadcast else x for x in (gradients.dk, gradients.dv))
    return gradients.dq, dk, dv, tuple(None for _ in arguments.score_mod_captures)


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
