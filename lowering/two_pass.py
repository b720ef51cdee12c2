"""dK/dV and dQ by kernels of their own: seven matmuls a tile in place of five, and no sum that crosses a CTA."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch._inductor.ir import FixedLayout
from torch._inductor.lowering import empty_strided
from torch.utils._sympy.functions import CeilDiv

from dash_inductor.schedule import TWO_PASS
from dash_inductor.target import Resolved

from . import kernels
from .buffers import contiguous, size_and_strides, traced_gradients
from .problem import Problem


def report(resolved: Resolved | None) -> dict[str, Any]:
    """What to report; `resolved` is None where sizes are known only at run time."""
    time_ns = resolved.time_ns if resolved else None
    return {"family": TWO_PASS, "launch": "plain", "predicted_us": None if time_ns is None else time_ns / 1000}


def gradients(problem: Problem, inputs: list[Any]) -> tuple[Any, Any, Any]:
    """dq, dk, dv from query, key, value, grad_out, -lse*log2(e) and delta, in plain launches: no CTA waits for another."""
    query = inputs[0]
    device, dtype = query.get_device(), query.get_dtype()
    dq_meta, dk_meta, dv_meta = traced_gradients()
    dk_layout, dv_layout = (FixedLayout(device, dtype, *size_and_strides(meta)) for meta in (dk_meta, dv_meta))
    tile = problem.tiles.two_pass
    assert tile
    if tile.split:
        dv = _dkdv(problem, inputs, dv_layout, has_dk=False)
        dk = _dkdv(problem, inputs, dk_layout, has_dv=False)
    else:
        dv = empty_strided(*size_and_strides(dv_meta), dtype=dtype, device=device)
        dk = _dkdv(problem, inputs, dk_layout, dv=dv)
    dq = _dq(problem, inputs, FixedLayout(device, dtype, *size_and_strides(dq_meta)))
    return dq, dk, dv


def into_buffers(problem: Problem, inputs: list[Any], scratch: Any, dk: Any, dv: Any, launched: Any) -> None:
    """The same into the buffers that one pass fills, its scratch for dq included; `launched` is 1, or 0 for nothing."""
    nothing = contiguous([0], torch.float32, inputs[0].get_device())  # every template has an output
    _dkdv(problem, inputs, nothing, dk=dk, dv=dv, launched=launched)
    _dq(problem, inputs, nothing, scratch=scratch, launched=launched)


def _dkdv(
    problem: Problem,
    inputs: list[Any],
    output: FixedLayout,
    *,
    has_dk: bool = True,
    has_dv: bool = True,
    dk: Any = None,
    dv: Any = None,
    launched: Any = 1,
) -> Any:
    """One or both, into the buffers that are given, else into the output that is returned."""
    tile = problem.tiles.two_pass
    assert tile
    return kernels.call(
        kernels.TWO_PASS_DKDV,
        grid=problem.heads * CeilDiv(sympy.sympify(problem.kv_len), tile.dkdv.rows) * launched,
        inputs=inputs,
        mutated=[x for x in (dv, dk) if x is not None],
        output=output,
        num_warps=tile.dkdv.num_warps,
        num_stages=tile.dkdv.num_stages,
        constants=problem.constants(tile)
        | {"BLOCK_N": tile.dkdv.rows, "HAS_DK": has_dk, "HAS_DV": has_dv, "DK_GIVEN": dk is not None, "DV_GIVEN": dv is not None},
    )


def _dq(problem: Problem, inputs: list[Any], output: FixedLayout, *, scratch: Any = None, launched: Any = 1) -> Any:
    """Into `scratch` as one pass leaves it, if that is given; else scaled, into the output that is returned."""
    tile = problem.tiles.two_pass
    assert tile
    order = {} if scratch is None else problem.accumulator_order()
    return kernels.call(
        kernels.TWO_PASS_DQ,
        grid=problem.heads * problem.group * CeilDiv(sympy.sympify(problem.q_len), tile.dq.rows) * launched,
        inputs=inputs,
        mutated=[] if scratch is None else [scratch],
        output=output,
        num_warps=tile.dq.num_warps,
        num_stages=tile.dq.num_stages,
        constants=problem.constants(tile)
        | {"BLOCK_M": tile.dq.rows, "PADDED_TO": tile.block_m, "INTO_SCRATCH": scratch is not None}
        | order,
    )
