"""Symmetric where first_q_tile(j) = k * j: whole heads in groups, or the pairs of all heads in one queue of A workers."""

from __future__ import annotations

import sympy

from .formula import A, CeilDiv, Formula, G, Max, heads, integers, k, lam, n_kv, n_q, tau

turns, pairs, steps, step, late, single = integers("turns pairs steps step late single")


def _symmetric(turns_of_worker: CeilDiv) -> Formula:
    """A worker runs `turns` pairs of chains, all of `steps` steps.

    For an even n_kv the clock leaves k steps between neighbours, but one where a pair leaves its rectangle; for an odd one it
    leaves one everywhere. A hop that does not fit costs no more than steps so long that it does.
    """
    return Formula(
        turns * (steps * step + late * (1 + single * (steps - 1))),
        applies=n_q > k * (n_kv - 1),
        chains=2 * turns,
        exact=sympy.And(sympy.Eq(single, 0), lam <= tau),
        parts={
            pairs: CeilDiv(n_kv, 2),
            turns: turns_of_worker,
            steps: 2 * n_q - k * (n_kv - 1),
            single: n_kv % 2,
            step: Max(tau, CeilDiv(lam, k)),
            late: Max(0, lam - step),
        },
    )


GROUPED = _symmetric(CeilDiv(heads, G) * CeilDiv(pairs, A))
ROUND_ROBIN = _symmetric(CeilDiv(heads * pairs, A))
