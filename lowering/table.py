"""The schedule of one attention as the kernel reads it: a constant table, or one that a small kernel writes at run time.

A constant with a row for each chain is quadratic in the lengths. Past a size there is one row for all chains where the family is
monotone, and the small kernel writes the table of any other.
"""

from __future__ import annotations

import contextlib

import sympy
import torch
from torch._inductor.ir import FixedLayout, TensorBox
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import CeilDiv

from dash_inductor.schedule import Plan, RoundRobinPlan, pack_plan
from dash_inductor.schedule.choice import RunTimeChoice
from dash_inductor.schedule.packing import FAMILY_CODES, is_too_large, may_share_row, most_ints, pack_shared, row_ints, table_ints
from dash_inductor.templates.tiles import Template, Tile
from dash_inductor.text import digest

from . import kernels, run_time
from .header import root_graph
from .inputs import Inputs
from .walk import Walk

TABLE_BLOCK = 1024  # table entries written by one program


def from_table(inputs: Inputs, tile: Tile) -> Walk:
    """The walk by a table int32 [ints]: a constant if sizes are known, made once for all attentions of a graph that got the same.

    It is written at run time where it is too large and chains share no row.
    """
    resolution = inputs.resolution
    if not resolution.problem.is_static:
        return _chosen_at_run_time(inputs, tile)
    known = V.graph.__dict__.setdefault("dash_constant_tables", {})
    key = resolution, inputs.device
    if key not in known:
        plan, _ = resolution.schedule
        is_large = is_too_large(plan)
        if is_large and not may_share_row(plan):
            return _large_table(inputs, tile, plan)
        ints, own_ints = pack_shared(plan) if is_large else pack_plan(plan), row_ints(plan)
        known[key] = Walk(
            [_constant(ints, inputs.device)],
            workers=plan.workers,
            ints=len(ints) + resolution.row_copies * own_ints,
            record=_record(inputs) | {"order": digest(repr(ints))},
            own_ints=own_ints,
            shared_row=is_large,
            round_robin=isinstance(plan, RoundRobinPlan),
        )
    return known[key]


def _record(inputs: Inputs) -> dict[str, object]:
    resolution = inputs.resolution
    plan, time_ns = resolution.schedule
    return {
        "family": plan.family,
        "roles": plan.roles,
        "heads_in_flight": plan.heads_in_flight,
        "stride": getattr(plan.order, "stride", None),
        "launch": resolution.settings.launch,
        "predicted_us": None if time_ns is None else time_ns / 1000,
    }


def _large_table(inputs: Inputs, tile: Tile, plan: Plan) -> Walk:
    """The same ints as the constant's, written before each launch."""
    choice = FAMILY_CODES.index(plan.family), plan.roles, plan.heads_in_flight, int(plan.order.mirrored)
    ints = table_ints(plan)
    scalars = tuple(map(sympy.Integer, choice))
    record = _record(inputs) | {"order": digest(repr((choice, inputs.q_len, inputs.kv_len, tile)))}
    return Walk([_written(inputs, tile, scalars, sympy.Integer(ints))], plan.workers, ints, record)


def _constant(ints: list[int], device: torch.device) -> TensorBox:
    """A table as a constant of the graph, shared by all attentions that have the same one."""
    tables = V.graph.__dict__.setdefault("dash_tables", {})
    name = f"dash_table_{digest(repr(ints))}"
    if (name, device) not in tables:
        # Code for a GPU that is not there gets a tensor that is not there either.
        absent = device.type == "cuda" and not torch.cuda.is_available()
        with V.fake_mode if absent else contextlib.nullcontext():
            tensor = torch.tensor(ints, dtype=torch.int32, device=device)
            tables[name, device] = V.graph.add_tensor_constant(tensor, name)
        # Inductor binds the constants of the root graph alone.
        root_graph().constants[tables[name, device].get_name()] = tensor
    return tables[name, device]


def _chosen_at_run_time(inputs: Inputs, tile: Tile) -> Walk:
    resolution = inputs.resolution
    costs = resolution.costs
    assert costs
    n_q, n_kv = CeilDiv(inputs.q_len, tile.block_m), CeilDiv(inputs.kv_len, tile.block_n)
    rule = RunTimeChoice(
        mask=resolution.problem.mask,
        group=resolution.problem.group,
        head_dim=tile.mean_dim,
        block_m=tile.block_m,
        block_n=tile.block_n,
        costs=costs,
        guarantee=resolution.settings.guarantee,
        family=resolution.family,
        chained=resolution.chained,
    )
    chosen = run_time.fields(rule, "choice", inputs.q_len, inputs.kv_len, inputs.kv_heads_total)
    is_two_pass = chosen["is_two_pass"] if resolution.template == Template.BY_SIZE else 0
    # One grouped launch serves all sizes: a CTA without a role ends at once.
    workers = (n_kv * inputs.kv_heads_total if resolution.chained else costs.workers) * (1 - is_two_pass)
    table_ints = most_ints(n_q, n_kv)
    scalars = tuple(chosen[name] for name in ("family", "roles", "heads_in_flight", "mirrored"))
    own_ints = costs.workers * n_q if resolution.may_round_robin else 0
    return Walk(
        [_written(inputs, tile, scalars, table_ints, 1 - is_two_pass)],
        workers=workers,
        ints=table_ints + resolution.row_copies * own_ints,
        record={"family": Template.BY_SIZE.value, "launch": resolution.settings.launch, "order": digest(repr(rule))},
        own_ints=own_ints,
        round_robin=resolution.may_round_robin,
        is_two_pass=is_two_pass,
    )


def _written(
    inputs: Inputs, tile: Tile, choice: tuple[sympy.Expr, ...], table_ints: sympy.Expr, launches: sympy.Expr | int = 1
) -> TensorBox:
    """Ints that a kernel writes, by the first fields of a RunTimeChoice; nothing if `launches` is 0."""
    return kernels.call(
        kernels.TABLE,
        grid=CeilDiv(table_ints, TABLE_BLOCK) * launches,
        scalars=(*choice, inputs.q_len, inputs.kv_len),
        inputs=[inputs.query],
        output=FixedLayout(inputs.device, torch.int32, [table_ints], [1]),
        constants={
            "BLOCK": TABLE_BLOCK,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "CAUSAL": inputs.resolution.problem.mask != "full",
        },
    )
