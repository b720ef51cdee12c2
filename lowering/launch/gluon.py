"""The launch of one pass by the Gluon kernel.

Inductor's templates are Triton's, so the launch is a custom op that writes into Inductor's buffers: they are planned, and dq's
epilogue fuses, as with a template. The op builds TMA descriptors of its tensors, and zeroes semaphores, at every launch.
"""

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._inductor.ir import IRNode, TensorBox
from torch._inductor.lowering import empty_strided, fallback_handler
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_map_only
from torch.utils._sympy.functions import CeilDiv, FloorDiv, Max

from dash_inductor import templates
from dash_inductor.first_use.machine import digest_of
from dash_inductor.problem import BLOCK_MASK, dtype_name
from dash_inductor.resolve import Resolution
from dash_inductor.schedule.parts import FEW_CHAINS
from dash_inductor.templates import gluon_kernel
from dash_inductor.templates.operands import Operands
from dash_inductor.templates.tiles import Tile, gluon_semaphores

from .. import dropout_bits
from ..block_lists import write_bits
from ..buffers import ALIGNED, empty, narrow, zeros
from ..failed_waits import INTS, report_of
from ..gluon_functions import Functions, functions_of
from ..header import add_kernel, add_to_header, root_graph
from ..inputs import Inputs
from ..mods import Mods
from ..walk import Walk

# Of Operands; what tensors are like is in the generated code.
COMPILED_IN = (
    *("block_m", "block_n", "causal", "scale", "shared_row", "round_robin", "q_tiles", "kv_tiles", "bands", "sets", "least_steps"),
    *("functions", "drop_scale"),
)


class Launch(NamedTuple):
    """A launch of the kernel: with `arguments`, by so many CTAs, resident together if it is cooperative.

    compiled: what equal launches ran, if there were some.
    """

    kernel: Any
    compiled: list[Any]
    arguments: tuple[Any, ...]
    workers: int
    cooperative: bool

    def run(self) -> None:
        """Launch it on the current device."""
        if not self.compiled:
            self.compiled.append(self.compile())
        self.compiled[0][(self.workers, 1, 1)](*self.arguments)  # Triton's own launch would look it up by each argument again

    def compile(self) -> Any:
        """What it would run, as Triton keeps it in its cache; the tensors need no memory."""
        return self.kernel.sdpa_backward.warmup(*self.arguments, grid=(self.workers,), **self.options())

    def options(self) -> dict[str, Any]:
        """How Triton compiles the kernel for it."""
        return self.kernel.OPTIONS | {"launch_cooperative_grid": self.cooperative}


def launch_of(kernel: Any, x: Operands) -> Launch:
    """The launch of a kernel's module, such as `gluon_kernel()`; ValueError for a GPU or sizes that it is not made for."""
    if torch.cuda.get_device_capability(x.query.device if x.query.is_cuda else None) != (9, 0):  # else of what has no memory
        raise ValueError("the Gluon kernel is made for sm_90")
    mask = "causal" if x.causal else "full" if x.steps is None else BLOCK_MASK
    report = _report(mask, x.query.dtype, x.query.shape[3])
    if report is None:
        report = x.query.new_zeros(INTS, dtype=torch.int32)
    plan, arguments = kernel.arguments(x, report=report, most_chains=FEW_CHAINS)
    return Launch(kernel, plan.compiled, arguments, x.workers, x.cooperative)


@functools.cache
def _report(mask: str, dtype: torch.dtype, head_dim: int) -> Tensor | None:
    return report_of(f"one_pass in gluon ({mask} mask, {dtype_name(dtype)}, head dim {head_dim})")


def sdpa_backward_gluon(*operands: Any) -> None:
    """Launches the kernel on the device of `query`; ValueError as `launch_of`, and for a Triton that it is not written for."""
    x = Operands(*operands)
    if x.workers == 0:  # two passes are launched instead
        return
    with torch.cuda.device(x.query.device):
        launch_of(gluon_kernel(), x).run()


sdpa_backward_gluon.__signature__ = inspect.signature(Operands).replace(return_annotation=None)  # type: ignore[attr-defined]
_schema = torch.library.infer_schema(sdpa_backward_gluon, mutates_args=("sums", "semaphores", "dq", "dk", "dv", "share"))
_library = torch.library.Library("dash", "FRAGMENT")
_library.define(f"sdpa_backward_gluon{_schema}", tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("sdpa_backward_gluon", sdpa_backward_gluon, "CUDA")
SDPA_BACKWARD_GLUON = torch.ops.dash.sdpa_backward_gluon.default

_compiles: ContextVar[bool] = ContextVar("compiles", default=False)


@contextmanager
def compiling_launches() -> Iterator[None]:
    """Inside, the kernel is compiled for each launch in code that is generated, and not first when that runs."""
    token = _compiles.set(True)
    try:
        yield
    finally:
        _compiles.reset(token)


def compile_launch(kernel: Any, operands: Operands) -> None:
    """Compiles what `launch_of` would launch, for tensors without memory, and the hints of sizes."""

    def hinted(size: Any) -> Any:
        return size.node.hint if isinstance(size, torch.SymInt) else size

    def without_memory(x: Tensor) -> Tensor:
        return torch.empty_strided([*map(hinted, x.shape)], [*map(hinted, x.stride())], dtype=x.dtype, device="meta")

    with unset_fake_temporarily():
        known = tree_map_only(torch.SymInt, hinted, operands)
        launch_of(kernel, tree_map_only(Tensor, without_memory, known)).compile()


def _on_fake_tensors(*operands: Any) -> None:
    if _compiles.get():
        compile_launch(gluon_kernel(), Operands(*operands))


torch.library.register_fake("dash::sdpa_backward_gluon", _on_fake_tensors, lib=_library)


def launch(inputs: Inputs, tile: Tile, walk: Walk, mods: Mods, scratch: TensorBox, dv: TensorBox) -> TensorBox:
    """dk; scratch, fp32 [B * H, Q tiles, elements of a Q tile] for dq, dv and the values of `mods` are filled.

    Of the functions of `mods` the kernel calls those of the scores; what the mask's says is in the bits of the lists. Where there
    is no room for all of them at once, the keys are cut into slices, from the last on: the bits of one, its launch, and the next.
    For those of dropout heads take turns.
    """
    _, dk_meta, _ = inputs.gradients
    dk = empty_strided(*dk_meta, dtype=inputs.key_gradients_dtype, device=inputs.device)
    rows, parts, functions = walk.blocks, walk.parts, functions_of(mods, inputs.query)
    operands_of: Any = Operands  # which holds IR here
    table, *steps = walk.tensors
    of_blocks = {"q_tiles": rows.q_tiles, "kv_tiles": rows.kv_tiles} if rows else {}
    of_parts = {"bands": parts.bands, "sets": parts.sets, "least_steps": parts.least_steps} if parts else {}
    operands = operands_of(
        *inputs.tensors,
        table=table,
        steps=steps[0] if steps else None,
        bits=rows.bits if rows else None,
        sums=parts.sums if parts else None,
        dq=scratch,
        dk=dk,
        dv=dv,
        captures=functions.captures,
        sizes=functions.sizes,
        workers=walk.workers,
        cooperative=not inputs.resolution.chained,
        block_m=tile.block_m,
        block_n=tile.block_n,
        causal=inputs.resolution.problem.mask == "causal",
        scale=inputs.resolution.problem.softmax_scale,
        shared_row=walk.shared_row,
        round_robin=walk.round_robin,
        functions=functions.source,
        drop_scale=mods.of_dropout.get("DROP_SCALE"),
        drop_bits=mods.drop_bits,
        share=_share(inputs, mods, functions),
        **of_blocks,
        **of_parts,
    )
    add_kernel("gluon", _sources(), *(getattr(operands, name) for name in COMPILED_IN))
    add_to_header(root_graph(), f"import {__name__}")  # which registers the op, where the code comes out of a cache
    for of_launch in _launches(operands, inputs, tile, walk, mods):
        # Inductor runs the op once on fake tensors, but for a constant, such as the table, which it passes as it is.
        with mock.patch.object(V.fake_mode, "allow_non_fake_inputs", True):
            fallback_handler(SDPA_BACKWARD_GLUON, add_to_fallback_set=False)(*of_launch)
    return dk


@functools.cache
def _sources() -> str:
    return digest_of([Path(templates.__path__[0], "gluon")])


def _share(inputs: Inputs, mods: Mods, functions: Functions) -> TensorBox | None:
    """What elements add to the gradient of a captured tensor; of a trial, which has none of it, memory that nobody reads."""
    if mods.mutated or not functions.values:
        return mods.mutated[0] if mods.mutated else None
    (dtype,) = functions.values
    row = CeilDiv(inputs.kv_len, ALIGNED) * ALIGNED  # as long as TMA takes it
    return empty([*inputs.query.get_size()[:3], row], dtype, inputs.device)


def _launches(operands: Any, inputs: Inputs, tile: Tile, walk: Walk, mods: Mods) -> Iterator[Any]:
    """The operands of each launch: of one, or of one for each slice of the keys or turn of the heads, whose bits are written
    before."""
    slices, turns = inputs.resolution.slices, inputs.resolution.turns
    if turns > 1:
        turn = inputs.resolution.turn
        for first in range(0, turns * turn.batch * turn.heads, turn.batch * turn.heads):
            dropout_bits.write(inputs, tile, mods, walk.blocks, first)
            yield _of_turn(operands, inputs.resolution, first)
    elif slices == 1:
        yield operands
    else:
        yield from _of_slices(operands, inputs, tile, walk, mods)


def _of_turn(operands: Any, resolution: Resolution, first: int) -> Any:
    """Those of the turn that begins with this query head of the batch, as views."""
    turn = resolution.turn
    element, head = divmod(first, resolution.problem.heads)

    def part(x: IRNode, heads: int, first_head: int) -> IRNode:
        return narrow(narrow(x, 0, element, turn.batch), 1, first_head, heads)

    of_query, of_key = (turn.heads, head), (turn.kv_heads, head // turn.group)
    parts = {name: part(getattr(operands, name), *of_query) for name in ("query", "grad_out", "neg_lse", "delta")}
    parts |= {name: part(getattr(operands, name), *of_key) for name in ("key", "value", "dk", "dv")}
    return operands._replace(dq=narrow(operands.dq, 0, first, turn.batch * turn.heads), **parts)


def _of_slices(operands: Any, inputs: Inputs, tile: Tile, walk: Walk, mods: Mods) -> Iterator[Any]:
    """Those of each slice of the keys, from the last on."""
    assert walk.blocks
    slices = inputs.resolution.slices
    n_kv = CeilDiv(inputs.kv_len, tile.block_n)
    kv_tiles = CeilDiv(n_kv, slices)
    q_tiles = inputs.query_heads_total * inputs.n_q
    semaphores = zeros([2 + gluon_semaphores(tile.block_d) * q_tiles + walk.own_ints], torch.int32, inputs.device)
    for number in range(slices):
        end = n_kv - number * kv_tiles
        first = Max(0, end - kv_tiles)
        write_bits(inputs, mods, tile, walk.blocks, first)
        workers = FloorDiv(walk.workers, n_kv) * Max(0, end - first)
        yield operands._replace(semaphores=semaphores, number=number, workers=workers)
