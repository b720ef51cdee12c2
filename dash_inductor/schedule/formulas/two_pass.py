"""Two passes: one launch in which nobody waits, the CTAs of dK/dV before those of dQ. All times are upper bounds."""

from __future__ import annotations

import sympy

from .formula import CeilDiv, FloorDiv, Formula, Max, Min, eta, integers

Parts = dict[sympy.Symbol, sympy.Expr]

first, first_ns, second, second_ns, workers = integers("first first_ns second second_ns workers")
rounds, first_end, ended, after, shared, beside = integers("rounds first_end ended after shared beside")


def _triangle(
    prefix: str,
    count: sympy.Expr,
    longest: sympy.Expr,
    shrink: sympy.Expr,
    heads: sympy.Expr,
    step_ns: sympy.Expr,
    busy_ns: sympy.Expr,
) -> Parts:
    """`<prefix>_end`, when such CTAs end: the first `heads` have `longest` steps, the next as many `shrink` fewer, `count` times.

    busy_ns is the time of all CTAs before them. A CTA that does not begin at once begins when the CTAs before it, shared out
    evenly, are done, at the latest. That and its own steps are a parabola in the CTAs before it, of which the maximum is taken.
    """
    ctas, steps, less, peak, at, here, next_, end = integers(
        " ".join(f"{prefix}_{part}" for part in ("ctas", "steps", "less", "peak", "at", "here", "next", "end"))
    )

    def time(before: sympy.Expr) -> sympy.Expr:  # times workers; 0 where no such CTA is left
        done = FloorDiv(ctas * before * (2 * steps - less * (before - 1)), 2)
        own = ctas + workers - 1
        is_left = Min(1, Max(0, count - before))
        return is_left * (busy_ns + (done + own * (steps - less * before)) * step_ns + (ctas * before + own) * eta)

    return {
        ctas: heads,
        steps: longest,
        less: shrink,
        peak: FloorDiv(
            Max(0, (ctas * (2 * steps + less) - 2 * (ctas + workers - 1) * less) * step_ns + 2 * ctas * eta),
            2 * ctas * less * step_ns,
        ),
        at: Max(0 if busy_ns else FloorDiv(workers, ctas), Min(count - 1, peak)),  # after the CTAs that begin at once
        here: time(at),
        next_: time(at + 1),
        end: Max(steps * step_ns + eta, CeilDiv(Max(here, next_), workers)),
    }


# Lengths in rows, kv heads of the batch, query heads of each; then the fields of `TwoPass`.
q_len, kv_len, kv_heads, group = integers("q_len kv_len kv_heads group")
block_m, block_n, kv_rows, q_rows = integers("block_m block_n kv_rows q_rows")
kv_step_ns, q_step_ns, split = integers("kv_step_ns q_step_ns split")
PARAMETERS = (q_len, kv_len, kv_heads, group, block_m, block_n, kv_rows, q_rows, kv_step_ns, q_step_ns, workers, split, eta)

# When a launch of `first` CTAs of first_ns each ends, and then `second` of second_ns.
FULL = Formula(
    Max(first_end, Min(after, shared, beside)),
    parts={
        first: kv_heads * (1 + split) * CeilDiv(kv_len, kv_rows),
        first_ns: CeilDiv(q_len, block_m) * group * kv_step_ns + eta,
        second: kv_heads * group * CeilDiv(q_len, q_rows),
        second_ns: CeilDiv(kv_len, block_n) * q_step_ns + eta,
        rounds: CeilDiv(first, workers),
        first_end: rounds * first_ns,
        # Meanwhile those that idle in the last round end some of the second kind; all workers share the others.
        ended: (rounds * workers - first) * FloorDiv(first_ns, second_ns),
        after: first_end + CeilDiv(Max(0, second - ended), workers) * second_ns,
        # The last CTA begins when those before it, shared out evenly, are done, at the latest.
        shared: CeilDiv(first * first_ns + (second - 1) * second_ns, workers) + second_ns,
        # The second kind ends as if those that got none of the first did all of it, at the latest; if there are any.
        beside: CeilDiv(second, Max(1, workers - first)) * second_ns + Min(1, FloorDiv(first, workers)) * first_end,
    },
    parameters=PARAMETERS,
)

n_q, n_kv, busy_ns, kv_end, q_end = integers("n_q n_kv busy_ns kv_end q_end")
kv_ctas, kv_less = integers("kv_ctas kv_less")
CAUSAL = Formula(
    Max(kv_end, q_end),
    applies=sympy.And(sympy.Eq(q_len, kv_len), sympy.Eq(kv_rows % block_m, 0), sympy.Eq(q_rows % block_n, 0)),
    parts={
        n_q: CeilDiv(q_len, block_m),
        n_kv: CeilDiv(kv_len, kv_rows),
        **_triangle("kv", n_kv, n_q, FloorDiv(kv_rows, block_m), kv_heads * (1 + split), group * kv_step_ns, sympy.Integer(0)),
        busy_ns: FloorDiv(kv_ctas * n_kv * (2 * n_q - kv_less * (n_kv - 1)), 2) * group * kv_step_ns + kv_ctas * n_kv * eta,
        **_triangle(
            "q",
            CeilDiv(q_len, q_rows),
            CeilDiv(q_len, q_rows) * FloorDiv(q_rows, block_n),
            FloorDiv(q_rows, block_n),
            kv_heads * group,
            q_step_ns,
            busy_ns,
        ),
    },
    parameters=PARAMETERS,
)
