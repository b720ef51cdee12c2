"""dK/dV and dQ by kernels of their own: seven matmuls a tile in place of five, and no sum that crosses a CTA."""

from __future__ import annotations

from typing import Any

import sympy
from torch._inductor.ir import FixedLayout
from torch._inductor.lowering import empty_strided
from torch.utils._sympy.functions import CeilDiv

from dash_inductor.config import TWO_PASS
from dash_inductor.templates.tiles import TwoPassTile

from . import kernels
from .buffers import size_and_strides, traced_gradients

REPORT: dict[str, Any] = {"family": TWO_PASS, "launch": "plain"}


def gradients(inputs: list[Any], tile: TwoPassTile, constants: dict[str, Any]) -> tuple[Any, Any, Any]:
    """dq, dk, dv from query, key, value, grad_out, -lse*log2(e) and delta, in plain launches: no CTA waits for another.

    `constants` are compile-time values that the two kernels share; those that depend on the rows a CTA keeps are changed here.
    """
    query, key = inputs[:2]
    batch, heads, q_len, _ = map(sympy.sympify, query.get_size())
    _, kv_heads, kv_len, _ = map(sympy.sympify, key.get_size())
    device, dtype = query.get_device(), query.get_dtype()
    dq_meta, dk_meta, dv_meta = traced_gradients()
    constants = constants | {"INTERPRET": device.type == "cpu"}

    dv = empty_strided(*size_and_strides(dv_meta), dtype=dtype, device=device)
    dk = kernels.call(
        kernels.TWO_PASS_DKDV,
        grid=batch * kv_heads * CeilDiv(kv_len, tile.dkdv.rows),
        inputs=inputs,
        mutated=[dv],
        output=FixedLayout(device, dtype, *size_and_strides(dk_meta)),
        num_warps=tile.dkdv.num_warps,
        num_stages=tile.dkdv.num_stages,
        constants=constants | {"BLOCK_N": tile.dkdv.rows},
    )

    dq = kernels.call(
        kernels.TWO_PASS_DQ,
        grid=batch * heads * CeilDiv(q_len, tile.dq.rows),
        inputs=inputs,
        output=FixedLayout(device, dtype, *size_and_strides(dq_meta)),
        num_warps=tile.dq.num_warps,
        num_stages=tile.dq.num_stages,
        constants=constants | {"BLOCK_M": tile.dq.rows, "PADDED_TO": tile.block_m},
    )
    return dq, dk, dv
