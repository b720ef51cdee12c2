"""Formulas of the cost model in LaTeX, as `dash_inductor/schedule/formulas` defines them."""

from __future__ import annotations

from collections.abc import Callable

import sympy
from sympy.printing.latex import LatexPrinter

from dash_inductor.schedule.formulas import formula_for, two_pass
from dash_inductor.schedule.formulas.formula import A, Division, Formula, G, Max, Min, eta, k, lam, n_kv, n_q, rho, tau

FORMULAS: dict[str, Callable[[], Formula | None]] = {
    "monotone full": lambda: formula_for("ascending", "full"),
    "shift": lambda: formula_for("shift", "full"),
    "shift_round_robin": lambda: formula_for("shift_round_robin", "full"),
    "symmetric": lambda: formula_for("symmetric", "causal"),
    "symmetric_round_robin": lambda: formula_for("symmetric_round_robin", "causal"),
    "descending causal": lambda: formula_for("descending", "causal"),
    "two_pass full": lambda: two_pass.FULL,
}
LETTERS = {A: "A", G: "G", k: "k", n_q: "n_q", n_kv: r"n_{kv}", tau: r"\tau", lam: r"\lambda", eta: r"\eta", rho: r"\rho"}


class Printer(LatexPrinter):
    """LaTeX in the subset that GitHub and latex2mathml share; what is no letter of SIZES stands upright, a name of the code."""

    def _as_ordered_terms(self, expr: sympy.Expr, order: str | None = None) -> list[sympy.Expr]:
        return sorted(super()._as_ordered_terms(expr, order), key=lambda term: term.could_extract_minus_sign())

    def _print_Symbol(self, symbol: sympy.Symbol, style: str = "plain") -> str:
        return LETTERS.get(symbol) or words(symbol.name)

    def _print_FloorDiv(self, division: Division) -> str:
        numerator, denominator = map(self._print, division.args)
        rounding = type(division).__name__.removesuffix("Div").lower()
        return rf"\left\l{rounding} \frac{{{numerator}}}{{{denominator}}} \right\r{rounding}"

    _print_CeilDiv = _print_FloorDiv

    def _print_Max(self, function: Max | Min, exp: str | None = None) -> str:
        name = type(function).__name__.lower()
        return rf"\{name}\left({', '.join(map(self._print, function.args))}\right)"

    _print_Min = _print_Max

    def _print_Mod(self, mod: sympy.Mod, exp: str | None = None) -> str:
        number, modulus = mod.args
        return rf"{self.parenthesize(number, 60)} \bmod {self._print(modulus)}"


def words(name: str) -> str:
    """A name as it stands in the code; LaTeX takes the underscore for an index."""
    return rf"\mathrm{{{name.replace('_', ' ')}}}".replace(" ", r"\ ")


def latex(name: str) -> str:
    r"""The time in ns, and below it what its parts are; of "A but B" the lines that A alone has.

    >>> print(latex("shift_round_robin but shift").splitlines()[-3])
    \mathrm{roles} &= \min\left(n_{kv}, A\right)
    """
    wanted, _, known = name.partition(" but ")
    lines = [line for line in _lines(wanted) if not known or line not in _lines(known)]
    return "\n".join(["```math", r"\begin{align*}", " \\\\\n".join(lines), r"\end{align*}", "```"])


def _lines(name: str) -> list[str]:
    formula = FORMULAS[name]()
    assert formula
    show = Printer({"mul_symbol": "dot"}).doprint
    return [f"{words('ns')} &= {show(formula.total)}", *(f"{show(part)} &= {show(value)}" for part, value in formula.parts.items())]
