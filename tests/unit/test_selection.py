"""Which cases `make test` runs, and which are left to `make nightly`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
MODULE = """
import pytest

@pytest.mark.parametrize("case", range(5))
def test_many(case): ...

@pytest.mark.every_case
@pytest.mark.parametrize("case", range(5))
def test_all(case): ...

@pytest.mark.parametrize("case", [pytest.param(0, marks=pytest.mark.nightly), 1, 2, 3])
def test_one_at_night(case): ...

def test_one(): ...
"""
BY_DAY = ["test_many[0]", *(f"test_all[{case}]" for case in range(5)), "test_one_at_night[1]", "test_one"]
AT_NIGHT = [*(f"test_many[{case}]" for case in range(1, 5)), *(f"test_one_at_night[{case}]" for case in (0, 2, 3))]


@pytest.fixture
def collected(tmp_path):
    """Names that pytest collects of MODULE, which is in three folders of the tests, in order."""
    for folder in ("emulated", "expect", "unit"):
        (tmp_path / "tests" / folder).mkdir(parents=True)
        (tmp_path / "tests" / folder / "test_module.py").write_text(MODULE)
    (tmp_path / "tests/conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "pyproject.toml").write_text((TESTS.parent / "pyproject.toml").read_text())

    def run(*arguments):
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments]
        environ = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
        environ["TRITON_INTERPRET"] = str(int("tests/emulated" in arguments))
        output = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True).stdout
        return [line.partition("::")[2] for line in output.splitlines() if "::" in line]

    return run


def test_where_cases_take_seconds_the_first(collected):
    assert collected("tests/expect") == BY_DAY
    assert collected("tests/expect", "-m", "nightly") == AT_NIGHT
    assert sorted(collected("tests/expect", "-m", "")) == sorted(BY_DAY + AT_NIGHT)


def test_of_emulated_tests_the_last_too(collected):
    last = ["test_many[4]", "test_one_at_night[3]"]
    assert sorted(collected("tests/emulated")) == sorted(BY_DAY + last)
    assert sorted(collected("tests/emulated", "-m", "nightly")) == sorted({*AT_NIGHT} - {*last})


def test_elsewhere_all(collected):
    assert sorted(collected("tests/unit")) == sorted({*BY_DAY, *AT_NIGHT} - {"test_one_at_night[0]"})


def test_a_case_that_is_named_runs(collected):
    assert collected("tests/expect/test_module.py::test_many[2]") == ["test_many[2]"]


GARBAGE = """
import gc
import pytest

def test_by_day():
    assert not gc.isenabled()

@pytest.mark.nightly
def test_at_night():
    assert gc.isenabled()
"""


@pytest.mark.parametrize(
    ("arguments", "profile"),
    [([], ""), (["-m", "nightly"], ""), (["-k", "night", "-m", ""], "nightly")],
    ids=["day", "night", "many"],
)
def test_processes_of_the_night_collect_garbage(collected, tmp_path, arguments, profile):
    """They compile for an hour, and would grow without end."""
    (tmp_path / "tests/unit/test_garbage.py").write_text(GARBAGE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/test_garbage.py", *arguments]
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTEST_ADDOPTS", "HYPOTHESIS_PROFILE")}
    done = subprocess.run(command, cwd=tmp_path, env=environ | {"HYPOTHESIS_PROFILE": profile}, capture_output=True, text=True)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout
