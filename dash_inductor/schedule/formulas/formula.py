"""A time in closed form: a sympy expression with named parts, printed as it is defined and compiled once."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import sympy
from sympy.logic.boolalg import Boolean


class Time(NamedTuple):
    """Makespan in ns, exact or an upper bound."""

    ns: int
    exact: bool


class IntegerFunction(sympy.Function):
    """A function of integers that sympy leaves as it is: its own ceiling divides in floats, its own Max compares symbols."""

    is_integer = True


class Division(IntegerFunction):
    """A division, printed as floor(a/b) or ceil(a/b)."""

    def _sympystr(self, printer: Any) -> str:
        numerator, denominator = self.args
        rounding = type(self).__name__.removesuffix("Div").lower()
        return f"{rounding}({printer.parenthesize(numerator, 50)}/{printer.parenthesize(denominator, 60)})"


class FloorDiv(Division):
    """a // b."""


class CeilDiv(Division):
    """-(-a // b)."""


class Max(IntegerFunction):
    """The largest of its arguments."""


class Min(IntegerFunction):
    """The least of its arguments."""


def integers(names: str) -> Any:
    """Symbols of integers, by names with blanks between them."""
    return sympy.symbols(names, integer=True, seq=True)


# Of the schedules of one pass: Q tiles, KV tiles, Q tiles beside a KV tile on the diagonal, kv heads of the batch, roles of a head
# (under a round robin: workers), heads in flight, ns of a step of a whole group of query heads, ns of a hop, ns of the beginning
# and end of a chain; of two passes, of a CTA.
SIZES = n_q, n_kv, k, heads, A, G, tau, lam, eta = integers("n_q n_kv k heads A G tau lam eta")
(rho,) = integers("rho")  # ns of all that runs beside the main kernel


@dataclass(frozen=True)
class Formula:
    """Ints for `parameters` to the makespan in ns: never less than the simulator's, the same where `exact` holds.

    applies: the relation under which it is a bound at all.
    parts: names for what ns, applies and exact are made of; each may use those before it.
    """

    ns: sympy.Expr
    applies: Boolean = sympy.true
    exact: Boolean = sympy.false
    parts: Mapping[sympy.Symbol, sympy.Expr] = field(default_factory=dict)
    parameters: tuple[sympy.Symbol, ...] = SIZES

    def __call__(self, *sizes: int, beside_ns: int = 0) -> Time | None:
        """The time for ints, one per parameter, with rho; None where the formula does not apply."""
        ns, applies, exact = self._compiled(*sizes)
        return Time(ns + beside_ns, exact) if applies else None

    @cached_property
    def _compiled(self) -> Callable[..., tuple[int, bool, bool]]:
        return sympy.lambdify(
            self.parameters,
            (self.ns, self.applies, self.exact),
            modules=[{"Max": max, "Min": min, "FloorDiv": operator.floordiv, "CeilDiv": lambda a, b: -(-a // b)}],
            cse=lambda expressions: (list(self.parts.items()), expressions),  # its parts are its common subexpressions
        )

    @property
    def total(self) -> sympy.Expr:
        """The time with rho."""
        return self.ns + rho

    @property
    def lines(self) -> list[str]:
        """The time, then what its parts are, a line each."""
        return [str(self.total), *(f"{name} = {expression}" for name, expression in self.parts.items())]

    def __str__(self) -> str:
        return "; ".join(self.lines)
