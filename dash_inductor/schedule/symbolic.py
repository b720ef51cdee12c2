"""The arithmetic of the closed forms on sympy expressions: integer functions that stay as they are until all is known.

Sympy's own ceiling, Min and Max would spend seconds on simplification.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import sympy

from .times import INTEGER, Arithmetic

# Printers of torch know FloorDiv and Mod by name and write // and %; sympy's then put them into parentheses, as torch's own.
OPERATOR = 35


class IntegerFunction(sympy.Function):
    """A function of integers that is evaluated for numbers only."""

    is_integer = True

    @classmethod
    def eval(cls, *values: Any) -> Any:
        """A number, or None for what is not all numbers."""
        if all(value.is_Integer for value in values):
            return sympy.Integer(reduce(getattr(INTEGER, cls.operation), map(int, values)))  # type: ignore[attr-defined]
        return None


class CeilDiv(IntegerFunction):
    operation = "ceil_div"


class FloorDiv(IntegerFunction):
    operation = "floor_div"
    precedence = OPERATOR


class Mod(IntegerFunction):
    operation = "mod"
    precedence = OPERATOR


class Max(IntegerFunction):
    operation = "max"


class Min(IntegerFunction):
    operation = "min"


SYMBOLIC = Arithmetic(ceil_div=CeilDiv, floor_div=FloorDiv, mod=Mod, max=Max, min=Min)
