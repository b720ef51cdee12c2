"""Symmetric where first_q_tile(j) = k * j: whole heads in groups, or the pairs of all heads in one queue of A workers."""

from __future__ import annotations

import sympy

from .formula import A, CeilDiv, FloorDiv, Formula, G, Max, Min, eta, heads, integers, k, lam, n_kv, n_q, tau

turns, pairs, steps, stride, step, late = integers("turns pairs steps stride step late")


def _symmetric(turns_of_worker: CeilDiv) -> Formula:
    """A worker runs `turns` pairs of chains, all of `steps` steps.

    The clock leaves `stride` steps between neighbours, but one where a pair leaves its rectangle. A hop that does not fit costs no
    more than steps so long that it does. The stride is k, but less on the ring of an odd n_kv whose last tile is short.
    """
    return Formula(
        turns * (steps * step + late + 2 * eta),
        applies=n_q > k * (n_kv - 1),
        exact=sympy.And(sympy.Eq(n_kv % 2, 0), lam <= tau),
        parts={
            pairs: CeilDiv(n_kv, 2),
            turns: turns_of_worker,
            steps: 2 * n_q - k * (n_kv - 1),
            stride: Max(1, Min(k, FloorDiv(n_q - k * (pairs - 1), pairs))),
            step: Max(tau, CeilDiv(lam, stride)),
            late: Max(0, lam - step),
        },
    )


GROUPED = _symmetric(CeilDiv(heads, G) * CeilDiv(pairs, A))
ROUND_ROBIN = _symmetric(CeilDiv(heads * pairs, A))
