"""Python source for an integer expression in which every subexpression is computed once.

The closed forms share much: written out in one line, as a printer of sympy does, they take ten times as long.
"""

from __future__ import annotations

from .times import Arithmetic, Integer


class Trace:
    """Records the operations on its terms; equal operations on equal operands are one line.

    >>> trace = Trace()
    >>> x, y = trace.parameter("x"), trace.parameter("y")
    >>> print(trace.source("f", ("x", "y"), TRACED.max(x * y + 1, x * y * y)))
    def f(x, y):
        t0 = x * y
        t1 = t0 + 1
        t2 = t0 * y
        t3 = t1 if t1 > t2 else t2
        return t3
    <BLANKLINE>
    """

    def __init__(self) -> None:
        self.names: dict[str, str] = {}  # expression -> the variable that holds it

    def term(self, text: str) -> Term:
        """The variable that holds the value of an expression."""
        return Term(self, self.names.setdefault(text, f"t{len(self.names)}"))

    def parameter(self, name: str) -> Term:
        """A parameter of the function."""
        return Term(self, name)

    def source(self, name: str, parameters: tuple[str, ...], result: Integer) -> str:
        """The function whose lines were recorded."""
        lines = (f"    {variable} = {text}" for text, variable in self.names.items())
        return "\n".join((f"def {name}({', '.join(parameters)}):", *lines, f"    return {result}", ""))


class Term:
    """An integer of a traced function: a parameter or a variable."""

    __slots__ = ("name", "trace")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, trace: Trace, name: str) -> None:
        self.trace, self.name = trace, name

    def __str__(self) -> str:
        return self.name

    def __eq__(self, other: object) -> bool:
        """Whether both are the same variable."""
        return isinstance(other, Term) and self.name == other.name

    def __add__(self, other: Integer) -> Integer:
        return self if is_int(other, 0) else self.trace.term(f"{self} + {other}")

    def __radd__(self, other: int) -> Integer:
        return self + other

    def __sub__(self, other: Integer) -> Integer:
        return self if is_int(other, 0) else self.trace.term(f"{self} - {other}")

    def __rsub__(self, other: int) -> Integer:
        return self.trace.term(f"{other} - {self}")

    def __mul__(self, other: Integer) -> Integer:
        if is_int(other, 0):
            return 0
        return self if is_int(other, 1) else self.trace.term(f"{self} * {other}")

    def __rmul__(self, other: int) -> Integer:
        return self * other


def is_int(value: Integer, number: int) -> bool:
    return isinstance(value, int) and value == number


def _ceil_div(a: Integer, b: Integer) -> Integer:
    return a if is_int(b, 1) else _term("-(-{} // {})", a, b)


def _floor_div(a: Integer, b: Integer) -> Integer:
    return a if is_int(b, 1) else _term("{} // {}", a, b)


def _mod(a: Integer, b: Integer) -> Integer:
    return _term("{} % {}", a, b)


def _largest(*values: Integer) -> Integer:
    return _fold("{0} if {0} > {1} else {1}", values)


def _least(*values: Integer) -> Integer:
    return _fold("{0} if {0} < {1} else {1}", values)


def _fold(text: str, values: tuple[Integer, ...]) -> Integer:
    first, *others = values
    for other in others:
        first = _term(text, first, other)
    return first


def _term(text: str, a: Integer, b: Integer) -> Integer:
    if isinstance(a, int) and isinstance(b, int):
        return eval(text.format(a, b))
    trace = a.trace if isinstance(a, Term) else b.trace
    return trace.term(text.format(a, b))


TRACED = Arithmetic(ceil_div=_ceil_div, floor_div=_floor_div, mod=_mod, max=_largest, min=_least)
