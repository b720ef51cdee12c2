"""Random geometries, schedules and plans for the tests here."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from benchmarks.schedules.explicit import Explicit
from benchmarks.schedules.simulator import simulate
from benchmarks.schedules.steps import ScheduleError
from dash_inductor.schedule import FAMILIES, MASKS, Geometry, GroupedPlan, Order, Plan, RoundRobinPlan, Shift, Symmetric, make_order
from dash_inductor.schedule.families import REGISTER

CAUSAL = MASKS[1:]


@st.composite
def geometries(draw: st.DrawFn, masks: tuple[str, ...] = MASKS, window: bool | None = None) -> Geometry:
    """Up to 9 x 12 tiles, blocks that divide each other or not, any lengths; with a window or not, None for either."""
    block_m, block_n = draw(st.sampled_from([(1, 1), (1, 2), (2, 4), (1, 3), (3, 2), (2, 1), (2, 5)]))
    q_len, kv_len = draw(st.integers(1, 12 * block_m)), draw(st.integers(1, 9 * block_n))
    mask = draw(st.sampled_from(masks))
    if window is None:
        window = draw(st.booleans())
    rows = draw(st.integers(0, 4 * block_n)) if window and mask != "full" else None
    return Geometry(q_len, kv_len, block_m, block_n, mask, rows)


@st.composite
def triangles(draw: st.DrawFn) -> Geometry:
    """Causal geometries in which first_q_tile(j) = k * j and every chain has a step."""
    k, n = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    q_len = k * (n - 1) + draw(st.integers(1, 6))
    return Geometry(q_len, n * k, 1, k, "causal")


@st.composite
def block_masks(draw: st.DrawFn, n_kv: int = 7, n_q: int = 9) -> Geometry:
    """Any set of tiles."""
    n_kv, n_q = draw(st.integers(1, n_kv)), draw(st.integers(1, n_q))
    cells = draw(st.lists(st.booleans(), min_size=n_kv * n_q, max_size=n_kv * n_q).filter(any))
    return Geometry.of_blocks([cells[j * n_q : (j + 1) * n_q] for j in range(n_kv)])


@st.composite
def schedules(draw: st.DrawFn, family: str | None = None) -> Order:
    """Any family with any number of roles and any stride that it takes; or steps placed one by one."""
    family = family or draw(st.sampled_from((*FAMILIES, "explicit")))
    known = REGISTER.get(family)
    if known and known.masks == ("full",):
        geometry = draw(geometries(("full",)))
    elif known and known.masks == ("causal",):
        geometry = draw(triangles() | geometries(CAUSAL, window=False))
    else:
        geometry = draw(triangles() | geometries() | block_masks())
    most = known.units(geometry.n_kv) if known else geometry.n_kv
    roles = draw(st.integers(1, min(most, geometry.n_q) if known and known.roles_at_most_q_tiles else most))
    if known is None:
        return explicit(draw(st.randoms(use_true_random=False)), geometry, roles)
    stride = draw(st.none() | st.integers(1, geometry.n_q // roles)) if known.has_stride else None
    return make_order(family, geometry, roles, stride=stride, mirrored=known.is_monotone and draw(st.booleans()))


@st.composite
def plans(draw: st.DrawFn, family: str | None = None) -> GroupedPlan:
    """Any schedule for up to 5 heads."""
    heads = draw(st.integers(1, 5))
    return GroupedPlan(draw(schedules(family)), heads, draw(st.integers(1, heads)), draw(st.integers(1, 3)))


@st.composite
def round_robin(draw: st.DrawFn, family: str | None = None) -> RoundRobinPlan:
    """Any schedule in static round robin."""
    heads, workers, group = (draw(st.integers(1, most)) for most in (5, 9, 3))
    schedule = draw(schedules(family))
    if isinstance(schedule, Shift | Symmetric):  # whose roles follow from the workers
        n_kv = schedule.geometry.n_kv
        shift = isinstance(schedule, Shift)
        workers = min(workers, schedule.geometry.n_q) if shift else workers
        roles = min(n_kv if shift else -(-n_kv // 2), workers)
        schedule = make_order(schedule.name, schedule.geometry, roles)
    return RoundRobinPlan(schedule, heads, workers, group)


def explicit(rng: random.Random, g: Geometry, roles: int, disorder: int = 0) -> Explicit:
    """Any placement and any order. disorder: how far a clock may be off the step it stands at."""
    chains = rng.sample(range(g.n_kv), g.n_kv) + [-1] * (-g.n_kv % roles)
    slots = tuple(tuple(chains[s : s + roles]) for s in range(0, len(chains), roles))

    def steps(j: int) -> tuple[tuple[int, int], ...]:
        start = chains.index(j) // roles * g.n_q
        order = rng.sample(g.tiles(j), g.steps(j))
        return tuple((i, start + t + rng.randint(-disorder, disorder)) for t, i in enumerate(order))

    return Explicit(g, slots, tuple(steps(j) for j in range(g.n_kv)))


def wild(rng: random.Random) -> GroupedPlan:
    """Any placement, any order and any ranks: about half of them deadlock."""
    n_kv, n_q = rng.randint(1, 5), rng.randint(1, 6)
    share = rng.choice([0.5, 1])
    blocks = [[rng.random() < share for _ in range(n_q)] for _ in range(n_kv)]
    blocks[rng.randrange(n_kv)][rng.randrange(n_q)] = True
    schedule = explicit(rng, Geometry.of_blocks(blocks), rng.randint(1, n_kv), disorder=rng.choice([0, 1, 3, 30]))
    heads = rng.randint(1, 3)
    return GroupedPlan(schedule, heads, rng.randint(1, heads), rng.randint(1, 2))


def check(plan: Plan, resident: int | None = None) -> None:
    """Raises ScheduleError unless orders and ranks are permutations, waits are acyclic and `resident` CTAs are enough.

    A Deadlock names the cycle. Whether a plan ends does not depend on times.
    """
    if isinstance(plan, GroupedPlan):
        order = plan.order
        placed = sorted(j for row in order.slots for j in row if j >= 0)
        if placed != list(range(order.geometry.n_kv)):
            raise ScheduleError(f"{order.name}: slots hold the chains {placed}, not each one once")
    simulate(plan, compute_ns=0, reduce_ns=0, sync_ns=0, resident=resident)


def residency(plan: Plan) -> int:
    """CTAs that are resident together in a launch that always ends; Simulation.residency has the least such number.

    The roles of one head, or 1 where a chain waits for chains of earlier tickets only. Tickets are taken in order, so that the CTAs
    of one head slot come together.
    """
    order = plan.order
    alone = order.name in ("ascending", "descending") and order.passes == 1 and not order.mirrored
    return 1 if alone and isinstance(plan, GroupedPlan) else plan.roles
