"""Lowers `dash::sdpa_backward`: delta and logsumexp, then the kernels of the template that was resolved, and the record of it."""

from __future__ import annotations

import sympy
import torch
from torch._inductor.ir import IRNode, TensorBox
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import CeilDiv

from dash_inductor.config import current
from dash_inductor.decision import Decision, size_text, sizes_in_text
from dash_inductor.devices.target import target_of
from dash_inductor.op import SDPA_BACKWARD, Mark, MaskArguments
from dash_inductor.problem import Problem
from dash_inductor.resolve import Resolution, resolve

from . import kernels, one_pass, two_pass
from .buffers import contiguous, empty, in_memory, traced_gradients, with_aligned_rows
from .header import mark_in_force, record
from .inputs import Inputs
from .mods import NONE, Mods


@register_lowering(SDPA_BACKWARD, type_promotion_kind=None)
def lower(
    grad_out: IRNode,
    query: IRNode,
    key: IRNode,
    value: IRNode,
    out: IRNode,
    logsumexp: IRNode,
    *,
    mask: str,
    scale: float | None = None,
    stock: str | None = None,
    at_load: str | None = None,
) -> tuple[TensorBox, TensorBox, TensorBox]:
    """dq, dk, dv; of a node that the pass has not made Declined where the settings in force give it no kernel."""
    mark = mark_in_force()
    resolution = mark.resolution or _resolved(mask, scale)
    query, key, value, grad_out, out = (with_aligned_rows(x) for x in (query, key, value, grad_out, out))
    neg_lse, delta = preprocessed(resolution, out, grad_out, in_memory(logsumexp))
    inputs = Inputs(resolution, query, key, value, grad_out, neg_lse, delta)
    found = gradients(inputs)
    record(decision(inputs, found, mark))
    return found.dq, found.dk, found.dv


def gradients(inputs: Inputs, mods: Mods = NONE, mask: MaskArguments | None = None) -> kernels.Gradients:
    """dq, dk, dv by the template that was resolved. mask: that in blocks, if there is one."""
    template = two_pass if inputs.resolution.one_pass is None else one_pass
    return template.gradients(inputs, mods, mask)


def _resolved(mask: str, scale: float | None) -> Resolution:
    gradients, settings = traced_gradients(), current()
    return resolve(Problem.of(*gradients, mask=mask, scale=scale), settings, target_of(gradients[0].device, settings))


def preprocessed(
    resolution: Resolution, out: IRNode, grad_out: IRNode, logsumexp: IRNode, *others: IRNode, **constants: bool
) -> tuple[TensorBox, TensorBox]:
    """-logsumexp * log2(e), and delta = rowsum(out * grad_out): fp32 [B, H, S_q], rows padded to Q tiles with -inf and 0.

    FLEX=True: logsumexp is in base 2, and with HAS_GRAD_LSE=True its gradient follows it.
    """
    batch, heads, q_len = map(sympy.sympify, out.get_size()[:3])
    tile, device = resolution.tile, out.get_device_or_error()
    _, value_dim = resolution.problem.head_dims
    n_q = CeilDiv(q_len, tile.block_m)
    size = [batch, heads, n_q * tile.block_m]
    delta = empty(size, torch.float32, device)
    neg_lse = kernels.call(
        kernels.PREPROCESS,
        grid=batch * heads * n_q,
        inputs=[out, grad_out, logsumexp, *others],
        mutated=[delta],
        output=contiguous(size, torch.float32, device),
        num_warps=tile.preprocess_warps,
        constants={"BLOCK_M": tile.block_m, "BLOCK_D": tile.block_dv, "HEAD_DIM": value_dim, **constants},
    )
    return neg_lse, delta


def decision(inputs: Inputs, found: kernels.Gradients, mark: Mark) -> Decision:
    """What generated code records."""
    resolution = inputs.resolution
    workspace_bytes = resolution.workspace_bytes(inputs.query_heads_total * inputs.n_q, found.schedule_ints)
    return Decision(
        op=mark.stock or str(V.graph.current_node.target).removesuffix(".default"),
        device=resolution.target.key,
        dtype=resolution.problem.dtype,
        mask=mark.mask or resolution.problem.mask,
        chosen_by_timing=mark.chosen_by_timing,
        kernel=resolution.kernel,
        tile=resolution.tile_text,
        turns=resolution.turns if resolution.turns > 1 else None,
        sms=resolution.target.sms,
        guarantee=resolution.settings.guarantee,
        dropout=resolution.problem.dropout and resolution.problem.dropout.p,
        reads_in_place=mark.reads_in_place,
        over_ranks=mark.over_ranks,
        candidates=() if resolution.choice is None else resolution.choice.considered,
        workspace_bytes=size_text(workspace_bytes),
        **sizes_in_text(inputs.query.get_size(), inputs.key.get_size(), inputs.value.get_size()),
        **found.schedule,
    )
