"""Imports point down, in no circle; the rooms at the bottom need nothing from above: schedules are pure, templates stand alone."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import networkx
import pytest

ROOT = Path(__file__).parents[2]
OPENING = {"open", "read_text", "read_bytes", "write_text", "write_bytes", "files", "urlopen"}
TOP_LEVEL = {
    *("dash_inductor", "lowering", "templates", "tests", "benchmarks", "docs", ".ci", ".github"),
    *("README.md", "CHANGELOG.md", "AGENTS.md", "SECURITY.md", "LICENSE", "CITATION.cff", "Makefile"),
    *("pyproject.toml", "constraints.txt", ".gitignore", ".pre-commit-config.yaml"),
}
# From the bottom up: a room imports rooms before it.
ROOMS = (
    *("text", "templates", "schedule", "import_hook", "dropout", "emulation", "decision", "config", "problem"),
    *("devices", "reference", "resolve", "first_use", "op", "lowering", "parallel", "rewrite"),
    *("contract", "hooks", "codegen", "explanation", "reproduce", "qualify", "step_cost", "cli", "__main__"),
)
# Modules with functions that import a module of the project, and why they do not when they are imported themselves.
LAZY = {
    "dash_inductor.cli.cost": "the command line does without torch",
    "dash_inductor.cli.demo": "the command line does without torch",
    "dash_inductor.cli.env": "torch may be missing, or fail when it is imported",
    "dash_inductor.cli.manifest": "the command line does without torch",
    "dash_inductor.cli.qualify": "the command line does without torch",
    "dash_inductor.emulation": "emulation imports Triton when it starts",
    "dash_inductor.explanation.explain": "the command line does without torch",
    "dash_inductor.hooks.joint_pass": "the lowering needs the whole of Inductor",
    "dash_inductor.rewrite.resolved": "the lowering needs the whole of Inductor",
    "dash_inductor.hooks.autoload": "`import torch` runs it, and must not fail or be slow",
    "dash_inductor.hooks.install": "`import torch` imports it, and Inductor comes when the user imports it",
    "dash_inductor.reproduce.check": "the command line does without torch",
    "dash_inductor.reproduce.step": "there may be no Triton",
    "dash_inductor.qualify.child": "a Triton without Gluon cannot import a kernel in it",
    "dash_inductor.schedule.formulas": "formulas are made when a choice is",
    "dash_inductor.schedule.orders.monotone": "formulas are made when a choice is",
    "dash_inductor.schedule.orders.shift": "formulas are made when a choice is",
    "dash_inductor.schedule.orders.symmetric": "formulas are made when a choice is",
}


def modules(folder: str) -> list[Path]:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    return paths


SOURCES = [*modules("dash_inductor"), *modules("lowering"), *modules("templates")]


def name_of(path: Path) -> str:
    """The module's name, of lowering/ and templates/ as they are installed."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "dash_inductor" else ("dash_inductor", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {name_of(path) for path in SOURCES}


def test_nothing_strays_to_the_top_level():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert {path.partition("/")[0] for path in tracked} == TOP_LEVEL


def imports(path: Path, tree: ast.AST | None = None) -> Iterator[str]:
    """The absolute names of what a module, or a part of it, imports."""
    name = name_of(path)
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    for node in ast.walk(tree or ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module
            assert base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def modules_in(names: Iterator[str]) -> set[str]:
    """The modules of the project among these names, or those that have them."""
    ours = {name if name in NAMES else name.rpartition(".")[0] for name in names if name.partition(".")[0] == "dash_inductor"}
    assert ours <= NAMES, ours - NAMES
    return ours


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_point_down(path):
    """Those of functions and of annotations too. The package loads its public names when they are asked for; it has the version."""
    if name_of(path) == "dash_inductor":
        return
    room = name_of(path).split(".")[1]
    for name in modules_in(name for name in imports(path) if name != "dash_inductor.__version__"):
        assert name != "dash_inductor", "it imports the package, which has every name"
        assert ROOMS.index(name.split(".")[1]) <= ROOMS.index(room), name


def test_there_is_no_circle():
    graph = networkx.DiGraph()
    for path in SOURCES:
        graph.add_edges_from((name_of(path), name) for name in modules_in(imports(path)) if name != name_of(path))
    # A package imports its modules, and they import each other.
    graph.remove_edges_from([(a, b) for a, b in graph.edges if a.startswith(f"{b}.") or b.startswith(f"{a}.")])
    assert list(networkx.simple_cycles(graph)) == []


def test_imports_in_functions_are_named():
    lazy = set()
    for path in SOURCES:
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        if any(modules_in(imports(path, function)) for function in functions):
            lazy.add(name_of(path))
    assert lazy == set(LAZY)


@pytest.mark.parametrize("path", modules("dash_inductor/schedule"), ids=name_of)
def test_schedules_are_pure(path):
    """They import each other, Python's own modules and sympy alone, and open no file."""
    for name in imports(path):
        top = name.partition(".")[0]
        assert name.startswith("dash_inductor.schedule") or top == "sympy" or top in sys.stdlib_module_names, name
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
        "from dash_inductor.schedule import Costs, TiledProblem\n"
        "assert not {'numpy', 'sympy'} & set(sys.modules)\n"
        "from dash_inductor.schedule.choice import choose\n"
        "costs = Costs('a', 'sm_90', step_ns=3000, hop_ns=1500, shift_percent=7, workers=132, l2_bytes=50 << 20, estimate=True)\n"
        "print(choose(TiledProblem(8192, 8192, 32, 1, 64, 64, 128, 'full'), costs).family)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.strip() in ("ascending", "shift")


def test_formulas_are_made_when_a_choice_is():
    """Everybody who imports Inductor imports what decides, also those who compile no attention."""
    program = (
        "import sys, dash_inductor.decision, dash_inductor.resolve\n"
        "made = {f'dash_inductor.schedule.formulas.{name}' for name in ('monotone', 'shift', 'symmetric', 'two_pass')}\n"
        "assert not made & set(sys.modules)\n"
        "from dash_inductor.schedule.formulas import formula_for\n"
        "for family in 'descending', 'shift', 'symmetric', 'two_pass':\n"
        "    formula_for(family, 'causal')\n"
        "assert made <= set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("path", modules("templates"), ids=name_of)
def test_templates_import_nothing_of_the_project(path):
    assert all(name.startswith("dash_inductor.templates") or not name.startswith("dash_inductor") for name in imports(path))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_the_package_does_without_tests_and_benchmarks(path):
    """And without what only they need."""
    assert not {name.partition(".")[0] for name in imports(path)} & {"tests", "benchmarks", "pandas", "scipy"}


def test_few_files_stand_beside_the_rooms():
    assert len([path for path in (ROOT / "dash_inductor").iterdir() if path.is_file()]) <= 10
