"""What a choice is made among: (family, roles, heads in flight) in a fixed order, each with its closed form.

Everything here works on ints and on symbolic sizes alike (times.Arithmetic).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from . import times
from .costs import Costs, TwoPass
from .families import FAMILIES, MONO, ROUND_ROBIN, TWO_PASS
from .geometry import MASKS, Geometry
from .table import STRADDLING_N_Q
from .times import Arithmetic, Integer, Time

GUARANTEES = ("run", "device", "batch")
MORE_ROUNDS = (0, 1, 2, 3)  # than the fewest
MORE_PASSES = (0, 1)
# So many roles that sweep together read their tiles from L2 but for one of them: memory keeps pace, whatever L2 holds.
SHARING = 4
# What a head in flight keeps in L2 per row and head-dim entry: q and grad_out in 2 bytes each, dq in 4.
BYTES_PER_ELEMENT = 8
UNKNOWN = Time(0, 1)  # no closed form


@dataclass(frozen=True)
class Shape:
    """What is asked: lengths in rows, heads = batch * kv heads, group = query heads per kv head, head_dim as padded."""

    q_len: Integer
    kv_len: Integer
    heads: Integer
    group: int
    head_dim: int
    block_m: int
    block_n: int
    mask: str

    @property
    def geometry(self) -> Geometry:
        """The grid of one head; ValueError for sizes that are no positive ints."""
        return Geometry(self.q_len, self.kv_len, self.block_m, self.block_n, self.mask)


@dataclass(frozen=True)
class Candidate:
    """One possible decision; time.penalty > 0 where it does not apply or has no closed form."""

    family: str
    roles: Integer
    heads_in_flight: Integer
    stride: Integer
    boustrophedon: bool
    time: Time
    is_default: bool = False


@dataclass(frozen=True)
class Sizes:
    """Sizes derived from a shape in some arithmetic, and the candidates they allow."""

    shape: Shape
    costs: Costs
    ar: Arithmetic

    @cached_property
    def n_q(self) -> Integer:
        return self.ar.ceil_div(self.shape.q_len, self.shape.block_m)

    @cached_property
    def n_kv(self) -> Integer:
        return self.ar.ceil_div(self.shape.kv_len, self.shape.block_n)

    @property
    def k(self) -> int:
        return max(1, self.shape.block_n // self.shape.block_m)

    @property
    def tau(self) -> int:
        return self.shape.group * self.costs.step_ns

    @property
    def shifted_tau(self) -> int:
        return self.shape.group * self.costs.shifted_step_ns

    @cached_property
    def most_spread(self) -> Integer:
        """Heads in flight whose roles are spread over all their tiles: as many as L2 holds in four fifths of its bytes; or,
        if more, those without which workers would idle."""
        per_head = self.shape.q_len * (self.shape.head_dim * self.shape.group * BYTES_PER_ELEMENT)
        fit = self.ar.floor_div(self.costs.l2_bytes * 4 // 5, per_head)
        units = self._units("ascending" if self.shape.mask == "full" else "symmetric")
        return self.ar.max(1, fit, self.ar.floor_div(self.costs.workers, units))

    @cached_property
    def most_swept(self) -> Integer:
        """Heads in flight whose roles sweep the tiles together: L2 need not hold more than where they are, if they are a few."""
        return self.ar.max(self.most_spread, self.costs.workers // SHARING)

    @cached_property
    def triangle_penalty(self) -> Integer:
        """0 where lo(j) = k * j and every chain has a step, as in Geometry.is_triangle."""
        s = self.shape
        if s.mask == "full":
            return 0
        if s.block_n % s.block_m:
            return 1
        if s.mask == "causal_top_left" and s.q_len != s.kv_len:
            return times.triangle_penalty(self.n_q, self.n_kv, self.k, self.ar)
        return _unequal(s, self.ar)  # n_q > k * (n_kv - 1) where they are equal

    def default(self, family: str) -> Candidate:
        """As many roles as fit and divide the chains evenly into passes, and as many heads in flight as then fit."""
        ar, workers = self.ar, self.costs.workers
        passes = ar.ceil_div(self._units(family), workers)
        if family == "shift":  # whose roles must not outnumber the Q tiles
            passes = ar.max(passes, ar.ceil_div(self.n_kv, self.n_q))
        roles = ar.ceil_div(self._units(family), passes)
        place = roles, ar.min(self.shape.heads, ar.floor_div(workers, roles))
        return replace(self._timed(family, *place), is_default=True)

    def grouped(self, family: str) -> list[Candidate]:
        """By places, with the roles that share a head evenly.

        Under boustrophedon with a role for every worker instead: the last chains are the shortest.
        """
        ar = self.ar
        if self._boustrophedon(family):
            places = self._places(family)[: len(MORE_ROUNDS)]
            return [self._timed(family, ar.min(self.n_kv, width), in_flight) for in_flight, width in places]
        shared = []
        for in_flight, width in self._places(family):
            passes = ar.ceil_div(self._units(family), width)
            shared.append(self._timed(family, ar.ceil_div(self._units(family), passes), in_flight))
        return shared

    def _places(self, family: str) -> list[tuple[Integer, Integer]]:
        """Heads in flight, and workers for each: all heads in the fewest rounds that L2 allows, or in some more; all chains of
        a head in the fewest passes, or in some more.

        The one suits few heads, the other many.
        """
        ar, workers, heads = self.ar, self.costs.workers, self.shape.heads
        most = ar.min(heads, workers, self.most_swept if family in MONO else self.most_spread)
        fewest = ar.ceil_div(heads, most)
        found = []
        for more in MORE_ROUNDS:
            in_flight = ar.ceil_div(heads, fewest + more)
            found.append((in_flight, ar.floor_div(workers, in_flight)))
        fewest = ar.ceil_div(self._units(family), workers)
        for more in MORE_PASSES:
            width = ar.ceil_div(self._units(family), fewest + more)
            found.append((ar.min(most, ar.floor_div(workers, width)), width))
        return found

    def round_robin(self, family: str) -> Candidate:
        """All heads dealt out in one line to all workers; `family` is shift or symmetric."""
        ar = self.ar
        units = self._units(family)
        workers = ar.min(self.costs.workers, self.shape.heads * units)
        if family == "shift":  # no more roles of one head than Q tiles
            more = ar.min(1, ar.floor_div(units, self.n_q + 1))  # whether the units are more
            workers = ar.min(workers, ar.max(self.n_q, (1 - more) * self.costs.workers))
        roles = ar.min(units, workers)  # of one head
        turns = times.round_robin_turns(units, self.shape.heads, workers, ar)
        found = self._ring(f"{family}_round_robin", workers, 1, turns, roles)
        long = ar.floor_div(self.n_q, STRADDLING_N_Q + 1)
        return replace(found, time=Time(found.time.ns, found.time.penalty + long))

    def alone(self, family: str) -> list[Candidate]:
        """One CTA per head."""
        in_flight = self.ar.min(self.shape.heads, self.costs.workers)
        if self.shape.mask == "full":
            time = times.full_alone(self.n_q, self.n_kv, self.shape.heads, in_flight, self.tau, self.ar)
        else:
            time = times.causal_alone(self.n_q, self.n_kv, self.k, self.shape.heads, in_flight, self.tau, self.ar)
        too_many = self.ar.floor_div(in_flight, self.most_spread + 1)
        return [self._candidate(family, 1, in_flight, time, penalty=too_many)]

    def _units(self, family: str) -> Integer:
        """What roles take: chains, or pairs of them."""
        return self.ar.ceil_div(self.n_kv, 2) if family == "symmetric" else self.n_kv

    def _boustrophedon(self, family: str) -> bool:
        return family == "descending" and self.shape.mask != "full"

    def _timed(self, family: str, roles: Integer, in_flight: Integer) -> Candidate:
        """A candidate with its closed form."""
        place = self.shape.heads, roles, in_flight
        lam, ar = self.costs.hop_ns, self.ar
        if family in ("shift", "symmetric"):
            return self._ring(family, roles, in_flight, times.grouped_turns(self._units(family), *place, ar), roles)
        if self.shape.mask == "full":
            time = times.full_mono(self.n_q, self.n_kv, *place, self.tau, lam, ar)
        elif self._boustrophedon(family):
            time = times.causal_mono(self.n_q, self.n_kv, self.k, *place, self.tau, lam, ar)
        else:
            time = UNKNOWN
        return self._candidate(family, roles, in_flight, time)

    def _ring(self, family: str, roles: Integer, in_flight: Integer, turns: Integer, head_roles: Integer) -> Candidate:
        """Shift or symmetric, grouped or in round robin, where a worker takes that many turns and a head that many roles."""
        ar, lam = self.ar, self.costs.hop_ns
        if self.shape.mask == "full":
            time = times.full_shift(self.n_q, turns, head_roles, self.shifted_tau, lam, ar)
            return self._candidate(family, roles, in_flight, time, stride=ar.floor_div(self.n_q, head_roles))
        time = times.causal_symmetric(self.n_q, self.n_kv, self.k, turns, self.shifted_tau, lam, ar)
        return self._candidate(family, roles, in_flight, time)

    def _candidate(
        self, family: str, roles: Integer, in_flight: Integer, time: Time, *, penalty: Integer = 0, stride: Integer = 0
    ) -> Candidate:
        whole = Time(time.ns, time.penalty + penalty + self.triangle_penalty)
        return Candidate(family, roles, in_flight, stride, self._boustrophedon(family), whole)


def candidates(shape: Shape, costs: Costs, guarantee: str, arithmetic: Arithmetic, family: str = "auto") -> list[Candidate]:
    """The candidates in their fixed order, the default first.

    A family that is forced has its own default first, then its own forms only. ValueError where it cannot serve the
    mask or the guarantee.
    """
    problem = impossible(shape.mask, guarantee, family)
    if problem:
        raise ValueError(problem)
    sizes = Sizes(shape, costs, arithmetic)
    if family in ROUND_ROBIN:
        return [replace(sizes.round_robin(ROUND_ROBIN[family]), is_default=True)]
    if family in ("shift", "symmetric"):
        return [sizes.default(family), *sizes.grouped(family)]
    if family == "ascending" and shape.mask != "full":
        return [sizes.default(family)]
    full = shape.mask == "full"
    mono = family if family != "auto" else "ascending" if full else "descending"
    free = family == "auto" and guarantee == "run"  # bits may depend on the SM count and the heads
    found = [sizes.default(mono), *sizes.grouped(mono)]
    if free and full:
        found += sizes.grouped("shift")
    found += sizes.alone(mono)
    if free and not full:
        found += sizes.grouped("symmetric")
    if may_straddle(guarantee, family):  # late, so that heads stay whole where that is as fast
        found.append(sizes.round_robin("shift" if full else "symmetric"))
    if free and costs.two_pass:
        found.append(Candidate(TWO_PASS, 0, 0, 0, False, two_pass_time(shape, costs.two_pass, arithmetic)))
    return found


def two_pass_time(shape: Shape, two: TwoPass, ar: Arithmetic) -> Time:
    """Of one launch, the CTAs of dK/dV before those of dQ: an upper bound. `shape`'s own blocks do not matter."""
    n_q, n_kv = ar.ceil_div(shape.q_len, two.block_m), ar.ceil_div(shape.kv_len, two.kv_rows)
    rows, columns = ar.ceil_div(shape.q_len, two.q_rows), ar.ceil_div(shape.kv_len, two.block_n)
    heads, query_heads = shape.heads * (1 + two.split), shape.heads * shape.group
    kv_step_ns = shape.group * two.kv_step_ns
    if shape.mask == "full":
        ns = times.plain_equal(heads * n_kv, n_q * kv_step_ns, query_heads * rows, columns * two.q_step_ns, two.workers, ar)
        return Time(ns, 0)
    if two.kv_rows % two.block_m or two.q_rows % two.block_n:
        return UNKNOWN
    shrink, each = two.kv_rows // two.block_m, two.q_rows // two.block_n
    keys_end = times.plain_shrinking(n_q, shrink, heads, kv_step_ns, two.workers, ar)
    busy_ns = ar.floor_div(heads * n_kv * (2 * n_q - shrink * (n_kv - 1)), 2) * kv_step_ns
    rows_end = times.plain_shrinking(rows * each, each, query_heads, two.q_step_ns, two.workers, ar, busy_ns)
    return Time(ar.max(keys_end, rows_end), _unequal(shape, ar))


