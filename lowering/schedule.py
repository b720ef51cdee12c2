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
from torch.utils._sympy.functions import CeilDiv, FloorDiv, Mod

from dash_inductor.config import current
from dash_inductor.schedule import TABLE, TWO_PASS, Blocks, Straddling, decision_source, may_straddle, pack_plan
from dash_inductor.schedule.table import most_ints, row_ints
from dash_inductor.schedule.word import CODES, FAMILY_BITS, STRIDE_SHIFT, encode
from dash_inductor.target import Resolved, Tile, chained, chained_family, costs_of
from dash_inductor.template_choice import BY_SIZE

from . import kernels
from .problem import Problem
from .report import add_to_header, root_graph

TABLE_BLOCK = 1024  # table entries written by one program


@dataclass(frozen=True)
class Schedule:
    """`table` is int32 [table_ints]; `workers` CTAs are launched, `cooperative` if they must be resident together.

    `straddling` if heads may straddle rounds; the workers then write their rows themselves, into `row_ints` of int32.
    `visited` is int32 [n_q], 0 for a Q tile that no KV tile sees: its part of dq is never written. None if there is none.
    `in_two_passes` is 1 for sizes that take two passes instead, else 0; then no worker is launched, and the table means nothing.
    """

    table: Any
    table_ints: Any
    workers: Any
    cooperative: bool
    straddling: bool = False
    row_ints: Any = 0
    visited: Any = None
    in_two_passes: Any = 0
    report: dict[str, Any] = field(default_factory=dict)


def static_schedule(resolved: Resolved, blocks: Blocks | None, device: torch.device) -> Schedule:
    """The schedule of one pass for sizes that are known."""
    plan = resolved.plan
    ints = pack_plan(plan)
    return Schedule(
        table=_constant(ints, device),
        table_ints=len(ints),
        workers=plan.workers,
        cooperative=not chained(),
        visited=_visited(blocks, device),
        straddling=isinstance(plan, Straddling),
        row_ints=row_ints(plan),
        report={
            "family": plan.family,
            "roles": plan.roles,
            "heads_in_flight": plan.heads_in_flight,
            "stride": getattr(plan.schedule, "stride", None),
            "launch": current().launch,
            "predicted_us": None if resolved.time_ns is None else resolved.time_ns / 1000,
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


def dynamic_schedule(problem: Problem, query: Any) -> Schedule:
    """The schedule of one pass for sizes known at run time, on the device of `query`."""
    if TABLE in (current().schedule, problem.mask):  # the pass has declined this; only who calls the op gets here
        raise ValueError("a table takes static shapes only: compile with dynamic=False")
    q_len, kv_len, heads = (sympy.sympify(size) for size in (problem.q_len, problem.kv_len, problem.heads))
    tile, costs = problem.tiles.one_pass, costs_of(problem.target, problem.tiles)
    assert tile
    n_q, n_kv = CeilDiv(q_len, tile.block_m), CeilDiv(kv_len, tile.block_n)
    word = _word(problem, tile, (q_len, kv_len, heads))
    in_two_passes = FloorDiv(Mod(word, 2**FAMILY_BITS), CODES.index(TWO_PASS)) if problem.tiles.two_pass else 0
    # One grouped launch serves all sizes: who gets no role ends at once.
    workers = (n_kv * heads if chained() else costs.workers) * (1 - in_two_passes)
    straddling = not chained() and may_straddle(current().guarantee, current().schedule)
    table_ints = most_ints(n_q, n_kv)
    table = kernels.call(
        kernels.SCHEDULE_TABLE,
        grid=CeilDiv(table_ints, TABLE_BLOCK) * (1 - in_two_passes),
        scalars=(Mod(word, 2**STRIDE_SHIFT), q_len, kv_len, heads),  # of the word what fits an int32
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
        row_ints=costs.workers * n_q if straddling else 0,
        in_two_passes=in_two_passes,
        report={"family": BY_SIZE, "launch": current().launch},
    )


def _word(problem: Problem, tile: Tile, sizes: tuple[sympy.Expr, ...]) -> sympy.Expr:
    """The word of the decision: a call of a function of the sizes, whose source goes into the generated module.

    Written out in one line, as Inductor prints expressions, the decision would compute common subexpressions again and again.
    """
    how = problem.group, tile.block_d, tile.block_m, tile.block_n, problem.mask
    costs = costs_of(problem.target, problem.tiles)
    if chained():
        family = chained_family(problem.mask)
        if costs.two_pass is None:
            return sympy.Integer(encode(family, 0, 0, 0, False))
        imported = "from dash_inductor.schedule import Costs, Shape, TwoPass, chained_word"
        shape = f"Shape(q_len, kv_len, heads, {', '.join(map(repr, how))})"
        source = f"{imported}\n\ndef decision(q_len, kv_len, heads):\n    return chained_word({shape}, {costs!r}, {family!r})\n"
    else:
        names = ("group", "head_dim", "block_m", "block_n", "mask")
        source = decision_source(
            "decision",
            square=sizes[0] == sizes[1],
            costs=costs,
            guarantee=current().guarantee,
            family=current().schedule,
            **dict(zip(names, how, strict=True)),
        )
    name = f"dash_decision_{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    # A launch evaluates it in several places.
    cached = source.replace("def decision", f"@functools.lru_cache(256)\ndef {name}")
    add_to_header(root_graph(), f"import functools\n\n{cached}")
    scope: dict[str, Any] = {}
    exec(source, scope)

    def evaluate(cls: type, *values: sympy.Expr) -> sympy.Integer | None:
        """The value for sizes that are known, which Inductor asks for as a hint."""
        return sympy.Integer(scope["decision"](*map(int, values))) if all(value.is_Integer for value in values) else None

    return type(name, (sympy.Function,), {"eval": classmethod(evaluate), "is_integer": True, "is_nonnegative": True})(*sizes)
