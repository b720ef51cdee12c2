"""The choice of a schedule: the first minimum of weighted times, a pure function of sizes and costs."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from .candidates import Candidate, candidates, two_pass_ns
from .costs import Costs, TwoPass
from .families import TWO_PASS
from .formulas.chained import chained_plan, chained_time
from .geometry import Geometry, check_count
from .orders.monotone import Ascending
from .packing import FAMILY_CODES
from .placement import GroupedPlan, Plan, place_heads
from .tiled_problem import TiledProblem

MOST_SIZES = 4096  # that a choice at run time remembers


@dataclass(frozen=True)
class ScheduleChoice:
    """What was chosen for a problem under the costs of a device, and among what, in order."""

    problem: TiledProblem
    costs: Costs
    candidate: Candidate
    considered: tuple[Candidate, ...] = field(repr=False)

    @property
    def family(self) -> str:
        """A family's name, or "two_pass"."""
        return self.candidate.family

    @property
    def time_ns(self) -> int | None:
        """The time by the formula; None where there is none."""
        return self.candidate.ns

    def plan(self) -> Plan:
        """The order placed for all heads; of two passes the order of their sums."""
        if self.family == TWO_PASS:
            assert self.costs.two_pass
            return two_pass_plan(self.problem, self.costs.two_pass)
        return place_heads(
            self.family,
            self.problem.geometry,
            self.candidate.roles,
            stride=self.candidate.stride or None,
            mirrored=self.candidate.mirrored,
            heads=self.problem.kv_heads_total,
            heads_in_flight=self.candidate.heads_in_flight,
            group=self.problem.group,
        )


def choose(problem: TiledProblem, costs: Costs, guarantee: str = "run", family: str = "auto") -> ScheduleChoice:
    """Decide; `family` forces one. ValueError for sizes, or a family, that cannot be.

    The least weighted time, ties by position, candidates without a time last: the default where no formula applies.

    >>> from dash_inductor.devices.cost_files import load_costs
    >>> costs = load_costs("h100", block_m=64, block_n=128, head_dim=64)
    >>> chosen = choose(TiledProblem(8192, 8192, 32, 1, 64, 64, 128, "causal"), costs).candidate
    >>> chosen.family, chosen.roles, chosen.heads_in_flight
    ('descending', 4, 32)
    """
    for name in ("kv_heads_total", "group", "head_dim"):
        check_count(name, getattr(problem, name))
    considered = candidates(problem, costs, guarantee, family)
    timed = [(candidate.ns * weight(candidate, costs), candidate) for candidate in considered if candidate.ns is not None]
    best = min(timed, key=lambda pair: pair[0])[1] if timed else considered[0]
    return ScheduleChoice(problem, costs, best, considered)


def weight(candidate: Candidate, costs: Costs) -> int:
    """What a time counts, in percent: another candidate than the default must be faster by a margin."""
    if candidate.is_default:
        return 100
    return 100 + (costs.two_pass.margin_percent if candidate.family == TWO_PASS and costs.two_pass else costs.margin_percent)


@lru_cache(1024)
def choose_chained(problem: TiledProblem, costs: Costs, family: str) -> str:
    """What a chained launch takes: `family`, or "two_pass" where `costs` have it and it is faster by the margin."""
    two = two_pass_ns(problem, costs.two_pass) if costs.two_pass else None
    if two is None or costs.two_pass is None:
        return family
    slower = two * (100 + costs.two_pass.margin_percent) >= chained_time(problem, costs, family) * 100
    return family if slower else TWO_PASS


def two_pass_plan(problem: TiledProblem, two: TwoPass) -> GroupedPlan:
    """Two passes as a schedule: every sum in ascending order of the tiles they take, and nobody waits."""
    geometry = Geometry(problem.q_len, problem.kv_len, two.block_m, two.block_n, problem.mask)
    return GroupedPlan(Ascending(geometry, roles=1), problem.kv_heads_total, problem.kv_heads_total, problem.group)


@dataclass(frozen=True)
class RunTimeChoice:
    """The choice for sizes known at run time only, which generated code calls with an index of FIELDS and the sizes."""

    mask: str
    group: int
    head_dim: int
    block_m: int
    block_n: int
    costs: Costs
    guarantee: str
    family: str
    chained: bool

    FIELDS = ("family", "roles", "heads_in_flight", "mirrored", "is_two_pass")

    def __call__(self, index: int, q_len: int, kv_len: int, kv_heads_total: int) -> int:
        """FIELDS[index] of the choice; the family by its place in FAMILY_CODES."""
        sizes = q_len, kv_len, kv_heads_total
        if sizes not in self.chosen:  # a launch asks for several fields of the same sizes
            if len(self.chosen) >= MOST_SIZES:
                self.chosen.clear()
            self.chosen[sizes] = self._choose(*sizes)
        return self.chosen[sizes][index]

    @cached_property
    def chosen(self) -> dict[tuple[int, int, int], tuple[int, ...]]:
        """By sizes, the fields of what was chosen since MOST_SIZES were forgotten."""
        return {}

    def _choose(self, q_len: int, kv_len: int, kv_heads_total: int) -> tuple[int, ...]:
        tile = self.head_dim, self.block_m, self.block_n
        problem = TiledProblem(q_len, kv_len, kv_heads_total, self.group, *tile, self.mask)
        if self.chained:
            family = choose_chained(problem, self.costs, self.family)
            plan = chained_plan(problem.geometry, self.family, kv_heads_total, self.group)
            return FAMILY_CODES.index(family), plan.roles, plan.heads_in_flight, 0, int(family == TWO_PASS)
        best = choose(problem, self.costs, self.guarantee, self.family).candidate
        return FAMILY_CODES.index(best.family), best.roles, best.heads_in_flight, int(best.mirrored), int(best.family == TWO_PASS)
