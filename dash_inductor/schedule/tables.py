"""A plan for any mask: what `schedule="table"` asks for, and what a mask of blocks gets.

No closed form stands behind it. Everything here is a pure function of sizes, blocks and costs, and takes ints only.
"""

from __future__ import annotations

from functools import lru_cache

from .bounds import lower_bound
from .by_name import make
from .candidates import Shape, Sizes
from .choice import SIMULATED_STEPS
from .costs import Costs
from .families import MONO, TABLE
from .geometry import Geometry, check_count
from .plan import Plan
from .simulator import simulate
from .times import INTEGER

Blocks = tuple[tuple[bool, ...], ...]  # [KV tiles][Q tiles]


@lru_cache(maxsize=16)  # the attentions of a model are often alike, and a large table takes seconds
def table_plan(shape: Shape, costs: Costs, family: str = TABLE, blocks: Blocks | None = None) -> tuple[Plan, int | None]:
    """(The placed schedule of a shape, its simulated time in ns or None where it is too large for that).

    family: `table`, ascending or descending, which serve every mask. blocks go with shape.mask == "table". ValueError for
    sizes, or a family, that cannot be.

    Three heads of four KV tiles on six workers, causal: two roles to a head, with a long chain and a short one, or two of
    middle length; all do ten steps.

    >>> from dash_inductor.devices.cost_files import load_costs
    >>> costs = load_costs("emulated", block_m=16, block_n=32, head_dim=64)
    >>> plan, time_ns = table_plan(Shape(128, 128, 3, 1, 64, 16, 32, "causal_top_left"), costs)
    >>> plan.schedule.slots, plan.heads_in_flight, time_ns // costs.shifted_step_ns
    (((0, 1), (3, 2)), 3, 10)
    """
    if family not in (*MONO, TABLE):
        raise ValueError(f"family {family!r} does not serve every mask: use ascending, descending or table")
    check_count("heads", shape.heads)
    geometry = geometry_of(shape, blocks)
    step_ns = costs.step_ns if family in MONO else costs.shifted_step_ns
    heads_in_flight, roles = _place(shape, geometry, costs, shape.group * step_ns)
    schedule = make(family, geometry, roles, step_ns=shape.group * step_ns, hop_ns=costs.hop_ns)
    plan = Plan(schedule, shape.heads, heads_in_flight, shape.group)
    if plan.steps > SIMULATED_STEPS:
        return plan, None
    return plan, simulate(plan, compute_ns=step_ns, reduce_ns=0, sync_ns=costs.hop_ns).makespan_ns


def geometry_of(shape: Shape, blocks: Blocks | None) -> Geometry:
    """The grid of one head, under a mask of blocks too; ValueError for sizes or blocks that do not fit."""
    return Geometry(shape.q_len, shape.kv_len, shape.block_m, shape.block_n, shape.mask, blocks=blocks)


def _place(shape: Shape, geometry: Geometry, costs: Costs, step_ns: int) -> tuple[int, int]:
    """(Heads in flight, roles): the least rounds times the lower bound of a head, then the fewest of either.

    No more heads than L2 holds are in flight, unless workers would idle.
    """
    most = min(shape.heads, Sizes(shape, costs, INTEGER).most_spread)

    def key(roles: int) -> tuple[int, int, int]:
        rounds = -(-shape.heads // min(most, costs.workers // roles))
        time_ns = rounds * lower_bound(geometry, heads=1, workers=roles, step_ns=step_ns, hop_ns=costs.hop_ns)
        return time_ns, -(-shape.heads // rounds), roles

    return min(map(key, range(1, min(geometry.n_kv, costs.workers) + 1)))[1:]
