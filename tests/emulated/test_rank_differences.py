"""Two processes of a job, one of which has or does something else: what decides bits raises on both, all else on neither."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from processes import ranks

WORKER = str(Path(__file__).with_name("rank_worker.py"))
TURNS = 2


def job(folder: Path, what: str) -> list[dict[str, Any]]:
    """What came of each rank."""
    own = {1: {"DASH_INDUCTOR": "0"}} if what == "off" else None
    return [json.loads(output.splitlines()[-1]) for _, output, _ in ranks(2, [WORKER, str(folder), what], folder, 300, own)]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("schedule", "schedule is auto on rank 0 and ascending on rank 1"),
        ("torch", "torch is "),
        ("cost file", "cost file is the package's on rank 0 and another on rank 1"),
        ("verdict", "is used is True on rank 0 and False on rank 1"),
        ("off", "DASH_INDUCTOR is off on rank 1 and on on rank 0"),
    ],
)
def test_what_decides_bits_raises_on_every_rank(what: str, said: str, tmp_path: Path) -> None:
    """On the one that comes second before its first backward, on the other when it compiles again. One where the package is off has
    told that when the job began, and raises nothing."""
    first, second = job(tmp_path, what)
    assert first["backwards"] == (what != "off") and said in first["raised"]
    assert "ranks differ, and so may their bits: " in first["raised"]
    if what == "off":
        assert second["backwards"] == TURNS and not second["raised"]
    else:
        assert second["backwards"] == 0 and said in second["raised"]


@pytest.mark.parametrize("what", ["pipeline", "lengths", "late", "evaluation", "dead"])
def test_what_decides_none_does_not(what: str, tmp_path: Path) -> None:
    """Other graphs; a rank that is late; one that evaluates as well; one that is gone, of which nobody waits for anything."""
    first, second = job(tmp_path, what)
    assert first["raised"] == "" and first["backwards"] == TURNS
    assert second["raised"] == "" and second["backwards"] == TURNS * (what != "dead")
    assert not any("differ" in message for message in first["warnings"] + second["warnings"])
