"""Ascending and descending, A roles to a head, G heads in flight."""

from __future__ import annotations

import sympy

from .formula import A, CeilDiv, FloorDiv, Formula, G, Max, Min, eta, heads, integers, k, lam, n_kv, n_q, tau

rounds, passes, sweep, turn = integers("rounds passes sweep turn")
_WHOLE = {rounds: CeilDiv(heads, G), passes: CeilDiv(n_kv, A)}

# A pass takes a sweep of its tiles, or one turn round the ring of roles if that is longer, except for the last of a head: the next
# head waits for nobody. Alone, a role waits for nobody either. The last chain ends last.
FULL = Formula(
    rounds * ((passes - 1) * Max(sweep, turn) + sweep) + ((n_kv - 1) % A) * lam,
    exact=sympy.true,
    parts={**_WHOLE, sweep: n_q * tau + eta, turn: Min(A - 1, 1) * A * lam},
)

ring, late, skew, odd, pairs, first = integers("ring late skew odd pairs first")
total, last, lone, filled = integers("total last lone filled")
whole, longest, both, left, end_odd, end_even, one = integers("whole longest both left end_odd end_even one")
next_odd, next_even, later = integers("next_odd next_even later")

# Descending, roles mirrored in odd passes, where first_q_tile(j) = k * j and every chain has a step. Two passes that mirror each
# other give every role the same work. In more than one round, roles that lack a chain in the last pass are timed as if they had
# one (`filled`), or as if all began a round together (`one`, `later`).
MIRRORED = Formula(
    Min(filled, one + (rounds - 1) * later),
    applies=n_q > k * (n_kv - 1),
    exact=sympy.Or(sympy.Eq(n_kv % A, 0), sympy.Eq(rounds, 1)),
    parts={
        **_WHOLE,
        # Lost between neighbours in two passes: hops there and back, less what chains shorten.
        ring: Max(0, 2 * lam - k * tau),
        late: Max(0, lam - k * tau),  # how much later than its neighbour a role ends a pass
        skew: lam - ring + late,  # and how much later two passes
        total: rounds * passes,
        last: k * (passes * A - 1),  # where the last chain would begin
        lone: total % 2,  # a last pass without its mirror ends with its first, longest chain
        filled: FloorDiv(total * (2 * Max(n_q, last) - last) + lone * k * (A - 1), 2) * tau
        + total * eta
        + (A - 1) * (FloorDiv(total, 2) * ring + skew + lone * (late - skew)),
        # One round: whole pairs of passes; then a last pass (of an odd number), or a last pair that may lack chains (an even one).
        odd: passes % 2,
        pairs: FloorDiv(passes - 1, 2),
        first: 2 * pairs * A,  # the first chain after the whole pairs
        whole: pairs * ((2 * n_q - k * (first - 1)) * tau + (A - 1) * ring + 2 * eta),
        longest: (n_q - k * first) * tau + eta,
        both: (2 * n_q - k * (2 * (first + A) - 1)) * tau + 2 * eta,  # of a role with two chains in the last pair
        left: n_kv - first - A - 1,
        # An odd number ends with its first chain; or, if that is short, the pass before it ends with its last one.
        end_odd: Max(longest + (n_kv - first - 1) * late, (A - 1) * skew),
        # An even number with the longest chain of its last pair, or with a second one, whose role was the last to begin.
        end_even: Max(longest + (A - 1) * late, both + (A - 1) * lam + left * late),
        one: whole + odd * end_odd + (1 - odd) * end_even,
        # More rounds: each begins as much later as all roles need to begin it a hop apart; after an odd number, in reverse order.
        next_odd: Max(longest - (A - 1) * lam + (n_kv - first - 1) * ring, (A - 1) * skew),
        next_even: Max(longest, both + left * ring),
        later: whole + odd * next_odd + (1 - odd) * next_even,
    },
)
