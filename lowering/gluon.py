"""The Gluon kernel in the place of the Triton template, where `kernel="gluon"` asks for it. It has never run on a GPU.

Inductor's templates are Triton's, so the launch is a custom op that writes into Inductor's buffers: they are planned, and dq's
epilogue fuses, as with the template. The op builds TMA descriptors of its tensors, and zeroes semaphores, at every launch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.lowering import empty_strided, fallback_handler

from dash_inductor.problem import dtype_name
from dash_inductor.templates import gluon_kernel
from dash_inductor.templates.tiles import gluon_tile

from . import kernels
from .buffers import empty, size_and_strides, traced_gradients
from .dq import in_accumulator_order, scaled_dq
from .failed_waits import INTS, report_of
from .header import add_to_header, root_graph
from .inputs import Inputs
from .table import kernel_table

_library = torch.library.Library("dash", "FRAGMENT")
_library.define(
    "sdpa_backward_gluon(Tensor query, Tensor key, Tensor value, Tensor grad_out, Tensor neg_lse, Tensor delta, Tensor table, "
    "Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, SymInt workers, bool cooperative, bool round_robin, bool causal, float scale) "
    "-> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def launch(*arguments: Any) -> None:
    """Launches `workers` CTAs of the kernel on the device of `query`; the arguments are those of the schema.

    query, grad_out [B, H, S_q, D], key, value, dk, dv [B, H_kv, S_k, D] in bf16 or fp16; neg_lse = -lse*log2(e) and delta fp32,
    padded to whole Q tiles with -inf and 0; table int32; dq fp32 [B * H, Q tiles, elements of a Q tile], each tile in accumulator
    order, not scaled. `cooperative` if the CTAs must be resident together, `round_robin` if the table may be that of one.

    Raises:
        ValueError: for a device, dtype or head dim that the kernel is not made for, or a Triton.
    """
    *tensors, workers, cooperative, round_robin, causal, scale = arguments
    query = tensors[0]
    major, minor = torch.cuda.get_device_capability(query.device)
    kernel = gluon_kernel()
    mask, dtype = "causal" if causal else "full", dtype_name(query.dtype)
    tile = gluon_tile(10 * major + minor, dtype, query.shape[3])
    report = report_of(f"one_pass in gluon ({mask} mask, {dtype}, head dim {query.shape[3]})")
    if report is None:
        report = query.new_zeros(INTS, dtype=torch.int32)
    sizes = {"block_m": tile.block_m, "block_n": tile.block_n, "workers": workers}
    arguments, constants = kernel.arguments(*tensors, report=report, **sizes, causal=causal, round_robin=round_robin, scale=scale)
    with torch.cuda.device(query.device):
        kernel.sdpa_backward[(workers,)](*arguments, **constants, launch_cooperative_grid=cooperative)


_library.impl("sdpa_backward_gluon", launch, "CUDA")
torch.library.register_fake("dash::sdpa_backward_gluon", lambda *_: None, lib=_library)


def gradients(inputs: Inputs) -> kernels.Gradients:
    """dq, dk, dv, and what to record of them."""
    resolution, device, dtype = inputs.resolution, inputs.device, inputs.dtype
    tile = resolution.one_pass
    assert tile
    table = kernel_table(inputs, tile, may_share=False)
    _, dk_meta, dv_meta = traced_gradients()
    tile_elements = tile.block_m * resolution.problem.head_dim
    scratch = empty([inputs.query_heads_total, inputs.n_q, tile_elements], torch.float32, device)
    dk, dv = (empty_strided(*size_and_strides(meta), dtype=dtype, device=device) for meta in (dk_meta, dv_meta))
    add_to_header(root_graph(), f"import {__name__}")  # which registers the op, where the code comes out of a cache
    fallback_handler(torch.ops.dash.sdpa_backward_gluon.default, add_to_fallback_set=False)(
        *inputs.tensors,
        table.table,
        scratch,
        dk,
        dv,
        table.workers,
        not resolution.chained,
        table.round_robin,
        resolution.problem.mask == "causal",
        inputs.scale,
    )
    schedule_ints = table.table_ints + gluon_kernel().PARTITIONS * table.row_ints
    place = in_accumulator_order(tile)
    dq = scaled_dq(scratch, tile.block_m, place, inputs.query.get_size(), dtype, inputs.scale)
    return kernels.Gradients(dq, dk, dv, schedule_ints, table.record | {"launch": f"{table.record['launch']}, Gluon"})
