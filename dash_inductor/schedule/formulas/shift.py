"""Shift, its roles floor(n_q / A) tiles apart: whole heads in groups, or the chains of all heads in one queue of A workers."""

from __future__ import annotations

from .formula import A, CeilDiv, FloorDiv, Formula, G, Max, Min, eta, heads, integers, lam, n_kv, n_q, tau

turns, roles, stride, step = integers("turns roles stride step")


def _shift(turns_of_worker: CeilDiv, roles_of_head: Min) -> Formula:
    """A worker runs `turns` chains without a wait while a hop takes at most `stride` steps.

    A longer hop costs no more than steps so long that it fits.
    """
    return Formula(
        turns * (n_q * step + eta),
        applies=n_q >= roles,
        exact=lam <= stride * tau,
        parts={
            turns: turns_of_worker,
            roles: roles_of_head,
            stride: Max(1, FloorDiv(n_q, roles)),
            step: Max(tau, CeilDiv(lam, stride)),
        },
    )


GROUPED = _shift(CeilDiv(heads, G) * CeilDiv(n_kv, A), A)
ROUND_ROBIN = _shift(CeilDiv(heads * n_kv, A), Min(n_kv, A))
