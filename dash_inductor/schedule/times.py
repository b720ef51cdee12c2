"""Exact times of the families in closed form (schedules.md, section 3).

Each form is one definition for ints and for symbolic expressions: sizes come in as either, and what Python's operators
do not give comes from an Arithmetic. Letters: n_q Q tiles, n KV tiles, k Q tiles per KV tile on the diagonal, heads kv
heads; roles and in_flight are A and G; tau and lam are ns per step and per hop, ints (under GQA tau is that of the
whole group, since query heads are innermost).

A form is exact, or where said an upper bound, if its penalty is 0; otherwise the penalty is 1 or more and the time
means nothing. Penalties are sums of floor_div and mod: floor_div(a, b + 1) is 0 just if a <= b, for a, b >= 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

Integer = Any  # an int or a symbolic integer


@dataclass(frozen=True)
class Arithmetic:
    """The operations of the closed forms on nonnegative integers; max and min take any number of arguments, at least
    two."""

    ceil_div: Callable[..., Integer]
    floor_div: Callable[..., Integer]
    mod: Callable[..., Integer]
    max: Callable[..., Integer]
    min: Callable[..., Integer]


INTEGER = Arithmetic(ceil_div=lambda a, b: -(-a // b), floor_div=lambda a, b: a // b, mod=lambda a, b: a % b, max=max, min=min)


class Time(NamedTuple):
    """Makespan in ns, and 0 or how little it may be believed."""

    ns: Integer
    penalty: Integer


def full_mono(
    n_q: Integer, n: Integer, heads: Integer, roles: Integer, in_flight: Integer, tau: int, lam: int, ar: Arithmetic
) -> Time:
    """Ascending or descending, full mask: exact if roles divides n and roles > 1, else an upper bound.

    A pass takes a sweep of its tiles, or one turn round the ring of roles if that is longer, except for the last of a
    head: the next head waits for nobody.

    >>> full_mono(6, 3, 1, 3, 1, 10, 4, INTEGER)
    Time(ns=68, penalty=0)
    """
    rounds = ar.ceil_div(heads, in_flight)
    passes = ar.ceil_div(n, roles)
    sweep = n_q * tau
    return Time(rounds * ((passes - 1) * ar.max(sweep, roles * lam) + sweep) + (roles - 1) * lam, 0)


def full_alone(n_q: Integer, n: Integer, heads: Integer, in_flight: Integer, tau: int, ar: Arithmetic) -> Time:
    """One CTA per head (roles = 1), full mask: exact, no hop anywhere.

    >>> full_alone(6, 3, 1, 1, 10, INTEGER)
    Time(ns=180, penalty=0)
    """
    return Time(ar.ceil_div(heads, in_flight) * n * n_q * tau, 0)


def full_shift(
    n_q: Integer, n: Integer, heads: Integer, roles: Integer, in_flight: Integer, tau: int, lam: int, ar: Arithmetic
) -> Time:
    """Shift with the stride n_q // roles: exact while n_q >= roles and a hop takes at most that many steps.

    >>> full_shift(6, 3, 1, 3, 1, 10, 4, INTEGER)
    Time(ns=60, penalty=0)
    """
    stride = ar.floor_div(n_q, roles)
    rounds = ar.ceil_div(heads, in_flight)
    return Time(rounds * ar.ceil_div(n, roles) * n_q * tau, ar.floor_div(roles, n_q + 1) + ar.floor_div(lam, stride * tau + 1))


def triangle_penalty(n_q: Integer, n: Integer, k: int, ar: Arithmetic) -> Integer:
    """0 just if n_q > k * (n - 1), that is, if every chain of a triangle with lo(j) = k * j has a step."""
    return ar.floor_div(k * (n - 1), n_q)


def causal_mono(
    n_q: Integer,
    n: Integer,
    k: int,
    heads: Integer,
    roles: Integer,
    in_flight: Integer,
    tau: int,
    lam: int,
    ar: Arithmetic,
) -> Time:
    """Descending with boustrophedon on a triangle: exact if 2 * roles divides n and lam <= k * tau.

    >>> causal_mono(8, 4, 2, 1, 2, 1, 10, 4, INTEGER)
    Time(ns=104, penalty=0)
    """
    rounds = ar.ceil_div(heads, in_flight)
    pairs = rounds * ar.floor_div(n, 2 * roles)  # of passes that mirror each other, over all heads
    work = rounds * ar.ceil_div(n * (2 * n_q - k * (n - 1)), 2 * roles) * tau
    ring = (pairs - 1) * (roles - 1) * max(0, 2 * lam - k * tau)
    return Time(work + (roles - 1) * lam + ring, ar.mod(n, 2 * roles) + lam // (k * tau + 1))


def causal_mono_single(
    n_q: Integer,
    n: Integer,
    k: int,
    heads: Integer,
    roles: Integer,
    in_flight: Integer,
    tau: int,
    lam: int,
    ar: Arithmetic,
) -> Time:
    """Descending on a triangle, all heads in flight, a CTA per chain: exact if lam <= k * tau.

    The first chain is the longest path.

    >>> causal_mono_single(6, 3, 2, 2, 3, 2, 10, 4, INTEGER)
    Time(ns=60, penalty=0)
    """
    return Time(n_q * tau, (ar.ceil_div(n, roles) - 1) + (ar.ceil_div(heads, in_flight) - 1) + lam // (k * tau + 1))


def causal_alone(n_q: Integer, n: Integer, k: int, heads: Integer, in_flight: Integer, tau: int, ar: Arithmetic) -> Time:
    """One CTA per head (roles = 1) on a triangle: exact, no hop anywhere.

    >>> causal_alone(6, 3, 2, 1, 1, 10, INTEGER)
    Time(ns=120, penalty=0)
    """
    return Time(ar.ceil_div(heads, in_flight) * ar.ceil_div(n * (2 * n_q - k * (n - 1)), 2) * tau, 0)


def causal_symmetric(
    n_q: Integer,
    n: Integer,
    k: int,
    heads: Integer,
    roles: Integer,
    in_flight: Integer,
    tau: int,
    lam: int,
    ar: Arithmetic,
) -> Time:
    """Symmetric on a triangle, lam <= tau: exact for an even n, an upper bound for an odd one.

    >>> causal_symmetric(8, 4, 2, 1, 2, 1, 10, 4, INTEGER)
    Time(ns=100, penalty=0)
    """
    rounds = ar.ceil_div(heads, in_flight)
    passes = ar.ceil_div(ar.ceil_div(n, 2), roles)
    return Time(rounds * passes * (2 * n_q - k * (n - 1)) * tau, lam // (tau + 1))
