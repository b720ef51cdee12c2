"""A plan for any mask: what `schedule="searched"` asks for, and what a mask of blocks gets.

No formula stands behind it. Everything here is a pure function of sizes, blocks and costs.
"""

from __future__ import annotations

from functools import lru_cache

from .bounds import lower_bound
from .candidates import CandidateBuilder
from .choice import SIMULATED_STEPS
from .costs import Costs
from .families import MONOTONE, SEARCHED
from .geometry import check_count
from .placement import GroupedPlan, make_order
from .simulator import simulate
from .tiled_problem import TiledProblem


@lru_cache(maxsize=16)  # the attentions of a model are often alike, and a large table takes seconds
def searched_plan(problem: TiledProblem, costs: Costs, family: str = SEARCHED) -> tuple[GroupedPlan, int | None]:
    """(The order placed, its simulated time in ns or None where it is too large for that).

    family: searched, ascending or descending, which serve every mask. ValueError for sizes, or a family, that cannot be.

    Three heads of four KV tiles on six workers, causal: two roles to a head, with a long chain and a short one, or two of
    middle length; all do ten steps.

    >>> from dash_inductor.devices.cost_files import load_costs
    >>> costs = load_costs("emulated", block_m=16, block_n=32, head_dim=64)
    >>> plan, time_ns = searched_plan(TiledProblem(128, 128, 3, 1, 64, 16, 32, "causal"), costs)
    >>> plan.order.slots, plan.heads_in_flight, time_ns // costs.shifted_step_ns
    (((0, 1), (3, 2)), 3, 10)
    """
    if family not in (*MONOTONE, SEARCHED):
        raise ValueError(f"family {family!r} does not serve every mask: use ascending, descending or searched")
    check_count("kv_heads_total", problem.kv_heads_total)
    step_ns = costs.step_ns if family in MONOTONE else costs.shifted_step_ns
    heads_in_flight, roles = _heads_and_roles(problem, costs, problem.group * step_ns)
    order = make_order(family, problem.geometry, roles, step_ns=problem.group * step_ns, hop_ns=costs.hop_ns)
    plan = GroupedPlan(order, problem.kv_heads_total, heads_in_flight, problem.group)
    if plan.steps > SIMULATED_STEPS:
        return plan, None
    return plan, simulate(plan, compute_ns=step_ns, reduce_ns=0, sync_ns=costs.hop_ns).makespan_ns


def _heads_and_roles(problem: TiledProblem, costs: Costs, step_ns: int) -> tuple[int, int]:
    """Heads in flight, and roles of each: the least rounds times the lower bound of a head, then the fewest of either.

    No more heads than L2 holds are in flight, unless workers would idle.
    """
    geometry, heads = problem.geometry, problem.kv_heads_total
    most = min(heads, CandidateBuilder(problem, costs).max_heads_spread)

    def key(roles: int) -> tuple[int, int, int]:
        rounds = -(-heads // min(most, costs.workers // roles))
        time_ns = rounds * lower_bound(geometry, heads=1, workers=roles, step_ns=step_ns, hop_ns=costs.hop_ns)
        return time_ns, -(-heads // rounds), roles

    return min(map(key, range(1, min(geometry.n_kv, costs.workers) + 1)))[1:]
