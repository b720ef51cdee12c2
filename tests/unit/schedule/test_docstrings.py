"""The worked examples in docstrings, and what importing the package costs."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import subprocess
import sys

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


def test_the_package_imports_no_torch() -> None:
    code = "import sys, dash_inductor.schedule; print([m for m in ('torch', 'triton', 'numpy', 'sympy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
