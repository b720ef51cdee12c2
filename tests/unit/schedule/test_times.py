from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from dash_inductor.schedule import (
    INTEGER,
    Ascending,
    Descending,
    Geometry,
    Plan,
    Schedule,
    Shift,
    Symmetric,
    replay,
    times,
)

CASES = 90


class Case:
    """Random sizes, heads, roles and costs; a hop is within a step of the group half of the time."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.seed, self.rng = seed, rng
        self.n = rng.randint(1, 12)
        self.n_q = rng.randint(1, 24)
        self.heads = rng.randint(1, 6)
        self.in_flight = rng.randint(1, self.heads)
        self.group = rng.choice([1, 1, 2, 3])
        self.step_ns = rng.randint(1, 20)
        self.tau = self.step_ns * self.group
        self.lam = rng.randint(0, rng.choice([1, 4]) * self.tau)
        self.k = rng.choice([1, 2, 3])

    def __repr__(self) -> str:
        return f"Case({vars(self)})"

    def roles(self, *, most: int) -> int:
        return self.rng.randint(1, most)

    def divisor(self, n: int) -> int:
        return self.rng.choice([a for a in range(1, n + 1) if n % a == 0])

    @property
    def full(self) -> Geometry:
        return Geometry(self.n_q, self.n, 1, 1, "full")

    def triangle(self) -> Geometry:
        self.n_q = self.k * (self.n - 1) + self.rng.randint(1, 6)
        return Geometry(self.n_q, self.n * self.k, 1, self.k, "causal_top_left")

    def replayed(self, schedule: Schedule) -> int:
        plan = Plan(schedule, self.heads, self.in_flight, self.group)
        reduce_ns = min(self.step_ns, self.lam) // 2  # only tau and lam matter
        return replay(plan, compute_ns=self.step_ns - reduce_ns, reduce_ns=reduce_ns, sync_ns=self.lam - reduce_ns).makespan_ns


def cases() -> Iterator[Case]:
    return map(Case, range(CASES))


@pytest.mark.parametrize("family", [Ascending, Descending])
def test_full_mono(family: type[Ascending] | type[Descending]) -> None:
    for c in cases():
        for roles in (c.divisor(c.n), c.roles(most=c.n)):
            time, penalty = times.full_mono(c.n_q, c.n, c.heads, roles, c.in_flight, c.tau, c.lam, INTEGER)
            found = c.replayed(family(c.full, roles))
            assert penalty == 0 and time >= found
            if c.n % roles == 0 and roles > 1:
                assert time == found


def test_full_alone() -> None:
    for c in cases():
        time = times.full_alone(c.n_q, c.n, c.heads, c.in_flight, c.tau, INTEGER)
        assert time == (c.replayed(Ascending(c.full, 1)), 0)


def test_full_shift() -> None:
    for c in cases():
        roles = c.roles(most=c.n)
        time, penalty = times.full_shift(c.n_q, c.n, c.heads, roles, c.in_flight, c.tau, c.lam, INTEGER)
        assert (penalty == 0) == (c.n_q >= roles and c.lam <= c.n_q // roles * c.tau)
        if penalty == 0:
            assert time == c.replayed(Shift(c.full, roles))


def test_causal_mono() -> None:
    for c in cases():
        c.n += c.n % 2
        g, roles = c.triangle(), c.divisor(c.n // 2) if c.seed % 4 else c.roles(most=c.n)
        time, penalty = times.causal_mono(c.n_q, c.n, c.k, c.heads, roles, c.in_flight, c.tau, c.lam, INTEGER)
        assert (penalty == 0) == (c.n % (2 * roles) == 0 and c.lam <= c.k * c.tau)
        if penalty == 0:
            assert time == c.replayed(Descending(g, roles, boustrophedon=True))


def test_causal_mono_single() -> None:
    for c in cases():
        g = c.triangle()
        if c.seed % 4:
            c.in_flight = c.heads
        roles = c.n if c.seed % 5 else c.roles(most=c.n)
        time, penalty = times.causal_mono_single(c.n_q, c.n, c.k, c.heads, roles, c.in_flight, c.tau, c.lam, INTEGER)
        assert (penalty == 0) == (roles == c.n and c.in_flight == c.heads and c.lam <= c.k * c.tau)
        if penalty == 0:
            assert time == c.replayed(Descending(g, roles, boustrophedon=True))


def test_causal_alone() -> None:
    for c in cases():
        g = c.triangle()
        time = times.causal_alone(c.n_q, c.n, c.k, c.heads, c.in_flight, c.tau, INTEGER)
        assert time == (c.replayed(Descending(g, 1, boustrophedon=True)), 0)


def test_causal_symmetric() -> None:
    for c in cases():
        g = c.triangle()
        roles = c.roles(most=-(-c.n // 2))
        time, penalty = times.causal_symmetric(c.n_q, c.n, c.k, c.heads, roles, c.in_flight, c.tau, c.lam, INTEGER)
        assert (penalty == 0) == (c.lam <= c.tau)
        if penalty == 0:
            found = c.replayed(Symmetric(g, roles))
            assert time == found if c.n % 2 == 0 else time >= found


def test_triangle_penalty() -> None:
    for c in cases():
        g = Geometry(c.n_q, c.n * c.k, 1, c.k, "causal_top_left")
        assert (times.triangle_penalty(c.n_q, c.n, c.k, INTEGER) == 0) == g.is_triangle
