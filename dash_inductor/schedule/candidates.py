"""What a choice is made among: (family, roles, heads in flight) in a fixed order, each with its closed form.

Everything here works on ints and on symbolic sizes alike (times.Arithmetic).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from . import times
from .costs import Costs
from .families import FAMILIES, MONO
from .geometry import MASKS, Geometry
from .times import Arithmetic, Integer, Time

GUARANTEES = ("run", "device", "batch")
HEADS_IN_FLIGHT = (1, 2, 4, 8, 16, 32)
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
    """One possible decision; time.penalty > 0 where it does not apply or has no closed form.

    The default may come in several forms.
    """

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

    @property
    def n_q(self) -> Integer:
        return self.ar.ceil_div(self.shape.q_len, self.shape.block_m)

    @property
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

    @property
    def most_heads(self) -> Integer:
        """Heads whose tiles L2 holds in four fifths of its bytes, at least 1."""
        fit = self.ar.floor_div(self.costs.l2_bytes * 4 // 5, self._l2_per_head)
        return fit + self.ar.floor_div(1, fit + 1)  # max(1, fit)

    @property
    def _l2_per_head(self) -> Integer:
        return self.shape.q_len * (self.shape.head_dim * self.shape.group * BYTES_PER_ELEMENT)

    def triangle_penalty(self) -> Integer:
        """0 where lo(j) = k * j and every chain has a step, as in Geometry.is_triangle."""
        s, ar = self.shape, self.ar
        if s.block_n % s.block_m:
            return 1
        if s.q_len == s.kv_len:
            return 0  # n_q > k * (n_kv - 1) always
        chains = times.triangle_penalty(self.n_q, self.n_kv, self.k, ar)
        if s.mask == "causal_top_left":
            return chains
        return ar.floor_div(s.q_len, s.kv_len + 1) + ar.floor_div(s.kv_len, s.q_len + 1)  # 0 just if they are equal

    def fits_penalty(self, in_flight: int) -> Integer:
        """0 where `in_flight` heads exist and fit L2."""
        if in_flight == 1:
            return 0
        too_few = self.ar.floor_div(in_flight, self.shape.heads + 1)
        return too_few + self.ar.floor_div(in_flight * self._l2_per_head, self.costs.l2_bytes * 4 // 5 + 1)

    def default(self, family: str) -> list[Candidate]:
        """As many roles as fit and divide the chains evenly into passes, and as many heads in flight as then fit."""
        ar, workers = self.ar, self.costs.workers
        passes = ar.ceil_div(self._units(family), workers)
        if family == "shift":  # whose roles must not outnumber the Q tiles
            passes = ar.max(passes, ar.ceil_div(self.n_kv, self.n_q))
        roles = ar.ceil_div(self._units(family), passes)
        in_flight = ar.min(self.shape.heads, ar.floor_div(workers, roles), self.most_heads)
        return [replace(c, is_default=True) for c in self._with_times(family, roles, in_flight, 0)]

    def grouped(self, family: str) -> list[Candidate]:
        """Heads in flight 1, 2, 4 .. 32, each with the roles that leaves."""
        found = []
        for in_flight in HEADS_IN_FLIGHT:
            if in_flight <= self.costs.workers:
                passes = self.ar.ceil_div(self._units(family), self.costs.workers // in_flight)
                roles = self.ar.ceil_div(self._units(family), passes)
                # With one round and one pass the default already has this time.
                found += self._with_times(family, roles, in_flight, self.fits_penalty(in_flight))[:1]
        return found

    def alone(self, family: str) -> list[Candidate]:
        """One CTA per head."""
        in_flight = self.ar.min(self.shape.heads, self.costs.workers, self.most_heads)
        if self.shape.mask == "full":
            time = times.full_alone(self.n_q, self.n_kv, self.shape.heads, in_flight, self.tau, self.ar)
        else:
            time = times.causal_alone(self.n_q, self.n_kv, self.k, self.shape.heads, in_flight, self.tau, self.ar)
            time = Time(time.ns, time.penalty + self.triangle_penalty())
        return [Candidate(family, 1, in_flight, 0, self._boustrophedon(family), time)]

    def _units(self, family: str) -> Integer:
        """What roles take: chains, or pairs of them."""
        return self.ar.ceil_div(self.n_kv, 2) if family == "symmetric" else self.n_kv

    def _boustrophedon(self, family: str) -> bool:
        return family == "descending" and self.shape.mask != "full"

    def _with_times(self, family: str, roles: Integer, in_flight: Integer, penalty: Integer) -> list[Candidate]:
        """The candidate, once for each closed form it has."""
        full, heads, lam, ar = self.shape.mask == "full", self.shape.heads, self.costs.hop_ns, self.ar
        place = (heads, roles, in_flight)
        stride: Integer = 0
        if family == "shift":
            forms = [times.full_shift(self.n_q, self.n_kv, *place, self.shifted_tau, lam, ar)]
            stride = ar.floor_div(self.n_q, roles)
        elif full:
            forms = [times.full_mono(self.n_q, self.n_kv, *place, self.tau, lam, ar)]
        elif family == "symmetric":
            forms = [times.causal_symmetric(self.n_q, self.n_kv, self.k, *place, self.shifted_tau, lam, ar)]
        elif family == "descending":
            forms = [
                times.causal_mono(self.n_q, self.n_kv, self.k, *place, self.tau, lam, ar),
                times.causal_mono_single(self.n_q, self.n_kv, self.k, *place, self.tau, lam, ar),
            ]
        else:
            forms = [UNKNOWN]
        if not full:
            penalty = penalty + self.triangle_penalty()
        flag = self._boustrophedon(family)
        return [Candidate(family, roles, in_flight, stride, flag, Time(f.ns, f.penalty + penalty)) for f in forms]


def candidates(shape: Shape, costs: Costs, guarantee: str, arithmetic: Arithmetic, family: str = "auto") -> list[Candidate]:
    """The candidates in their fixed order, the default first.

    A family that is forced has its own default first, then its own forms only. ValueError where it cannot serve the
    mask or the guarantee.
    """
    problem = impossible(shape.mask, guarantee, family)
    if problem:
        raise ValueError(problem)
    sizes = Sizes(shape, costs, arithmetic)
    if family in ("shift", "symmetric"):
        return sizes.default(family) + sizes.grouped(family)
    if family == "ascending" and shape.mask != "full":
        return sizes.default(family)
    full = shape.mask == "full"
    mono = family if family != "auto" else "ascending" if full else "descending"
    found = sizes.default(mono) + sizes.grouped(mono)
    shifted = family == "auto" and guarantee == "run"
    if shifted and full:
        found += sizes.grouped("shift")
    found += sizes.alone(mono)
    if shifted and not full:
        found += sizes.grouped("symmetric")
    return found


def impossible(mask: Any, guarantee: Any, family: Any) -> str | None:
    """Why this cannot be asked for, if it cannot."""
    if mask not in MASKS:
        return f"mask must be one of {', '.join(MASKS)}, got {mask!r}"
    if guarantee not in GUARANTEES:
        return f"guarantee must be one of {', '.join(GUARANTEES)}, got {guarantee!r}"
    if family not in ("auto", *FAMILIES):
        return f"family must be one of auto, {', '.join(FAMILIES)}, got {family!r}"
    if family == "shift" and mask != "full":
        return f"family 'shift' serves the full mask only, this one is {mask}: use symmetric or descending"
    if family == "symmetric" and mask == "full":
        return "family 'symmetric' serves causal masks only, this one is full: use shift or ascending"
    if guarantee != "run" and family not in ("auto", *MONO):
        reason = f"family {family!r} adds in an order that depends on the SM count"
        return f"{reason}: guarantee {guarantee!r} needs ascending or descending"
    return None
