"""Orders that are searched for, placed for all heads."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dash_inductor.devices.cost_files import load_costs
from dash_inductor.schedule import Costs, Geometry, TiledProblem, edge_coloured, lower_bound, simulate
from dash_inductor.schedule.choice import SIMULATED_STEPS
from dash_inductor.schedule.searched import searched_plan

from .masks import masks
from .strategies import block_masks, check, geometries

COSTS = load_costs("emulated", block_m=16, block_n=32, head_dim=64)
STEP, HOP = COSTS.shifted_step_ns, COSTS.hop_ns


def shape_of(g: Geometry, heads: int, group: int = 1) -> TiledProblem:
    return TiledProblem(g.q_len, g.kv_len, heads, group, 64, g.block_m, g.block_n, g.mask, g.blocks)


def causal(n: int, heads: int) -> TiledProblem:
    return TiledProblem(32 * n, 32 * n, heads, 1, 64, 16, 32, "causal")


def full(n_q: int, n_kv: int, heads: int, group: int = 1) -> TiledProblem:
    return TiledProblem(16 * n_q, 32 * n_kv, heads, group, 64, 16, 32, "full")


@given(
    block_masks() | geometries(window=False),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 12),
    st.sampled_from(["searched", "ascending", "descending"]),
)
def test_any_mask_gets_a_plan_that_runs_in_the_time_it_says(g: Geometry, heads: int, group: int, workers: int, family: str) -> None:
    plan, time_ns = searched_plan(shape_of(g, heads, group), replace(COSTS, workers=workers), family)
    check(plan, resident=plan.workers)
    assert plan.order.name == family and plan.order.geometry == g
    assert (plan.heads, plan.group) == (heads, group) and plan.workers <= workers
    step_ns = STEP if family == "searched" else COSTS.step_ns
    assert time_ns == simulate(plan, compute_ns=step_ns, reduce_ns=0, sync_ns=HOP).makespan_ns


@pytest.mark.parametrize(
    ("shape", "workers", "roles", "heads_in_flight"),
    [
        (full(8, 4, heads=1), 6, 4, 1),
        (full(8, 4, heads=3), 4, 4, 1),
        (full(8, 4, heads=3), 6, 2, 3),  # one round of two chains each, not three of one
        (full(8, 9, heads=1), 6, 5, 1),  # two passes of five chains and of four
        (causal(4, heads=1), 6, 3, 1),  # the two short chains together take as long as one
        (causal(4, heads=2), 6, 3, 2),
        (causal(4, heads=3), 6, 2, 3),
        (causal(40, heads=9), 6, 2, 3),
    ],
)
def test_roles_and_heads_in_flight(shape: TiledProblem, workers: int, roles: int, heads_in_flight: int) -> None:
    plan, _ = searched_plan(shape, replace(COSTS, workers=workers))
    assert (plan.order.roles, plan.heads_in_flight) == (roles, heads_in_flight)


def test_close_to_the_lower_bound_with_any_number_of_heads() -> None:
    over = {}
    for workers in (12, 50):
        for name, g in masks(12, 2).items():
            for heads in (1, 2, 3, 5, 8, 24):
                _, time_ns = searched_plan(shape_of(g, heads), replace(COSTS, workers=workers), "searched")
                assert time_ns is not None
                bound = lower_bound(g, heads=heads, workers=workers, step_ns=STEP, hop_ns=HOP)
                over[name, heads, workers] = time_ns / bound
    assert max(over.values()) <= 1.3, over
    assert sum(over.values()) / len(over) <= 1.05, over


def test_heads_in_flight_stay_within_l2() -> None:
    """66 heads of 64 chains: four CTAs each would do it in two rounds, but the tiles of 33 heads are 264 MiB."""
    costs = load_costs("h100", block_m=64, block_n=128, head_dim=128)
    shape = TiledProblem(8192, 8192, 66, 1, 128, 64, 128, "causal")
    assert searched_plan(shape, costs)[0].heads_in_flight <= 4
    assert searched_plan(shape, replace(costs, l2_bytes=2**30))[0].heads_in_flight == 33


def test_the_edge_colouring_where_it_is_faster() -> None:
    """As many chains as Q tiles, a worker for each, and a hop as long as a step."""
    shape, far = full(12, 12, heads=1), replace(COSTS, workers=12, hop_ns=STEP)
    plan, time_ns = searched_plan(shape, far)
    assert plan.order == edge_coloured(shape.geometry) and time_ns == 12 * STEP
    assert searched_plan(shape, replace(far, hop_ns=0))[0].order != edge_coloured(shape.geometry)


def test_a_step_is_that_of_the_whole_group() -> None:
    """Four query heads make it four times as long: a hop of two steps is then half a step."""
    far = replace(COSTS, workers=12, hop_ns=2 * STEP)

    def orders(group: int, costs: Costs) -> list[tuple[int, ...]]:
        schedule = searched_plan(replace(causal(8, heads=1), group=group), costs)[0].order
        return [schedule.visits(j) for j in range(8)]

    assert orders(4, far) == orders(1, replace(far, hop_ns=STEP // 2)) != orders(1, far)


def test_large_plans_are_not_simulated() -> None:
    few, many = (searched_plan(causal(12, heads), COSTS) for heads in (100, 200))
    assert few[0].steps <= SIMULATED_STEPS < many[0].steps
    assert few[1] is not None and many[1] is None
