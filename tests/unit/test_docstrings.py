"""The worked examples in docstrings."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest

import dash_inductor.schedule
from dash_inductor.decision import decided
from dash_inductor.explanation import report
from dash_inductor.reproduce import report as checked

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


SOURCES = [path for folder in ("dash_inductor", "lowering", "templates", "benchmarks") for path in (ROOT / folder).rglob("*.py")]


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_a_docstring_says_what_it_is_of_in_its_first_words(path: Path) -> None:
    """One that begins with "Of" or "As" can be read by who knows the thing alone."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(path.read_text())):
        text = ast.get_docstring(node) if isinstance(node, documented) else None
        assert text is None or text.split()[0] not in ("Of", "As", "Its"), text


def test_every_family_has_an_example() -> None:
    for family in ("Ascending", "Descending", "Shift", "Symmetric"):
        assert ">>>" in getattr(dash_inductor.schedule, family).__doc__


def test_the_page_of_the_api_reads_them_right() -> None:
    """Sphinx takes what stands before a colon in a property for its type, and two names of one line of attributes for one."""
    classes = [getattr(dash_inductor, name) for name in dash_inductor.__all__]
    for each in (*filter(inspect.isclass, classes), decided.Graph, report.Attention, report.Explanation, checked.Report):
        for name, value in vars(each).items():
            assert not isinstance(value, property) or ":" not in (value.__doc__ or ""), f"{each.__name__}.{name}"
        attributes = (each.__doc__ or "").partition("Attributes:")[2]
        assert not re.findall(r"^ {8}\w+,.*?:", attributes, re.MULTILINE), each.__name__
