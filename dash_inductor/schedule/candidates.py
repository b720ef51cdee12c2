"""What a choice is made among: families with their roles and heads in flight, in a fixed order, each with its time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

from .costs import SWEEP_CTAS, Costs, TwoPass
from .families import REGISTER, ROUND_ROBIN, TWO_PASS, default_family, tried_families, why_impossible
from .formulas import formula_for
from .formulas.formula import Formula
from .packing import MOST_CONSTANT_INTS, ROUND_ROBIN_MAX_N_Q, most_ints
from .tiled_problem import TiledProblem

MORE_ROUNDS = (0, 1, 2, 3)  # extra rounds tried beyond the minimum
MORE_PASSES = (0, 1)  # extra passes, likewise
# What a head in flight keeps in L2 per row and head-dim entry: query and grad_out in 2 bytes each, dq in 4.
BYTES_PER_ELEMENT = 8


class Candidate(NamedTuple):
    """One possible decision: A roles, G heads in flight; its time in ns is None where no formula applies.

    Of a round robin, the roles are all workers. Two passes have neither roles nor heads in flight.
    """

    family: str
    roles: int
    heads_in_flight: int
    ns: int | None
    stride: int = 0  # 0 unless the family has one
    mirrored: bool = False
    is_default: bool = False

    def row(self) -> dict[str, Any]:
        """The fields as reports show them: what it has not is None, and its time is in microseconds."""
        return {
            "family": self.family,
            "roles": self.roles or None,
            "heads_in_flight": self.heads_in_flight or None,
            "stride": self.stride or None,
            "default": self.is_default,
            "predicted_us": None if self.ns is None else self.ns / 1000,
        }


Place = tuple[str, int, int]  # family, roles, heads in flight


class CandidateBuilder:
    """The candidates of one problem under one device's costs."""

    def __init__(self, problem: TiledProblem, costs: Costs) -> None:
        self.problem, self.costs = problem, costs
        self.geometry = problem.geometry
        self.n_q, self.n_kv = self.geometry.n_q, self.geometry.n_kv
        self.heads, self.workers = problem.kv_heads_total, costs.workers
        # Blocks that do not divide each other make no triangle, whatever the lengths.
        self.has_formulas = problem.mask == "full" or problem.block_n % problem.block_m == 0

    @cached_property
    def max_heads_spread(self) -> int:
        """Heads in flight whose roles are spread over all their tiles: as many as L2 holds in four fifths of its bytes; or,
        if more, those without which workers would idle."""
        per_head = self.problem.q_len * (self.problem.head_dim * self.problem.group * BYTES_PER_ELEMENT)
        units = min(family.units(self.n_kv) for family in tried_families(self.problem.mask))
        return max(1, self.costs.l2_bytes * 4 // 5 // per_head, self.workers // units)

    @property
    def has_small_table(self) -> bool:
        """Whether a graph can hold a table with a row for each chain, which is quadratic, whatever the family."""
        return most_ints(self.n_q, self.n_kv) <= MOST_CONSTANT_INTS

    def default(self, family: str) -> Place:
        """The placement with as many roles as fit and divide the chains evenly, and as many heads in flight as then fit."""
        units = self._units(family)
        passes = _ceil_div(units, self.workers)
        if REGISTER[family].roles_at_most_q_tiles:
            passes = max(passes, _ceil_div(self.n_kv, self.n_q))
        roles = _ceil_div(units, passes)
        return family, roles, min(self.heads, self.workers // roles)

    def grouped(self, family: str) -> Iterator[Place]:
        """By rounds: all heads in the fewest rounds that L2 allows, or in some more. By passes: all chains of a head in the fewest
        passes, or in one more. The roles of a head share its chains evenly.

        Where roles are spread over a head's tiles, passes come first: of placements that take as long the one with fewer heads in
        flight keeps less in L2. Mirrored orders: by rounds alone, one role per worker; trailing chains are short.
        """
        if not REGISTER[family].is_monotone:
            yield from self._by_passes(family)
        yield from self._by_rounds(family)
        if REGISTER[family].is_monotone and not self._mirrored(family):
            yield from self._by_passes(family)

    def _by_rounds(self, family: str) -> Iterator[Place]:
        units, fewest = self._units(family), _ceil_div(self.heads, self._most_in_flight(family))
        for more in MORE_ROUNDS:
            in_flight = _ceil_div(self.heads, fewest + more)
            width = self.workers // in_flight
            even = units if width >= units else _ceil_div(units, _ceil_div(units, width))
            yield family, min(units, width) if self._mirrored(family) else even, in_flight

    def _by_passes(self, family: str) -> Iterator[Place]:
        units, most = self._units(family), self._most_in_flight(family)
        for more in MORE_PASSES:
            width = _ceil_div(units, _ceil_div(units, self.workers) + more)
            yield family, _ceil_div(units, _ceil_div(units, width)), min(most, self.workers // width)

    def _most_in_flight(self, family: str) -> int:
        if not REGISTER[family].is_monotone:
            return min(self.heads, self.workers, self.max_heads_spread)
        # Roles sweep the tiles together: L2 need not hold more than where they are, if they are a few.
        return min(self.heads, self.workers, max(self.max_heads_spread, self.workers // SWEEP_CTAS))

    def round_robin(self, family: str) -> Place:
        """The units of all heads in one queue of as many workers as there are."""
        units = self._units(family)
        workers = min(self.workers, self.heads * units)
        if units > self.n_q and REGISTER[family].roles_at_most_q_tiles:
            workers = min(workers, self.n_q)
        return family, workers, 1

    def alone(self, family: str) -> Iterator[Place]:
        """One CTA per head, where L2 holds as many heads."""
        in_flight = min(self.heads, self.workers)
        if in_flight <= self.max_heads_spread:
            yield family, 1, in_flight

    def formula(self, family: str) -> Formula | None:
        """The formula of a family, or of two passes, under this problem's mask."""
        return formula_for(family, self.problem.mask) if self.has_formulas or family == TWO_PASS else None

    def candidate(self, family: str, roles: int, in_flight: int, is_default: bool) -> Candidate:
        """A candidate with its time."""
        if family == TWO_PASS:
            assert self.costs.two_pass
            return Candidate(TWO_PASS, 0, 0, two_pass_ns(self.problem, self.costs.two_pass), is_default=is_default)
        stride = self.n_q // min(self.n_kv, roles) if REGISTER[family].has_stride else 0
        sizes = self.n_q, self.n_kv, self.geometry.ratio, self.heads, roles, in_flight
        step_ns = self._step_ns(family, roles, in_flight)
        formula = self.formula(family)
        times = self.problem.group * step_ns, self.costs.hop_ns, self.costs.chain_ns
        beside_ns = self.costs.launches.beside_ns(self.problem.elements, two_pass=False)
        time = formula(*sizes, *times, beside_ns=beside_ns) if formula else None
        if family in ROUND_ROBIN and self.n_q > ROUND_ROBIN_MAX_N_Q:
            time = None
        return Candidate(family, roles, in_flight, time.ns if time else None, stride, self._mirrored(family), is_default)

    def _step_ns(self, family: str, roles: int, in_flight: int) -> int:
        if not REGISTER[family].is_monotone:
            return self.costs.shifted_step_ns
        return self.costs.step_ns if in_flight <= self.max_heads_spread else self.costs.swept_step_ns(roles)

    def _units(self, family: str) -> int:
        """What roles take: chains, or pairs of them."""
        return REGISTER[family].units(self.n_kv)

    def _mirrored(self, family: str) -> bool:
        return self.problem.mask in REGISTER[family].mirrors_under


def candidates(problem: TiledProblem, costs: Costs, guarantee: str, family: str = "auto") -> tuple[Candidate, ...]:
    """The candidates in their fixed order, each once, the default first.

    A family that is forced has its own default first, then its own forms only. ValueError where it cannot serve the
    mask or the guarantee.
    """
    if reason := why_impossible(problem.mask, guarantee, family):
        raise ValueError(reason)
    builder = CandidateBuilder(problem, costs)
    places = dict.fromkeys(_places(builder, guarantee, family))
    return tuple(builder.candidate(*place, is_default=index == 0) for index, place in enumerate(places))


def _places(builder: CandidateBuilder, guarantee: str, family: str) -> Iterator[Place]:
    """Candidates without their times, some more than once."""
    mask = builder.problem.mask
    if family in ROUND_ROBIN:
        yield builder.round_robin(family)
        return
    own = default_family(mask) if family == "auto" else family
    yield builder.default(own)
    if formula_for(own, mask) is None:  # placements that nothing tells apart
        return
    yield from builder.grouped(own)
    if not REGISTER[own].is_monotone:
        return
    free = family == "auto" and guarantee == "run"  # bits may depend on the SM count and the heads
    tried = tried_families(mask) if free else []
    for other in tried:
        if other.queue_of is None and builder.has_small_table:
            yield from builder.grouped(other.name)
    yield from builder.alone(own)
    for other in tried:  # late, so that heads stay whole where that is as fast
        if other.queue_of is not None:
            yield builder.round_robin(other.name)
    if free and builder.costs.two_pass:
        yield TWO_PASS, 0, 0


def two_pass_ns(problem: TiledProblem, two: TwoPass) -> int | None:
    """An upper bound of the time, the CTAs of dK/dV before those of dQ in one launch; None where there is no formula.

    The problem's own tiles do not matter.
    """
    formula = formula_for(TWO_PASS, problem.mask)
    assert formula
    tile = two.block_m, two.block_n, two.kv_rows, two.q_rows, two.kv_step_ns, two.q_step_ns, two.workers, int(two.split), two.end_ns
    beside_ns = two.launches.beside_ns(problem.elements, two_pass=True)
    time = formula(problem.q_len, problem.kv_len, problem.kv_heads_total, problem.group, *tile, beside_ns=beside_ns)
    return time.ns if time else None


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