def _unequal(shape: Shape, ar: Arithmetic) -> Integer:
    """0 just if the lengths are equal."""
    if shape.q_len == shape.kv_len:
        return 0
    return ar.floor_div(shape.q_len, shape.kv_len + 1) + ar.floor_div(shape.kv_len, shape.q_len + 1)


def may_straddle(guarantee: str, family: str = "auto") -> bool:
    """Whether a round robin is among the candidates."""
    return guarantee == "run" and family in ("auto", *ROUND_ROBIN)


def impossible(mask: Any, guarantee: Any, family: Any) -> str | None:
    """Why this cannot be asked for, if it cannot."""
    if mask not in MASKS:
        return f"mask must be one of {', '.join(MASKS)}, got {mask!r}"
    if guarantee not in GUARANTEES:
        return f"guarantee must be one of {', '.join(GUARANTEES)}, got {guarantee!r}"
    if family not in ("auto", *FAMILIES, *ROUND_ROBIN):
        return f"family must be one of auto, {', '.join((*FAMILIES, *ROUND_ROBIN))}, got {family!r}"
    ring = ROUND_ROBIN.get(family, family)
    if ring == "shift" and mask != "full":
        return f"family {family!r} serves the full mask only, this one is causal: use symmetric or descending"
    if ring == "symmetric" and mask == "full":
        return f"family {family!r} serves causal masks only, this one is full: use shift or ascending"
    return too_weak(guarantee, family)


def too_weak(guarantee: str, family: str) -> str | None:
    """Why a family does not serve a guarantee, if it does not."""
    if guarantee == "run" or family in ("auto", *MONO):
        return None
    reason = f"family {family!r} adds in an order that depends on the SM count"
    return f"{reason}: guarantee {guarantee!r} needs ascending or descending"
