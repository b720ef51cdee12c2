"""Times of the families in closed form (docs/schedules.md has how exact they are).

Each form is one definition for ints and for symbolic expressions: sizes come in as either, and what Python's operators
do not give comes from an Arithmetic. Letters: n_q Q tiles, n KV tiles, k Q tiles per KV tile on the diagonal, heads kv
heads; roles and in_flight are A and G; turns is how many chains, or pairs, a worker runs; tau and lam are ns per step and
per hop, ints (under GQA tau is that of the whole group, since query heads are innermost).

Every form is an upper bound, and exact under the condition that it states. Where it does not even hold, its penalty is 1 or
more and the time means nothing. Penalties are sums of floor_div and mod: floor_div(a, b + 1) is 0 just if a <= b, for a, b >= 0.
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
    """Ascending or descending, full mask: exact if roles divides n and roles > 1.

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


def grouped_turns(units: Integer, heads: Integer, roles: Integer, in_flight: Integer, ar: Arithmetic) -> Integer:
    """Units (chains, or pairs of them) that a worker runs one after the other where heads stay whole.

    >>> grouped_turns(units=3, heads=5, roles=3, in_flight=2, ar=INTEGER)
    3
    """
    return ar.ceil_div(heads, in_flight) * ar.ceil_div(units, roles)


def round_robin_turns(units: Integer, heads: Integer, workers: Integer, ar: Arithmetic) -> Integer:
    """The same where the units of all heads are dealt out in one line.

    >>> round_robin_turns(units=3, heads=5, workers=8, ar=INTEGER)
    2
    """
    return ar.ceil_div(heads * units, workers)


def full_shift(n_q: Integer, turns: Integer, roles: Integer, tau: int, lam: int, ar: Arithmetic) -> Time:
    """Shift with the stride n_q // roles, n_q >= roles: exact while a hop takes at most that many steps.

    A longer hop costs no more than steps so long that it fits.

    >>> full_shift(6, 1, 3, 10, 4, INTEGER)
    Time(ns=60, penalty=0)
    """
    few = ar.floor_div(roles, n_q + 1)
    stride = ar.floor_div(n_q, roles) + few  # never 0
    step = tau if lam <= tau else ar.max(tau, ar.ceil_div(lam, stride))
    return Time(turns * n_q * step, few)


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
    """Descending with boustrophedon on a triangle: exact if roles divides n, or if there is one round.

    Two passes that mirror each other give every role the same work. In more than one round, roles that lack a chain in the last
    pass are timed as if they had one, or as if all began a round together.

    >>> causal_mono(8, 4, 2, 1, 2, 1, 10, 4, INTEGER), causal_mono(6, 3, 2, 2, 3, 2, 10, 4, INTEGER)
    (Time(ns=104, penalty=0), Time(ns=60, penalty=0))
    """
    ring = max(0, 2 * lam - k * tau)  # lost between neighbours in two passes: hops there and back, less what chains shorten
    late = max(0, lam - k * tau)  # how much later than its neighbour a role ends a pass
    skew = lam - ring + late  # and how much later two passes
    rounds, passes = ar.ceil_div(heads, in_flight), ar.ceil_div(n, roles)

    last = k * (passes * roles - 1)  # where the last chain would begin
    total = rounds * passes
    alone = ar.mod(total, 2)  # a last pass without its mirror ends with its first, longest chain
    steps = ar.floor_div(total * (2 * ar.max(n_q, last) - last) + alone * (k * (roles - 1)), 2)
    filled = steps * tau + (roles - 1) * (ar.floor_div(total, 2) * ring + skew + alone * (late - skew))

    # One round: whole pairs of passes, and then a last pass (of an odd number) or a last pair that may lack chains (an even one).
    odd = ar.mod(passes, 2)
    pairs = ar.floor_div(passes - 1, 2)
    first = 2 * pairs * roles  # the first chain after the whole pairs
    whole = pairs * ((2 * n_q - k * (first - 1)) * tau + (roles - 1) * ring)
    longest = (n_q - k * first) * tau
    both = (2 * n_q - k * (2 * (first + roles) - 1)) * tau  # of a role with two chains in the last pair
    left = n - first - roles - 1
    # An odd number ends with its first chain; or, if that is short, the pass before it ends with its last one.
    end_odd = ar.max(longest + (n - first - 1) * late, (roles - 1) * skew)
    # An even number with the longest chain of its last pair, or with a second one, whose role was the last to begin.
    end_even = ar.max(longest + (roles - 1) * late, both + (roles - 1) * lam + left * late)
    one = whole + end_even + odd * (end_odd - end_even)

    # More rounds: each begins as much later as all roles need to begin it a hop apart; after an odd number, in the reverse order.
    next_odd = ar.max(longest - (roles - 1) * lam + (n - first - 1) * ring, (roles - 1) * skew)
    next_even = ar.max(longest, both + left * ring)
    later = whole + next_even + odd * (next_odd - next_even)
    return Time(ar.min(filled, one + (rounds - 1) * later), 0)


