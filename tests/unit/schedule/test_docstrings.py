"""The worked examples in docstrings."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import dash_inductor.schedule

MODULES = sorted(m.name for m in pkgutil.walk_packages(dash_inductor.schedule.__path__, "dash_inductor.schedule."))
COMMANDS = [f"dash_inductor.commands.{name}" for name in ("choose", "compare", "simulate")]


@pytest.mark.parametrize("name", MODULES + COMMANDS)
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_every_family_has_an_example() -> None:
    for family in ("Ascending", "Descending", "Shift", "Symmetric", "Explicit"):
        assert ">>>" in getattr(dash_inductor.schedule, family).__doc__
