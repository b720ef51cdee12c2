"""The schedule of one attention as the kernel reads it: a constant table, or a small kernel that writes it at run time."""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch._inductor.ir import FixedLayout
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import CeilDiv, Mod

from dash_inductor.config import current
from dash_inductor.schedule import TABLE, Blocks, Straddling, decision_source, may_straddle, pack_plan
from dash_inductor.schedule.table import most_ints, row_ints
from dash_inductor.schedule.word import CODES, STRIDE_SHIFT, encode
from dash_inductor.target import Target, Tile, chained, chained_family, costs_of, plan_for, shape_of

from . import kernels
from .report import add_to_header, root_graph

TABLE_BLOCK = 1024  # table entries written by one program


@dataclass(frozen=True)
class Problem:
    """One attention; `heads` is batch x kv heads. Sizes may be symbolic, unless the mask is one of blocks."""

    target: Target
    tile: Tile
    mask: str
    group: int
    q_len: Any
    kv_len: Any
    heads: Any
    blocks: Blocks | None = None

    @property
    def static(self) -> bool:
        return all(sympy.sympify(size).is_number for size in (self.q_len, self.kv_len, self.heads))


@dataclass(frozen=True)
class Schedule:
    """`table` is int32 [table_ints]; `workers` CTAs are launched, `cooperative` if they must be resident together.

    `straddling` if heads may straddle rounds; the workers then write their rows themselves, into `row_ints` of int32.
    `visited` is int32 [n_q], 0 for a Q tile that no KV tile sees: its part of dq is never written. None if there is none.
    """

    table: Any
    table_ints: Any
    workers: Any
    cooperative: bool
    straddling: bool = False
    row_ints: Any = 0
    visited: Any = None
    report: dict[str, Any] = field(default_factory=dict)


def schedule_of(problem: Problem, query: Any) -> Schedule:
    """The schedule of a problem on the device of `query`."""
    return _static(problem, query.get_device()) if problem.static else _dynamic(problem, query)


def _static(problem: Problem, device: torch.device) -> Schedule:
    shape = shape_of(
        problem.tile,
        q_len=int(problem.q_len),
        kv_len=int(problem.kv_len),
        heads=int(problem.heads),
        group=problem.group,
        mask=problem.mask,
    )
    plan, time_ns = plan_for(problem.target, problem.tile, shape, problem.blocks)
    ints = pack_plan(plan)
    return Schedule(
        table=_constant(ints, device),
        table_ints=len(ints),
        workers=plan.workers,
        cooperative=not chained(),
        visited=_visited(problem.blocks, device),
        straddling=isinstance(plan, Straddling),
        row_ints=row_ints(plan),
        report={
            "family": plan.family,
            "roles": plan.roles,
            "heads_in_flight": plan.heads_in_flight,
            "stride": getattr(plan.schedule, "stride", None),
            "launch": current().launch,
            "predicted_us": None if time_ns is None else time_ns / 1000,
        },
    )


def _visited(blocks: Blocks | None, device: torch.device) -> Any:
    seen = [int(any(column)) for column in zip(*blocks or (), strict=True)]
    return None if all(seen) else _constant(seen, device)


def _constant(ints: list[int], device: torch.device) -> Any:
    """A table as a constant of the graph, shared by all attentions that have the same one."""
    tables = V.graph.__dict__.setdefault("dash_tables", {})
    name = f"dash_table_{hashlib.sha256(repr(ints).encode()).hexdigest()[:16]}"
    if name not in tables:
        # Code for a GPU that is not there gets a tensor that is not there either.
        absent = device.type == "cuda" and not torch.cuda.is_available()
        with V.fake_mode if absent else contextlib.nullcontext():
            tensor = torch.tensor(ints, dtype=torch.int32, device=device)
            tables[name] = V.graph.add_tensor_constant(tensor, name)
        # Inductor binds the constants of the root graph alone.
        root_graph().constants[tables[name].get_name()] = tensor
    return tables[name]


def _dynamic(problem: Problem, query: Any) -> Schedule:
    if TABLE in (current().schedule, problem.mask):  # the pass has declined this; only who calls the op gets here
        raise ValueError("a table takes static shapes only: compile with dynamic=False")
    q_len, kv_len, heads = (sympy.sympify(size) for size in (problem.q_len, problem.kv_len, problem.heads))
    tile, costs = problem.tile, costs_of(problem.target, problem.tile)
    n_q, n_kv = CeilDiv(q_len, tile.block_m), CeilDiv(kv_len, tile.block_n)
    if chained():
        decision = sympy.Integer(encode(chained_family(problem.mask), 0, 0, 0, False))
        workers = n_kv * heads
    else:
        how = {
            "group": problem.group,
            "head_dim": tile.block_d,
            "block_m": tile.block_m,
            "block_n": tile.block_n,
            "mask": problem.mask,
            "costs": costs,
            "guarantee": current().guarantee,
            "family": current().schedule,
        }
        word = _decision((q_len, kv_len, heads), square=q_len == kv_len, **how)
        decision = Mod(word, 2**STRIDE_SHIFT)  # what fits an int32
        workers = costs.workers  # one launch serves all sizes; who gets no role ends at once
    straddling = not chained() and may_straddle(current().guarantee, current().schedule)
    table_ints = most_ints(n_q, n_kv)
    table = kernels.call(
        kernels.SCHEDULE_TABLE,
        grid=CeilDiv(table_ints, TABLE_BLOCK),
        scalars=(decision, q_len, kv_len, heads),
        inputs=[query],
        output=FixedLayout(query.get_device(), torch.int32, [table_ints], [1]),
        num_warps=4,
        constants={
            "BLOCK": TABLE_BLOCK,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "CAUSAL": problem.mask != "full",
            "CHAINED": chained(),
            **{name.upper(): code for code, name in enumerate(CODES)},
        },
    )
    return Schedule(
        table=table,
        table_ints=table_ints,
        workers=workers,
        cooperative=not chained(),
        straddling=straddling,
        row_ints=workers * n_q if straddling else 0,
        report={"family": "by size", "launch": current().launch},
    )


def _decision(sizes: tuple[sympy.Expr, ...], **how: Any) -> sympy.Expr:
    """A call of the function that decides for `sizes`; its source goes into the generated module.

    Written out in one line, as Inductor prints expressions, the decision would compute common subexpressions again and again.
    """
    source = decision_source("decision", **how)
    name = f"dash_decision_{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    add_to_header(root_graph(), source.replace("decision", name, 1))
    scope: dict[str, Any] = {}
    exec(source, scope)

    def evaluate(cls: type, *values: sympy.Expr) -> sympy.Integer | None:
        """The value for sizes that are known, which Inductor asks for as a hint."""
        return sympy.Integer(scope["decision"](*map(int, values))) if all(value.is_Integer for value in values) else None

    return type(name, (sympy.Function,), {"eval": classmethod(evaluate), "is_integer": True, "is_nonnegative": True})(*sizes)
