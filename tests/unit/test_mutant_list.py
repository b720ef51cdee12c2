"""The mutants of `make mutants`, without running them: each changes one place of its file, and its test exists."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
MUTANTS = tomllib.loads((ROOT / "tests/mutants/mutants.toml").read_text())["mutant"]


def test_each_changes_one_place():
    for mutant in MUTANTS:
        text = (ROOT / mutant["file"]).read_text()
        assert text.count(mutant["old"]) == 1, mutant
        assert mutant["old"] != mutant["new"], mutant


def test_each_has_a_test():
    for mutant in MUTANTS:
        file, _, name = mutant["test"].partition("::")
        functions = {node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}
        assert name.partition("[")[0] in functions, mutant


@pytest.mark.nightly
@pytest.mark.parametrize("emulated", [False, True])
def test_each_case_is_one_of_its_test(emulated):
    """pytest runs none of the tests that it is given if it does not find one."""
    named = sorted({mutant["test"] for mutant in MUTANTS if mutant["test"].startswith("tests/emulated/") == emulated})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", *named]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": str(int(emulated))}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_names_are_of_one_mutant():
    assert max(Counter(mutant["name"] for mutant in MUTANTS).values()) == 1
    assert len(MUTANTS) >= 25
