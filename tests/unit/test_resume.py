"""A training that is stopped and resumed: one that saves all goes on with the same bits, and what another forgot is named."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import resumed_trainings

from dash_inductor import Decision, Manifest
from dash_inductor.cli.main import main
from dash_inductor.contract.graphs import graph_of
from dash_inductor.reproduce.check import Done, Place, report_of
from dash_inductor.reproduce.diverge import Operation
from dash_inductor.reproduce.resume import _added, _behind_loading

SOURCE = Path(resumed_trainings.__file__)


@pytest.fixture(autouse=True)
def in_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SOURCE.parent)


def here(name: str) -> str:
    (line,) = (number for number, line in enumerate(SOURCE.read_text().splitlines(), 1) if line.endswith(f"# HERE {name}"))
    return f"{os.path.relpath(SOURCE)}:{line}"


@pytest.mark.nightly
def test_one_that_saves_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "resumed_trainings:train", "--resume", "2", "--steps", "3"]) == 0
    text = capsys.readouterr().out
    assert "identical, 3 runs in 4 processes" in text
    assert all(how in text for how in ("without a stop", "resumed, warm caches", "resumed, cold caches"))


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("forgotten", "op", "cause"),
    [
        ("data", "aten.randint", "the torch.Generator that it draws from is in another state"),
        pytest.param("dropout", "aten.", "the random number generator is in another state", marks=pytest.mark.nightly),
        pytest.param("optimizer", "aten.lift_fresh", "only this run does it", marks=pytest.mark.nightly),
    ],
)
def test_what_was_forgotten_is_named(forgotten: str, op: str, cause: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"resumed_trainings:forgets_{forgotten}", "--resume", "1", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    difference = found["first_difference"]
    assert difference["op"].startswith(op) and cause in difference["cause"], difference
    assert difference["source"] == here(forgotten) and difference["run"] == 1
    assert not found["identical"] and not any("manifest" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(
            ["resumed_trainings:saves_nothing", "--resume", "1"],
            "it has to save there what it resumes from",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            ["resumed_trainings:takes_nothing", "--resume", "1"], "unexpected keyword argument 'save'", marks=pytest.mark.nightly
        ),
        (["resumed_trainings:train", "--resume", "2", "--steps", "2"], "stop after 1 to 1 of 2 steps, not after 2"),
        (["resumed_trainings:train", "--resume", "2", "--runs", "5"], "--resume has runs of its own"),
        (["resumed_trainings:train", "--steps", "2"], "--steps goes with --resume"),
    ],
)
@pytest.mark.every_case
def test_bad_input_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check", *arguments])
    assert ended.value.code == 2
    assert said in [line for line in capsys.readouterr().err.splitlines() if not line.startswith("[")][-1]


ATTENTION = Decision(
    *("sdpa", "h100", "bf16", "causal", 1, 8, 8, 512, 512, 64), family="shift", guarantee="run", module="blocks.0", joint="ef"
)
FACTS = {"SMs": "132", "triton": "3.7.1", "cost file": "the package's"}
HINTS = {"deterministic": 2, "benchmark": False, "gpu": False, "dynamic_later": False, "timed": False}


def manifest_of(decision: Decision, **other: str) -> Manifest:
    return Manifest(FACTS | other, {}, (graph_of("code", [decision], "graph 0/0 of GPT (backward)", None),), {})


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (
            manifest_of(ATTENTION, SMs="114"),
            "SMs is 114, and 132 in the manifest: bits of blocks.0 may differ: other SMs at level run",
        ),
        (manifest_of(ATTENTION, triton="3.8.0"), "triton is 3.8.0, and 3.7.1 in the manifest: bits of blocks.0 may differ"),
        (manifest_of(ATTENTION, **{"cost file": "ab"}), "cost file is ab, and the package's in the manifest: bits of blocks.0"),
        (manifest_of(replace(ATTENTION, q_len="s0")), "q_len is s0, and 512 in the manifest: bits of blocks.0 may differ"),
    ],
)
def test_what_manifests_of_two_processes_say(found: Manifest, line: str) -> None:
    """Of a process that runs on other SMs, with another Triton or cost file, or has a graph for any length."""
    tensors = {"what": "1 of 2 elements differ", "index": [0], "ulps": 1}
    results = [{"tensors": 1, "differing": n, "parameter": n and "w", "difference": tensors} for n in (0, 1)]
    of_first, of_other = (HINTS | {"manifest": each.to_json()} for each in (manifest_of(ATTENTION), found))
    done = [Done(Place("same", {}), 1, "first", results[0], of_first), Done(Place("fresh", {}), 2, "other", results[1], of_other)]
    report = report_of("train", done, (), lambda place: (None, "no operation"))
    assert [note for note in report.notes if line in note] == [report.notes[0]]
    alike = [done[0], done[1]._replace(facts=of_first)]
    assert not any("manifest" in note for note in report_of("train", alike, (), lambda place: (None, "no operation")).notes)


def test_the_operations_of_a_step_more() -> None:
    def operations(names: str) -> list[Operation]:
        return [Operation(name, [], [], [], None, [], False) for name in names]

    assert "".join(each.name for each in _added(operations("iababz"), operations("iabababz"))) == "ab"
    assert "".join(each.name for each in _added(operations("iab"), operations("iabab"))) == "ab"
    assert _added([], operations("ab")) == operations("ab")
    assert "".join(each.name for each in _behind_loading(operations("abb"), operations("xabyabbz"))) == "abbz"