def causal_alone(n_q: Integer, n: Integer, k: int, heads: Integer, in_flight: Integer, tau: int, ar: Arithmetic) -> Time:
    """One CTA per head (roles = 1) on a triangle: exact, no hop anywhere.

    >>> causal_alone(6, 3, 2, 1, 1, 10, INTEGER)
    Time(ns=120, penalty=0)
    """
    return Time(ar.ceil_div(heads, in_flight) * ar.ceil_div(n * (2 * n_q - k * (n - 1)), 2) * tau, 0)


def plain_equal(first: Integer, first_ns: Integer, second: Integer, second_ns: Integer, workers: int, ar: Arithmetic) -> Integer:
    """When a launch in which nobody waits ends, in ns: `first` CTAs of first_ns each, then `second` of second_ns. An upper bound.

    >>> plain_equal(first=8, first_ns=10, second=9, second_ns=4, workers=6, ar=INTEGER)
    23
    """
    rounds = ar.ceil_div(first, workers)
    first_end = rounds * first_ns
    # Meanwhile those that idle in the last round end some of the second kind; all workers share the others.
    ended = (rounds * workers - first) * ar.floor_div(first_ns, second_ns)
    after = first_end + ar.ceil_div(ar.max(0, second - ended), workers) * second_ns
    # The last CTA begins when those before it, shared out evenly, are done, at the latest.
    shared = ar.ceil_div(first * first_ns + (second - 1) * second_ns, workers) + second_ns
    # The second kind ends as if those that got none of the first did all of it, at the latest; if there are any.
    beside = ar.ceil_div(second, ar.max(1, workers - first)) * second_ns + ar.min(1, ar.floor_div(first, workers)) * first_end
    return ar.max(first_end, ar.min(after, shared, beside))


def plain_shrinking(
    longest: Integer, shrink: int, heads: Integer, step_ns: int, workers: int, ar: Arithmetic, busy_ns: Integer = 0
) -> Integer:
    """When CTAs end in such a launch, in ns: the first `heads` have `longest` steps, the next as many `shrink` fewer, and so on.

    An upper bound; busy_ns is the time of all CTAs before them. A CTA that does not begin at once begins when the CTAs before it,
    shared out evenly, are done, at the latest. That and its own steps are a parabola in the CTAs before it, of which the maximum is
    taken.

    >>> plain_shrinking(longest=8, shrink=2, heads=3, step_ns=1, workers=6, ar=INTEGER), plain_shrinking(8, 2, 1, 1, 6, INTEGER)
    (13, 8)
    """
    twice = 2 * heads * shrink
    at = ar.floor_div(ar.max(0, heads * (2 * longest + shrink) - 2 * (heads + workers - 1) * shrink), twice)
    if isinstance(busy_ns, int) and not busy_ns:
        at = ar.max(ar.floor_div(workers, heads), at)  # lengths before that of a CTA which does not begin at once

    def end(before: Integer) -> Integer:  # times workers
        done = ar.floor_div(heads * before * (2 * longest - shrink * (before - 1)), 2)
        return busy_ns + (done + (heads + workers - 1) * (longest - shrink * before)) * step_ns

    return ar.max(longest * step_ns, ar.ceil_div(ar.max(end(at), end(at + 1)), workers))


def causal_symmetric(n_q: Integer, n: Integer, k: int, turns: Integer, tau: int, lam: int, ar: Arithmetic) -> Time:
    """Symmetric on a triangle: exact for an even n and lam <= tau.

    For an even n the clock leaves k steps between neighbours, but one where a pair leaves its rectangle. A hop that does not
    fit costs no more than steps so long that it does.

    >>> causal_symmetric(8, 4, 2, 1, 10, 4, INTEGER)
    Time(ns=100, penalty=0)
    """
    steps = 2 * n_q - k * (n - 1)
    if lam <= tau:
        return Time(turns * steps * tau, 0)
    even = max(tau, INTEGER.ceil_div(lam, k))
    extra = ar.mod(n, 2) * (steps - 1) * (lam - even)  # an odd n leaves one step only
    return Time(turns * (steps * even + lam - even + extra), 0)
