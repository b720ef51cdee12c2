"""Imports point down, and the rooms at the bottom need nothing from above: schedules are pure, templates stand alone."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OPENING = {"open", "read_text", "read_bytes", "write_text", "write_bytes", "files", "urlopen"}


def modules(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found
    return found


def imported(path: Path) -> Iterator[str]:
    """The absolute names of what a module imports, wherever in it."""
    package = ".".join(path.relative_to(ROOT).with_suffix("").parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module
            assert base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


@pytest.mark.parametrize("path", modules("dash_inductor/schedule"), ids=lambda path: path.stem)
def test_schedules_are_pure(path):
    """Of the project they import each other alone, of others Python's own modules and sympy; they open no file."""
    for name in imported(path):
        top = name.partition(".")[0]
        assert within(name, "dash_inductor.schedule") or top == "sympy" or top in sys.stdlib_module_names, name
        assert top not in ("importlib", "os", "io", "pathlib", "subprocess"), name
    called = {
        getattr(node.func, "id", getattr(node.func, "attr", ""))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    }
    assert not called & OPENING


def test_schedules_do_without_torch():
    program = (
        "import sys; sys.modules['torch'] = sys.modules['triton'] = None\n"
        "from dash_inductor.schedule import Costs, Shape, choose\n"
        "costs = Costs('a', 'sm_90', step_ns=3000, hop_ns=1500, shift_percent=7, workers=132, l2_bytes=50 << 20, estimate=True)\n"
        "print(choose(Shape(8192, 8192, 32, 1, 64, 64, 128, 'full'), costs).family)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.strip() in ("ascending", "shift")


@pytest.mark.parametrize("path", modules("templates"), ids=lambda path: path.stem)
def test_templates_import_nothing_of_the_project(path):
    assert all(
        within(name, "templates") or name.partition(".")[0] not in ("dash_inductor", "lowering", "benchmarks")
        for name in imported(path)
    )


@pytest.mark.parametrize("path", modules("dash_inductor/devices"), ids=lambda path: path.stem)
def test_devices_know_schedules_and_tiles(path):
    below = ("dash_inductor.devices", "dash_inductor.schedule", "dash_inductor.templates")
    for name in imported(path):
        assert not within(name, "dash_inductor") or any(within(name, package) for package in below), name


@pytest.mark.parametrize("path", [*modules("dash_inductor"), *modules("lowering"), *modules("templates")], ids=str)
def test_the_package_does_without_tests_and_benchmarks(path):
    """And without what they alone need."""
    assert not [name for name in imported(path) if name.partition(".")[0] in ("tests", "benchmarks", "pandas", "scipy")]
