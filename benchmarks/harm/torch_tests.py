"""Torch's own test files, of a checkout: a plugin of pytest that writes down what came of each test, a line of JSON per test."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

# Of the folder test/ of a checkout: those that are about what the package touches.
FILES = (
    "inductor/test_fused_attention.py",
    "inductor/test_flex_attention.py",
    "inductor/test_codecache.py",
    "test_transformers.py",
)
DETERMINISTIC, OUTCOMES = "HARM_DETERMINISTIC", "HARM_OUTCOMES"  # variables: "1" or "0", and the file of outcomes


def found(folder: Path) -> list[Path]:
    """Those of FILES that are there; or the folder's own test files, if none is."""
    return [folder / name for name in FILES if (folder / name).exists()] or sorted(folder.glob("test_*.py"))


def pytest_configure() -> None:
    """Deterministic mode, before a test file is imported."""
    import torch

    torch.use_deterministic_algorithms(os.environ[DETERMINISTIC] == "1")


def pytest_runtest_logreport(report: Any) -> None:
    """A test that failed has the outcome of its exception. One that is skipped tried nothing."""
    if report.skipped or (report.when != "call" and report.passed):
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    outcome = crash.message.partition("\n")[0].partition(":")[0] if crash is not None else report.outcome
    with Path(os.environ[OUTCOMES]).open("a") as out:
        print(json.dumps({"case": report.nodeid, "outcome": outcome}), file=out)
