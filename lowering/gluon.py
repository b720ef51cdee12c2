"""The Gluon kernel in the place of the Triton template of one pass, where a resolution has it.

Inductor's templates are Triton's, so the launch is a custom op that writes into Inductor's buffers: they are planned, and dq's
epilogue fuses, as with the template. The op builds TMA descriptors of its tensors, and zeroes semaphores, at every launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple
from unittest import mock

import sympy
import torch
from torch import Tensor
from torch._inductor.ir import TensorBox
from torch._inductor.lowering import empty_strided, fallback_handler
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_map_only

from dash_inductor.op import MaskArguments
from dash_inductor.problem import BLOCK_MASK, dtype_name
from dash_inductor.schedule.parts import FEW_CHAINS, LEAST_STEPS
from dash_inductor.templates import gluon_kernel
from dash_inductor.templates.tiles import GLUON_PARTITIONS, gluon_tile

from . import kernels, two_pass
from .block_lists import Rows
from .block_mask import ChainsInParts, chains_of, rows_in_parts
from .buffers import empty
from .failed_waits import INTS, report_of
from .header import add_to_header, root_graph
from .inputs import Inputs
from .mods import Mods
from .one_pass import Launched, one_pass_tile
from .table import kernel_table

_library = torch.library.Library("dash", "FRAGMENT")
_library.define(
    "sdpa_backward_gluon(Tensor query, Tensor key, Tensor value, Tensor grad_out, Tensor neg_lse, Tensor delta, Tensor table, "
    "Tensor? steps, Tensor? bits, Tensor(a!)? sums, Tensor(b!) dq, Tensor(c!) dk, Tensor(d!) dv, SymInt workers, bool cooperative, "
    "bool shared_row, bool round_robin, bool causal, int q_tiles, int kv_tiles, SymInt bands, SymInt sets, int least_steps, "
    "float scale) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


class Launch(NamedTuple):
    """A launch of the kernel: with `arguments`, by so many CTAs, resident together if it is cooperative."""

    kernel: Any
    arguments: tuple[Any, ...]
    workers: int
    cooperative: bool

    def run(self) -> None:
        """On the current device."""
        self.kernel.sdpa_backward[(self.workers,)](*self.arguments, **self._options())

    def compile(self) -> Any:
        """What it would run, as Triton keeps it in its cache; the tensors need no memory."""
        return self.kernel.sdpa_backward.warmup(*self.arguments, grid=(self.workers,), **self._options())

    def _options(self) -> dict[str, Any]:
        return self.kernel.OPTIONS | {"launch_cooperative_grid": self.cooperative}


def launch_of(kernel: Any, *arguments: Any) -> Launch:
    """By a module such as `gluon_kernel()`; the arguments are those of the schema.

    query, grad_out [B, H, S_q, D], key, value, dk, dv [B, H_kv, S_k, D] in bf16 or fp16; neg_lse = -lse*log2(e) and delta fp32,
    padded to whole Q tiles with -inf and 0; table int32; dq fp32 [B * H, Q tiles, elements of a Q tile], each tile in accumulator
    order, not scaled. `cooperative` if the CTAs must be resident together, `shared_row` if the table has one row for all chains,
    `round_robin` if it may be that of a round robin. Under a mask in blocks the table, `steps` and `bits` are those of `Rows`, and
    a block has q_tiles x kv_tiles tiles. Of chains in parts, in at most `bands` and `sets`, sums is fp32 [elements], and bands are
    for masks whose longest chain has `least_steps`.

    Raises:
        ValueError: for a device, dtype or head dim that the kernel is not made for.
    """
    *tensors, steps, bits, sums, dq, dk, dv = arguments[:13]
    workers, cooperative, shared_row, round_robin, causal, q_tiles, kv_tiles, bands, sets, least_steps, scale = arguments[13:]
    query = tensors[0]
    major, minor = torch.cuda.get_device_capability(query.device if query.is_cuda else None)  # else of what has no memory
    mask, dtype = "causal" if causal else "full" if steps is None else BLOCK_MASK, dtype_name(query.dtype)
    tile = gluon_tile(10 * major + minor, dtype, query.shape[3])
    report = report_of(f"one_pass in gluon ({mask} mask, {dtype}, head dim {query.shape[3]})")
    if report is None:
        report = query.new_zeros(INTS, dtype=torch.int32)
    lists = None
    if steps is not None:
        lists = kernel.Lists(steps, bits, q_tiles, kv_tiles, bands, sets, FEW_CHAINS, least_steps, sums)
    of_kernel = kernel.arguments(
        *tensors,
        *(dq, dk, dv),
        report=report,
        block_m=tile.block_m,
        block_n=tile.block_n,
        workers=workers,
        causal=causal,
        shared_row=shared_row,
        round_robin=round_robin,
        scale=scale,
        lists=lists,
    )
    return Launch(kernel, of_kernel, workers, cooperative)


def launch(*arguments: Any) -> None:
    """Launches the kernel on the device of `query`; arguments and errors are those of `launch_of`, and ValueError for a Triton."""
    if arguments[13] == 0:  # workers: two passes are launched instead
        return
    with torch.cuda.device(arguments[0].device):
        launch_of(gluon_kernel(), *arguments).run()


_compiles: ContextVar[bool] = ContextVar("compiles", default=False)


@contextmanager
def compiling_launches() -> Iterator[None]:
    """Inside, the kernel is compiled for each launch in code that is generated, and not first when that runs."""
    token = _compiles.set(True)
    try:
        yield
    finally:
        _compiles.reset(token)


def compile_launch(kernel: Any, *arguments: Any) -> None:
    """Compiles what `launch_of` would launch, for tensors without memory, and the hints of sizes."""

    def hinted(size: Any) -> Any:
        return size.node.hint if isinstance(size, torch.SymInt) else size

    def without_memory(x: Tensor) -> Tensor:
        return torch.empty_strided([*map(hinted, x.shape)], [*map(hinted, x.stride())], dtype=x.dtype, device="meta")

    arguments = tuple(map(hinted, arguments))
    with unset_fake_temporarily():
        launch_of(kernel, *tree_map_only(Tensor, without_memory, arguments)).compile()


def _on_fake_tensors(*arguments: Any) -> None:
    if _compiles.get():
        compile_launch(gluon_kernel(), *arguments)


_library.impl("sdpa_backward_gluon", launch, "CUDA")
torch.library.register_fake("dash::sdpa_backward_gluon", _on_fake_tensors, lib=_library)


def gradients(inputs: Inputs) -> kernels.Gradients:
    """dq, dk, dv under a full or causal mask, and what to record of them."""
    resolution, tile = inputs.resolution, one_pass_tile(inputs)
    table = kernel_table(inputs, tile)
    launched = _launched(
        inputs,
        [table.table, None, None],
        table.workers,
        cooperative=not resolution.chained,
        shared_row=table.shared_row,
        round_robin=table.round_robin,
    )
    if resolution.two_pass:
        two_pass.into_buffers(inputs, tile, launched.scratch, launched.dk, launched.dv, table.is_two_pass)
    schedule_ints = table.table_ints + GLUON_PARTITIONS * table.row_ints
    return kernels.Gradients(launched.dq(inputs), launched.dk, launched.dv, schedule_ints, table.record)


def gradients_in_blocks(inputs: Inputs, mask: MaskArguments, mods: Mods) -> kernels.Gradients:
    """dq, dk, dv under a mask in blocks, and what to record of them. A kernel before asks the mask function, element by element."""
    resolution, tile = inputs.resolution, one_pass_tile(inputs)
    if reserved := resolution.target.reserved_sms:
        two_pass.none_kept_free(reserved, "a BlockMask takes a CTA for each of its KV tiles")
    rows, parts = rows_in_parts(inputs, mask, mods, tile, with_bits=True)
    workers = parts.units if parts else chains_of(inputs, tile)
    launched = _launched(inputs, [rows.rows, rows.steps, rows.bits], workers, blocks=rows, parts=parts)
    assert resolution.costs
    record = {"family": resolution.family, "launch": "chained", "step_ns": resolution.costs.step_ns}
    schedule_ints = rows.ints + (parts.ints if parts else 0)
    return kernels.Gradients(launched.dq(inputs, rows.is_visited), launched.dk, launched.dv, schedule_ints, record)


def _launched(
    inputs: Inputs,
    walk: Sequence[TensorBox | None],
    workers: sympy.Expr | int,
    *,
    cooperative: bool = False,
    shared_row: bool = False,
    round_robin: bool = False,
    blocks: Rows | None = None,
    parts: ChainsInParts | None = None,
) -> Launched:
    """walk: the table, or rows, steps and bits of `blocks`."""
    resolution, device, dtype, tile = inputs.resolution, inputs.device, inputs.dtype, one_pass_tile(inputs)
    _, dk_meta, dv_meta = inputs.gradients
    scratch = empty([inputs.query_heads_total, inputs.n_q, tile.block_m * tile.block_d], torch.float32, device)
    dk, dv = (empty_strided(*meta, dtype=dtype, device=device) for meta in (dk_meta, dv_meta))
    add_to_header(root_graph(), f"import {__name__}")  # which registers the op, where the code comes out of a cache
    # Inductor runs the op once on fake tensors, but for a constant, such as the table, which it passes as it is.
    with mock.patch.object(V.fake_mode, "allow_non_fake_inputs", True):
        fallback_handler(torch.ops.dash.sdpa_backward_gluon.default, add_to_fallback_set=False)(
            *inputs.tensors,
            *walk,
            *(parts.sums if parts else None, scratch, dk, dv),
            workers,
            cooperative,
            shared_row,
            round_robin,
            resolution.problem.mask == "causal",
            *((blocks.q_tiles, blocks.kv_tiles) if blocks else (0, 0)),
            *((parts.bands, parts.sets) if parts else (1, 1)),
            LEAST_STEPS if parts else 0,
            inputs.scale,
        )
    return Launched(scratch, dk, dv)
