"""The Gluon kernel in the place of the Triton template, where `kernel="gluon"` asks for it. It has never run on a GPU.

Inductor's templates are Triton's, so the launch is a custom op that writes into Inductor's buffers: they are planned, and dq's
epilogue fuses, as with the template. The op builds TMA descriptors of its tensors, and zeroes semaphores, at every launch.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import Tensor
from torch._inductor.lowering import empty_strided, fallback_handler
from torch.utils._sympy.functions import CeilDiv

from dash_inductor.target import DTYPES
from dash_inductor.templates import gluon
from dash_inductor.templates.tiles import gluon_tile

from .buffers import empty, size_and_strides, traced_gradients
from .epilogue import in_accumulator_order, scaled_dq
from .problem import Problem
from .report import add_to_header, root_graph
from .schedule import Schedule

_library = torch.library.Library("dash", "FRAGMENT")
_library.define(
    "sdpa_backward_gluon(Tensor query, Tensor key, Tensor value, Tensor grad_out, Tensor neg_lse, Tensor delta, Tensor table, "
    "Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, SymInt workers, bool cooperative, bool causal, float scale) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor,
    neg_lse: Tensor,
    delta: Tensor,
    table: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    workers: int,
    cooperative: bool,
    causal: bool,
    scale: float,
) -> None:
    """Launches `workers` CTAs of the kernel on the device of `query`.

    query, grad_out [B, H, S_q, D], key, value, dk, dv [B, H_kv, S_k, D] in bf16 or fp16; neg_lse = -lse*log2(e) and delta fp32,
    padded to whole Q tiles with -inf and 0; table int32, of heads that stay whole; dq fp32 [B * H, Q tiles, elements of a Q tile],
    each tile in accumulator order, not scaled and not written where no KV tile sees the Q tile. `cooperative` if the CTAs must be
    resident together.

    Raises:
        ValueError: for a device, dtype or head dim that the kernel is not made for, or a Triton.
    """
    major, minor = torch.cuda.get_device_capability(query.device)
    tile = gluon_tile(10 * major + minor, DTYPES.get(query.dtype, str(query.dtype)), query.shape[3])
    kernel = gluon()
    arguments, constants = kernel.arguments(
        query,
        key,
        value,
        grad_out,
        neg_lse,
        delta,
        table,
        dq,
        dk,
        dv,
        block_m=tile.block_m,
        block_n=tile.block_n,
        causal=causal,
        scale=scale,
    )
    with torch.cuda.device(query.device):
        kernel.sdpa_backward[(workers,)](*arguments, **constants, launch_cooperative_grid=cooperative)


_library.impl("sdpa_backward_gluon", launch, "CUDA")
torch.library.register_fake("dash::sdpa_backward_gluon", lambda *_: None, lib=_library)


def gradients(problem: Problem, schedule: Schedule, inputs: list[Any]) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
    """dq, dk, dv, how many ints of memory were needed beside them, and what to report.

    ValueError for a schedule whose heads may straddle rounds: the kernel reads rows, and computes none.
    """
    if schedule.straddling:
        raise ValueError("kernel='gluon' takes no round robin")
    query = inputs[0]
    batch, heads, q_len, head_dim = map(sympy.sympify, query.get_size())
    device, dtype = query.get_device(), query.get_dtype()
    _, dk_meta, dv_meta = traced_gradients()
    tile = problem.tiles.one_pass
    assert tile
    n_q = CeilDiv(q_len, tile.block_m)
    scratch = empty([batch * heads, n_q, tile.block_m * head_dim], torch.float32, device)
    dk, dv = (empty_strided(*size_and_strides(meta), dtype=dtype, device=device) for meta in (dk_meta, dv_meta))
    add_to_header(root_graph(), f"import {__name__}")  # which registers the op, where the code comes out of a cache
    fallback_handler(torch.ops.dash.sdpa_backward_gluon.default, add_to_fallback_set=False)(
        *inputs,
        schedule.table,
        scratch,
        dk,
        dv,
        schedule.workers,
        schedule.cooperative,
        problem.mask.startswith("causal"),
        problem.scale,
    )
    place = in_accumulator_order(tile)
    dq = scaled_dq(scratch, schedule.visited, tile.block_m, place, query.get_size(), dtype, problem.scale)
    ints = batch * heads * n_q * (tile.block_m * head_dim + 1) + 2 + schedule.table_ints
    return dq, dk, dv, ints, schedule.report | {"launch": f"{schedule.report['launch']}, Gluon"}
