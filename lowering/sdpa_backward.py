"""Lowers `dash::sdpa_backward`: delta and lse, the schedule's table, the kernel, and dq as ordinary fusable ops."""

from __future__ import annotations

import math
import operator
from typing import Any

import sympy
import torch
from torch._inductor.codegen.common import WorkspaceArg, WorkspaceZeroMode
from torch._inductor.freezing_utils import is_frozen_param
from torch._inductor.ir import FixedLayout
from torch._inductor.lowering import empty_strided, register_lowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._sympy.functions import CeilDiv, FloorDiv

from dash_inductor.config import GLUON, current
from dash_inductor.ops import rows_of
from dash_inductor.record import Decision, mask_text, size_text
from dash_inductor.schedule.table import STRADDLING_N_Q
from dash_inductor.target import DTYPES, Resolved, TwoPassTile, target_of, tiles_for
from dash_inductor.templates import tiles

from . import gluon, kernels, two_pass
from .buffers import contiguous, empty, realized, rows, size_and_strides, traced_gradients
from .epilogue import in_accumulator_order, scaled_dq
from .problem import Problem
from .report import report
from .schedule import dynamic_schedule, static_schedule


@register_lowering(torch.ops.dash.sdpa_backward.default, type_promotion_kind=None)
def lower(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    *,
    mask: str,
    blocks: Any = None,
    scale: float | None = None,
) -> tuple[Any, Any, Any]:
    batch, heads, q_len, head_dim = query.get_size()
    kv_heads, kv_len = key.get_size()[1:3]
    group = V.graph.sizevars.guard_int(FloorDiv(heads, kv_heads))
    head_dim = V.graph.sizevars.guard_int(head_dim)
    device, dtype = query.get_device(), query.get_dtype()
    target = target_of(device)
    problem = Problem(
        target=target,
        tiles=tiles_for(target, dtype, head_dim, mask),
        mask=mask,
        group=group,
        head_dim=head_dim,
        scale=1 / math.sqrt(head_dim) if scale is None else scale,
        q_len=q_len,
        kv_len=kv_len,
        heads=sympy.sympify(batch) * kv_heads,
        blocks=None if blocks is None else rows_of(_constant_of_graph("blocks")),
    )
    resolved = problem.resolved()

    query, key, value, grad_out, out = (rows(x) for x in (query, key, value, grad_out, out))
    logsumexp = realized(logsumexp)

    query_heads = sympy.sympify(batch) * heads
    first = problem.tiles.first
    n_q = CeilDiv(sympy.sympify(q_len), first.block_m)
    padded_rows = [batch, heads, n_q * first.block_m]
    delta = empty(padded_rows, torch.float32, device)
    neg_lse = kernels.call(
        kernels.PREPROCESS,
        grid=query_heads * n_q,
        inputs=[out, grad_out, logsumexp],
        mutated=[delta],
        output=contiguous(padded_rows, torch.float32, device),
        num_warps=first.preprocess_warps,
        constants={"BLOCK_M": first.block_m, "BLOCK_D": first.block_d, "HEAD_DIM": head_dim},
    )

    inputs = [query, key, value, grad_out, neg_lse, delta]
    scratch_ints: Any = 0  # beside delta and lse
    if problem.tiles.one_pass is None or (resolved and isinstance(resolved.tile, TwoPassTile)):
        dq, dk, dv = two_pass.gradients(problem, inputs)
        how = two_pass.report(resolved)
    else:
        dq, dk, dv, scratch_ints, how = _one_pass(problem, resolved, inputs)

    workspace = 4 * (2 * query_heads * padded_rows[2] + scratch_ints)
    report(
        Decision(
            op=V.graph.current_node.meta.get("dash_op", "dash.sdpa_backward"),
            device=target.key,
            dtype=DTYPES[dtype],
            mask=mask_text(mask),
            batch=size_text(batch),
            heads=size_text(heads),
            kv_heads=size_text(kv_heads),
            q_len=size_text(q_len),
            kv_len=size_text(kv_len),
            head_dim=head_dim,
            tile=str(resolved.tile if resolved else problem.tiles),
            sms=target.sms,
            guarantee=current().guarantee,
            workspace_bytes=size_text(workspace),
            **how,
        )
    )
    return dq, dk, dv


def _one_pass(problem: Problem, resolved: Resolved | None, inputs: list[Any]) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
    """dq, dk, dv, how many ints of memory were needed beside them, and what to report.

    Where sizes known at run time may take two passes, their kernels stand beside that of one: one or the other is launched.
    """
    query, tile = inputs[0], problem.tiles.one_pass
    assert tile
    batch, heads, q_len, _ = query.get_size()
    device, dtype = query.get_device(), query.get_dtype()
    _, dk_meta, dv_meta = traced_gradients()
    n_q = CeilDiv(sympy.sympify(q_len), tile.block_m)
    query_heads = sympy.sympify(batch) * heads

    schedule = static_schedule(resolved, problem.blocks, device) if resolved else dynamic_schedule(problem, query)
    if current().kernel == GLUON:
        return gluon.gradients(problem, schedule, inputs)
    scratch = empty([query_heads, n_q, tile.block_m * tile.block_d], torch.float32, device)
    dv = empty_strided(*size_and_strides(dv_meta), dtype=dtype, device=device)
    semaphores = 2 + query_heads * n_q  # the ticket, a dummy, one for each (head, Q tile)
    ints = semaphores + schedule.row_ints
    dk = kernels.call(
        kernels.SDPA_BACKWARD,
        grid=schedule.workers,
        inputs=[*inputs, schedule.table],
        mutated=[scratch, dv],
        output=FixedLayout(device, dtype, *size_and_strides(dk_meta)),
        workspace_arg=WorkspaceArg(
            count=ints,
            zero_mode=WorkspaceZeroMode.ZERO_ON_CALL,
            device=device,
            outer_name=WorkspaceArg.unique_name(),
            dtype=torch.int32,
        ),
        cooperative=schedule.cooperative,
        ctas_per_sm=None if device.type == "cpu" else tile.ctas_per_sm,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        constants=problem.constants(tile)
        | problem.accumulator_order()
        | {
            "ATOMIC_ADD": tile.atomic_add,
            "RELEASE_AFTER": tiles.RELEASE_AFTER,
            "STRADDLING": schedule.straddling,
            "ROW_BLOCK": STRADDLING_N_Q,
        },
    )
    place = in_accumulator_order(tile)
    if problem.tiles.two_pass and not resolved:
        two_pass.into_buffers(problem, inputs, scratch, dk, dv, schedule.in_two_passes)
    dq = scaled_dq(scratch, schedule.visited, tile.block_m, place, query.get_size(), dtype, problem.scale)
    return dq, dk, dv, query_heads * n_q * tile.block_m * tile.block_d + ints + schedule.table_ints, schedule.report


def _constant_of_graph(name: str) -> torch.Tensor:
    """The value of a tensor argument of the node that is lowered; ValueError unless it stands in the graph itself."""
    node: Any = V.graph.current_node.kwargs[name]
    if node.target is torch.ops.aten.lift_fresh_copy.default:
        (node,) = node.args
    value = None
    if node.target is torch.ops.aten.full.default:  # what Inductor makes of equal elements
        value = torch.full(*node.args)
    elif node.op == "get_attr":
        value = operator.attrgetter(node.target)(V.graph.module)
    # A frozen parameter's value is not in the key of Inductor's cache.
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor) or is_frozen_param(value):
        raise ValueError(f"{name} must be a constant of the graph, such as torch.tensor([...]) in the compiled function")
    return value
