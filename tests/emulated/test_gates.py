"""The gates of `check` on trainings as four kinds of trainers write them: those that are clean pass, planted faults are named."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gated_trainings
import pytest

pytestmark = pytest.mark.nightly

TRAINERS = ("nanogpt", "torchtitan", "trainer", "lightning")
CLEAN = (
    *([f"{name}", "--resume", "2", "--steps", "3"] for name in TRAINERS),
    *([f"{name}_step"] for name in TRAINERS),
    ["of_any_length", "--resume", "2", "--steps", "4"],
    ["nanogpt_step", "--elsewhere"],
    ["attends_once", "--elsewhere"],
)


def checked(name: str, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit status and the report of the command."""
    command = [sys.executable, "-m", "dash_inductor", "check", f"gated_trainings:{name}", *arguments, "--json"]
    environment = os.environ | {"DASH_INDUCTOR_EMULATE": "1"}
    folder = Path(gated_trainings.__file__).parent
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode < 2, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("arguments", CLEAN, ids=" ".join)
def test_clean(arguments: list[str]) -> None:
    status, found = checked(*arguments)
    assert status == 0 and found["identical"]
    assert len(found["runs"]) >= 2 and all(run["tensors"] > 0 for run in found["runs"])


@pytest.mark.parametrize(
    ("fault", "how", "line"),
    [
        (
            "on_other_sms",
            ("--resume", "1", "--steps", "2"),
            "sms is 4, and 8 in the manifest: bits of .* may differ: other sms at level run",
        ),
        (
            "of_the_first_length",
            ("--resume", "2", "--steps", "4"),
            "a function was compiled for one size first, and for sizes that vary later",
        ),
        (
            "in_the_order_of_a_set",
            ("--kinds", "fresh", "--runs", "1"),
            "the Python code before this line did not do the same",
        ),
    ],
)
def test_faults(fault: str, how: tuple[str, ...], line: str) -> None:
    """In a training that is resumed, and in a fresh process, whose strings have other hashes.

    tests/unit/test_resume.py has what a dropped state does, and what manifests say of Triton and cost files.
    """
    status, found = checked(fault, *how)
    said = [*found["notes"], str(found["first_difference"]["cause"])]
    assert status == 1 and not found["identical"] and any(re.search(line, each) for each in said), said
