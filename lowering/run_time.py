"""What generated code computes of sizes that are known at run time only, by a pure function of integers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields as fields_of
from dataclasses import is_dataclass
from typing import Any

import sympy

from dash_inductor.schedule.choice import RunTimeChoice
from dash_inductor.schedule.parts import RunTimeParts
from dash_inductor.text import digest

from .header import add_to_header, root_graph


def fields(rule: RunTimeChoice | RunTimeParts, name: str, *sizes: sympy.Expr) -> dict[str, sympy.Expr]:
    """The fields of the rule, none of them negative; where a size is a symbol, calls of one object of the generated module, `name`
    and a digest. The rule's repr makes it again."""

    def value(index: int, *known: sympy.Expr) -> sympy.Integer | None:
        return sympy.Integer(rule(int(index), *map(int, known))) if all(size.is_Integer for size in known) else None

    if all(size.is_Integer for size in sizes):
        return {field: sympy.Integer(rule(index, *map(int, sizes))) for index, field in enumerate(rule.FIELDS)}
    name = f"dash_{name}_{digest(repr(rule))}"
    imports = dict.fromkeys(f"from {each.__module__} import {each.__name__}\n" for each in _classes(rule))
    add_to_header(root_graph(), f"{''.join(imports)}\n{name} = {rule!r}\n")
    evaluated = classmethod(lambda cls, index, *known: value(index, *known))
    function = type(name, (sympy.Function,), {"eval": evaluated, "is_integer": True, "is_nonnegative": True})
    return {field: function(sympy.Integer(index), *sizes) for index, field in enumerate(rule.FIELDS)}


def _classes(value: Any) -> Iterator[type]:
    """The classes that the repr of a dataclass calls: its own, and those of fields."""
    if is_dataclass(value):
        yield type(value)
        for field in fields_of(value):
            yield from _classes(getattr(value, field.name))
