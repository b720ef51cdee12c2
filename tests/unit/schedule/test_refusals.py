"""What schedules cannot be made of: each error names the parameter, and what it may be."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from benchmarks.schedules.bounds import lower_bound
from benchmarks.schedules.simulator import simulate
from dash_inductor.devices.cost_files import load_costs
from dash_inductor.schedule import FAMILIES, Ascending, Geometry, GroupedPlan, RoundRobinPlan, Shift, TiledProblem, make_order, pack
from dash_inductor.schedule.choice import choose
from dash_inductor.schedule.formulas.chained import monotone_makespan

CAUSAL, WINDOW = Geometry(6, 6, 1, 2, "causal"), Geometry(6, 6, 1, 2, "causal", window=2)
FULL, BLOCKS = Geometry(6, 6, 1, 2, "full"), Geometry.of_blocks([[True, False], [True, True]])
ROW = (True,) * 6
EMULATED = load_costs("emulated", block_m=16, block_n=32, head_dim=64)


def chosen(guarantee: str = "run", family: str = "auto", **change: Any) -> object:
    sizes = {"q_len": 128, "kv_len": 128, "kv_heads_total": 4, "mask": "causal"} | change
    return choose(TiledProblem(**sizes, group=1, head_dim=64, block_m=16, block_n=32), EMULATED, guarantee, family)


def simulated(**change: Any) -> object:
    return simulate(GroupedPlan(Ascending(FULL, 3), 1, 1), **({"compute_ns": 1, "reduce_ns": 1, "sync_ns": 1} | change))


def recursion(order: Any, **change: Any) -> object:
    return monotone_makespan(GroupedPlan(order, 1, 1), **({"step_ns": 1, "hop_ns": 1} | change))


def geometry(**change: Any) -> Geometry:
    return Geometry(**({"q_len": 6, "kv_len": 6, "block_m": 1, "block_n": 2, "mask": "causal"} | change))


bound = partial(lower_bound, Geometry(4, 4, 1, 1, "full"))
ones = {"heads": 1, "workers": 1, "step_ns": 1, "hop_ns": 1}
plan = partial(GroupedPlan, Ascending(FULL, 3))

REFUSED: list[tuple[Callable[[], object], str]] = [
    *(
        (partial(geometry, **{name: value}), f"{name} must be a positive int, got {value!r}")
        for name in ("q_len", "kv_len", "block_m", "block_n")
        for value in (0, -1, 1.5, True)
    ),
    (lambda: geometry(mask="window"), "mask must be one of full, causal, got 'window'"),
    (lambda: geometry(window=-1), "window must be an int of at least 0, got -1"),
    (lambda: geometry(window=2, mask="full"), "window needs a causal mask, got mask='full'"),
    (lambda: geometry(blocks=(ROW,) * 3), "blocks go with mask='blocks' and with no other, got mask='causal'"),
    (lambda: geometry(mask="blocks"), "blocks go with mask='blocks' and with no other, got mask='blocks'"),
    (lambda: geometry(mask="blocks", blocks=(ROW,) * 2), "blocks must be [3][6] (KV tiles x Q tiles)"),
    (lambda: geometry(mask="blocks", blocks=(ROW, ROW[1:], ())), "blocks must be [3][6] (KV tiles x Q tiles)"),
    (lambda: geometry(mask="blocks", blocks=((False,) * 6,) * 3), "blocks must allow at least one tile"),
    *((partial(Geometry.of_blocks, none), "blocks must hold at least one KV tile and one Q tile") for none in ([], [[]], ((), ()))),
    # Orders
    (lambda: make_order("ascending", FULL, 0), "roles must be in 1..3 (one per KV tile at most), got 0"),
    (lambda: make_order("ascending", FULL, 1.0), "roles must be in 1..3 (one per KV tile at most), got 1.0"),
    (lambda: make_order("descending", CAUSAL, 4), "roles must be in 1..3 (one per KV tile at most), got 4"),
    (lambda: make_order("symmetric", CAUSAL, 3), "roles must be in 1..2 (one per pair of KV tiles at most), got 3"),
    (lambda: make_order("symmetric", FULL, 1), "family symmetric needs a causal mask, got mask='full': use shift"),
    (lambda: make_order("symmetric", WINDOW, 1), "got mask='causal' with window=2: use descending"),
    (lambda: make_order("symmetric", BLOCKS, 1), "needs a causal mask, got mask='blocks': use descending"),
    (lambda: make_order("shift", CAUSAL, 1), "needs mask='full', got 'causal': use symmetric or descending"),
    (lambda: make_order("shift", BLOCKS, 1), "family shift needs mask='full', got 'blocks'"),
    (lambda: make_order("shift", Geometry(2, 6, 1, 2, "full"), 3), "must be in 1..2 (one per Q tile at most for shift), got 3"),
    (lambda: make_order("shift", FULL, 3, stride=3), "stride must be in 1..2 (n_q // roles), got 3"),
    (lambda: make_order("shift", FULL, 3, stride=0), "stride must be a positive int, got 0"),
    (lambda: make_order("ascending", FULL, 1, stride=2), "stride is for shift, not for ascending"),
    (lambda: make_order("shift", FULL, 1, mirrored=True), "mirrored is for ascending and descending, not for shift"),
    (lambda: make_order("zigzag", FULL, 1), f"must be one of {', '.join(FAMILIES)}, got 'zigzag'"),
    # Plans and tables
    (lambda: plan(0, 1), "heads must be a positive int, got 0"),
    (lambda: plan(2, 3), "heads_in_flight must be in 1..2 (heads), got 3"),
    (lambda: plan(2, 1, 0), "group must be a positive int, got 0"),
    (lambda: RoundRobinPlan(Shift(FULL, 2), 2, 4), "roles must be 3 (all units of a head, or workers), got 2"),
    (lambda: pack(Ascending(Geometry(1, 32768, 1, 1, "full"), 1), 1), "32768 makes 32768 KV tiles of block_n 1; at most 32767"),
    (lambda: pack(Ascending(Geometry(65536, 1, 1, 1, "full"), 1), 1), "65536 makes 65536 Q tiles of block_m 1; at most 65534"),
    # Times
    (lambda: bound(**ones | {"heads": 0}), "heads must be a positive int, got 0"),
    (lambda: bound(**ones | {"workers": -1}), "workers must be a positive int, got -1"),
    (lambda: bound(**ones | {"step_ns": 1.5}), "step_ns must be an int of at least 0, got 1.5"),
    (lambda: bound(**ones | {"hop_ns": -1}), "hop_ns must be an int of at least 0, got -1"),
    (lambda: simulated(compute_ns=1.5), "compute_ns must be an int of at least 0, got 1.5"),
    (lambda: simulated(reduce_ns=-1), "reduce_ns must be an int of at least 0, got -1"),
    (lambda: simulated(sync_ns=True), "sync_ns must be an int of at least 0, got True"),
    (lambda: simulated(sync_ns=[1] * 17), "sync_ns must be an int or one per step, 18 of them, got 17"),
    (lambda: simulated(sync_ns=[1] * 17 + [0.5]), "sync_ns must be nonnegative ints, got 0.5"),
    (lambda: simulated(compute_ns=[1] * 17 + [-2]), "compute_ns must be nonnegative ints, got -2"),
    (lambda: simulated(resident=0), "resident must be a positive int, got 0"),
    (lambda: recursion(Ascending(BLOCKS, 1)), "no recursion for family 'ascending' with mask='blocks'"),
    (lambda: recursion(Shift(FULL, 3)), "no recursion for family 'shift' with mask='full', window=None"),
    (lambda: recursion(make_order("descending", WINDOW, 1)), "no recursion for family 'descending' with mask='causal', window=2"),
    (lambda: recursion(Ascending(FULL, 2), resident=2), "resident needs a plan with a worker per chain"),
    (lambda: recursion(Ascending(FULL, 3), resident=0), "resident must be a positive int, got 0"),
    # Choices
    (lambda: chosen(mask="full", family="symmetric"), "family 'symmetric' serves causal masks only"),
    (lambda: chosen(family="shift"), "family 'shift' serves the full mask only"),
    (lambda: chosen("batch", "symmetric"), "guarantee 'batch' needs ascending or descending"),
    (lambda: chosen(kv_heads_total=0), "kv_heads_total must be a positive int, got 0"),
    (lambda: chosen(q_len=0), "q_len must be a positive int, got 0"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refusals(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
