"""The attention that is lowered: what was resolved for it, and its tensors in memory."""

from __future__ import annotations

from dataclasses import dataclass

import sympy
import torch
from torch._inductor.ir import FlexibleLayout, IRNode
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import CeilDiv

from dash_inductor.reference import LOG2E
from dash_inductor.resolve import Resolution
from dash_inductor.templates.tiles import EMULATED, AnyTile, Tile

from .buffers import multiple, size_and_strides, traced_gradients


@dataclass(frozen=True)
class Inputs:
    """query [B, H, S_q, D], grad_out [B, H, S_q, D_v], key [B, H_kv, S_k, D], value [B, H_kv, S_k, D_v]; neg_lse = -logsumexp *
    log2(e) and delta are fp32, padded to Q tiles.

    Sizes are sympy integers, symbols where they are known at run time only.
    """

    resolution: Resolution
    query: IRNode
    key: IRNode
    value: IRNode
    grad_out: IRNode
    neg_lse: IRNode
    delta: IRNode

    @property
    def tensors(self) -> list[IRNode]:
        """In the order in which the kernels take them."""
        return [self.query, self.key, self.value, self.grad_out, self.neg_lse, self.delta]

    @property
    def gradients(self) -> list[tuple[list[sympy.Expr], list[sympy.Expr]]]:
        """(Size, strides) of dq, dk and dv as the graph was traced with them. If keys are shared by the batch, dk and dv get
        query's batch size. In segments they are [segments * B, ..], segment by segment."""
        metas = [size_and_strides(meta) for meta in traced_gradients()]
        if segments := self.resolution.problem.segments:
            sizes = [[segments * x.get_size()[0], *x.get_size()[1:]] for x in (self.key, self.value)]
            return [metas[0], *((size, FlexibleLayout.contiguous_strides(size)) for size in sizes)]
        if V.graph.sizevars.statically_known_equals(self.key.get_size()[0], metas[1][0][0]):
            return metas
        whole = [[self.query.get_size()[0], *size[1:]] for size, _ in metas]
        return [metas[0], *((size, FlexibleLayout.contiguous_strides(size)) for size in whole[1:])]

    @property
    def device(self) -> torch.device:
        """Where they all are."""
        return self.query.get_device_or_error()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of query, key, value and grad_out."""
        return self.query.get_dtype()

    @property
    def key_gradients_dtype(self) -> torch.dtype:
        """The dtype of dk and dv."""
        return torch.float32 if self.resolution.problem.segments else self.dtype

    @property
    def q_len(self) -> sympy.Expr:
        """Query rows."""
        return sympy.sympify(self.query.get_size()[2])

    @property
    def kv_len(self) -> sympy.Expr:
        """Keys."""
        return sympy.sympify(self.key.get_size()[2])

    @property
    def query_heads_total(self) -> sympy.Expr:
        """Query heads of the whole batch."""
        batch, heads = self.query.get_size()[:2]
        return sympy.sympify(batch) * heads

    @property
    def kv_heads_total(self) -> sympy.Expr:
        """kv heads of the whole batch."""
        batch, heads = self.key.get_size()[:2]
        return sympy.sympify(batch) * heads

    @property
    def n_q(self) -> sympy.Expr:
        """Q tiles."""
        return CeilDiv(self.q_len, self.resolution.tile.block_m)

    def constants(self, tile: AnyTile) -> dict[str, object]:
        """What the kernels of one pass and of two know when they are compiled."""
        problem = self.resolution.problem
        head_dim, value_dim = problem.head_dims
        of_value = {"VALUE_DIM": value_dim, "BLOCK_DV": tile.block_dv, "EVEN_DV": value_dim == tile.block_dv}
        return {
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_D": tile.block_d,
            "HEAD_DIM": head_dim,
            "GROUP": problem.group,
            "CAUSAL": problem.mask == "causal",
            "EVEN_M": multiple(self.q_len, tile.block_m),
            "EVEN_N": multiple(self.kv_len, tile.block_n),
            "EVEN_D": head_dim == tile.block_d,
            "SCALE": problem.softmax_scale,
            "SCALE_LOG2E": problem.softmax_scale * LOG2E,
            "INTERPRET": self.resolution.target.arch == EMULATED,
        } | (of_value if value_dim != head_dim else {})


def accumulator_order(tile: Tile, tiles: int = 1) -> dict[str, object]:
    """In which order one pass keeps the elements of a dq tile, for kernels: the shape whose axes are the digits of row and column,
    behind one for `tiles` of them, and those axes in the order in which they are kept."""
    digits = tile.dq_digits
    axes = sorted(range(len(digits)), key=lambda k: (digits[k].axis, -digits[k].one))
    return {
        "DQ_TRANSPOSED": tile.dq_transposed,
        "DQ_SHAPE": (tiles, *(digits[k].many for k in axes)),
        "DQ_ORDER": (0, *(1 + axes.index(k) for k in range(len(digits)))),
    }
