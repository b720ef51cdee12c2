"""A CUDA error ends the process of the GPU tests that has it: with xdist others go on, without it pytest says what was not run."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

GPU_TESTS = Path(__file__).parent.parent / "gpu"
# In torch's place, which takes seconds to import in each process.
TORCH = """
from types import SimpleNamespace

LOST = []

def synchronize():
    if LOST:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\\nand more")

cuda = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, synchronize=synchronize)
"""
CONFTEST = """
import pytest
from torch import LOST
from lost_device import pytest_runtest_protocol

@pytest.fixture
def lose():
    return lambda: LOST.append(True)

@pytest.fixture(autouse=True)
def on_a_device_that_works():
    assert not LOST
"""
TESTS = """
import pytest
from pathlib import Path

@pytest.mark.parametrize("n", range(8))
def test_numbered(n, lose, record_testsuite_property):
    with open("ran", "a") as file:
        file.write(f"{n}\\n")
    if n == 2:
        lose()
        raise RuntimeError("the kernel faulted")
    if n == 5:
        lose()  # comes to light in no call of the test
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    (folder / "torch.py").write_text(TORCH)
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_numbers.py").write_text(TESTS)
    environ = {**os.environ, "PYTHONPATH": str(GPU_TESTS)}
    environ.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300)


def ran(folder: Path) -> list[str]:
    return sorted((folder / "ran").read_text().split())


def test_without_xdist(tmp_path):
    said = run(tmp_path, "-p", "no:xdist")
    assert said.returncode == 1
    assert ran(tmp_path) == ["0", "1", "2"]
    assert "RuntimeError: the kernel faulted" in said.stdout and "1 failed, 2 passed" in said.stdout
    assert (
        "the device is lost after test_numbers.py::test_numbered[2]: CUDA error: an illegal memory access was encountered; "
        "the tests that are left were not run"
    ) in said.stdout


@pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="needs pytest-xdist")
def test_with_xdist(tmp_path):
    """Every test runs once, on a device that works; the two that lost one are told by name."""
    said = run(tmp_path, "-n", "1")
    assert said.returncode == 1
    assert ran(tmp_path) == [str(n) for n in range(8)]
    assert "RuntimeError: the kernel faulted" in said.stdout
    for n in (2, 5):
        assert f"crashed while running 'test_numbers.py::test_numbered[{n}]'" in said.stdout
    # Number 2 failed and ended its worker, number 5 passed and ended its own.
    assert "3 failed, 7 passed" in said.stdout
