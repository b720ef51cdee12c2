"""The Gluon kernel compiled for a GPU that need not be there: it is no template of Inductor's, so no generated code holds it."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from dash_inductor.codegen.fake_gpu import fake_gpu
from dash_inductor.codegen.flex import TORCH_DTYPES, FlexAttention
from dash_inductor.devices import device
from dash_inductor.lowering.gluon_functions import functions_before_lowering
from dash_inductor.lowering.launch.gluon import launch_of
from dash_inductor.problem import BLOCK_MASK, dtype_name
from dash_inductor.schedule.packing import HEADER
from dash_inductor.schedule.parts import LEAST_STEPS
from dash_inductor.templates import gluon_kernel
from dash_inductor.templates.operands import Operands
from dash_inductor.templates.tiles import gluon_tile

from .generate import CompiledKernel, require_sizes

BLOCK = 128  # rows and keys of a block of a mask


def compile_gluon(
    name: str,
    *,
    q_len: int,
    kv_len: int,
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    mask: str,
    value_dim: int | None = None,
    dtype: str = "bf16",
    shared_row: bool = False,
    round_robin: bool = False,
    bands: int = 1,
    sets: int = 1,
    score_mod: str = "none",
    dropout: float = 0.0,
) -> CompiledKernel:
    """The kernel of an attention, as lowering/launch/gluon.py launches it on [B, H, S, D] views of [B, S, H, D].

    mask: full, causal, or block_mask for any other, whose chains may be in parts, of so many bands and sets. score_mod: of
    codegen/mods.py. dropout: p of the forward.

    Raises:
        NoTile: it is not made for that GPU or head dim.
        ValueError: for sizes that no attention has, or a Triton that it is not written for.
    """
    value_dim = head_dim if value_dim is None else value_dim
    require_sizes([q_len, kv_len, value_dim], batch, heads, kv_heads, head_dim, dtype)
    tile = gluon_tile(device(name).arch, dtype, head_dim, value_dim)

    def rows(length: int, heads: int, dim: int) -> torch.Tensor:
        return torch.empty(batch, length, heads, dim, dtype=TORCH_DTYPES[dtype], device="meta").transpose(1, 2)

    def scratch(*sizes: int) -> torch.Tensor:
        return torch.empty(batch, heads, -(-q_len // tile.block_m) * tile.block_m, *sizes, device="meta")

    query, grad_out = (rows(q_len, heads, dim) for dim in (head_dim, value_dim))
    key, value, dk, dv = (rows(kv_len, kv_heads, dim) for dim in (head_dim, value_dim) * 2)

    def ints(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=torch.int32, device="meta")

    table, steps, bits, sums, numbers = ints(HEADER), None, None, None, dict[str, Any]()
    if mask == BLOCK_MASK:
        blocks = [-(-length // BLOCK) for length in (kv_len, q_len)]
        table, bits = ints(1, 1, *blocks), ints(blocks[0] * blocks[1] * BLOCK * BLOCK // 32)
        steps = ints(1, 1, blocks[0], *([bands] if bands > 1 else []))
        numbers = {"q_tiles": BLOCK // tile.block_m, "kv_tiles": BLOCK // tile.block_n}
        if bands * sets > 1:
            sums = torch.empty(0, device="meta")
            numbers |= {"bands": bands, "sets": sets, "least_steps": LEAST_STEPS}
    if dropout:
        numbers |= {"drop_scale": 1 / (1 - dropout), "drop_bits": ints(1)}
    functions, captures = _functions(name, score_mod, query)
    operands = Operands(
        *(query, key, value, grad_out, scratch(), scratch(), table, steps, bits, sums, scratch(tile.block_d), dk, dv),
        captures=captures,
        sizes=[],
        workers=1,
        cooperative=True,
        block_m=tile.block_m,
        block_n=tile.block_n,
        causal=mask == "causal",
        scale=head_dim**-0.5,
        shared_row=shared_row,
        round_robin=round_robin,
        functions=functions,
        **numbers,
    )
    with fake_gpu(name):
        binary = launch_of(gluon_kernel(), operands).compile()
    return CompiledKernel(binary.asm["ptx"], binary.asm["cubin"], binary.metadata)


def _functions(name: str, score_mod: str, query: torch.Tensor) -> tuple[str, list[torch.Tensor]]:
    """The source of a function of the scores, and the slopes if it reads them."""
    if score_mod == "none":
        return "", []
    _, heads, length, head_dim = query.shape
    attention = FlexAttention(length, heads, heads, head_dim, score_mod, dtype=dtype_name(query.dtype))
    score_of, joint = attention.functions()
    place = [torch.zeros((), dtype=torch.int32) for _ in range(4)]
    forward = make_fx(score_of)(torch.zeros((), dtype=query.dtype), *place, torch.zeros(heads))
    with fake_gpu(name), FakeTensorMode():
        of_gpu, _, _, _, _, _, slopes, *_ = attention.tensors()
        made = functions_before_lowering(forward, joint, of_gpu, [slopes], trained=False)
    return made.source, [torch.empty(heads, device="meta") for _ in made.captures]


def gluon_source() -> str:
    """The kernel's own source."""
    return inspect.getsource(gluon_kernel().sdpa_backward.fn)
