"""dK/dV and dQ by CTAs of their own: seven matmuls a tile in place of five, and no sum that crosses a CTA."""

from __future__ import annotations

import functools
import logging
from typing import Any

import sympy
import torch
from torch._inductor.ir import FixedLayout
from torch._inductor.lowering import empty_strided
from torch.utils._sympy.functions import CeilDiv

from dash_inductor.config import reserved_sms
from dash_inductor.schedule import TWO_PASS
from dash_inductor.target import Resolved

from . import kernels
from .buffers import contiguous, size_and_strides, traced_gradients
from .problem import Problem

log = logging.getLogger("dash_inductor")


def report(resolved: Resolved | None) -> dict[str, Any]:
    """What to report; `resolved` is None where sizes are known only at run time."""
    time_ns = resolved.time_ns if resolved else None
    return {"family": TWO_PASS, "launch": "plain", "predicted_us": None if time_ns is None else time_ns / 1000}


def gradients(problem: Problem, inputs: list[Any]) -> tuple[Any, Any, Any]:
    """dq, dk, dv from query, key, value, grad_out, -lse*log2(e) and delta, in a plain launch: no CTA waits for another."""
    if reserved := reserved_sms():
        _none_kept_free(reserved, problem.head_dim)
    query = inputs[0]
    device, dtype = query.get_device(), query.get_dtype()
    dq_meta, dk_meta, dv_meta = traced_gradients()
    dq, dv = (empty_strided(*size_and_strides(meta), dtype=dtype, device=device) for meta in (dq_meta, dv_meta))
    dk = _launch(problem, inputs, [dv, dq], FixedLayout(device, dtype, *size_and_strides(dk_meta)), {"BY_SIZE": False})
    return dq, dk, dv


@functools.cache
def _none_kept_free(reserved: int, head_dim: int) -> None:
    """Says so once."""
    log.warning(
        "%d SMs are reserved, but attention of head dim %d takes two passes, which use whatever SMs are free", reserved, head_dim
    )


def into_buffers(problem: Problem, inputs: list[Any], scratch: Any, dk: Any, dv: Any, launched: Any) -> None:
    """The same into the buffers that one pass fills, its scratch for dq included; `launched` is 1, or 0 for nothing."""
    nothing = contiguous([0], torch.float32, inputs[0].get_device())  # every template has an output
    _launch(problem, inputs, [dv, scratch, dk], nothing, {"BY_SIZE": True} | problem.accumulator_order(), launched)


def _launch(
    problem: Problem, inputs: list[Any], mutated: list[Any], output: FixedLayout, constants: dict[str, Any], launched: Any = 1
) -> Any:
    tile = problem.tiles.two_pass
    assert tile
    kv_tiles, q_tiles = CeilDiv(sympy.sympify(problem.kv_len), tile.kv_rows), CeilDiv(sympy.sympify(problem.q_len), tile.q_rows)
    return kernels.call(
        kernels.TWO_PASS,
        grid=problem.heads * (kv_tiles * (1 + tile.split) + q_tiles * problem.group) * launched,
        inputs=inputs,
        mutated=mutated,
        output=output,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        constants=problem.constants(tile) | {"KV_ROWS": tile.kv_rows, "Q_ROWS": tile.q_rows, "SPLIT": tile.split} | constants,
    )
