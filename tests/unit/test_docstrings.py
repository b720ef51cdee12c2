"""The worked examples in docstrings."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import dash_inductor.schedule

ROOT = Path(__file__).parents[2]
FOLDERS = {folder: folder for folder in ("dash_inductor", "benchmarks", "docs")}
FOLDERS |= {folder: f"dash_inductor.{folder}" for folder in ("lowering", "templates")}
FILES = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if ">>> " in path.read_text()]


def module(path: Path) -> str:
    """The name under which a file is imported."""
    folder, *others = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([FOLDERS[folder], *others]).removesuffix(".__init__")


@pytest.mark.parametrize("name", sorted(map(module, FILES)))
def test_examples(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted and not results.failed


def test_every_family_has_an_example() -> None:
    for family in ("Ascending", "Descending", "Shift", "Symmetric", "Explicit"):
        assert ">>>" in getattr(dash_inductor.schedule, family).__doc__
