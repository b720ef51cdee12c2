"""The cells that `make execute` goes through; by night, their tenth."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest

from benchmarks.machine_code import gates
from dash_inductor.codegen import mods
from dash_inductor.templates.tiles import HALF_DTYPES

from . import cells
from .cases import Case


def test_every_cell_of_the_gates_is_one() -> None:
    """And what they do not compile: packed sequences and masks on every GPU, Gluon's round robins, and its functions."""
    named = cells.cells()
    others = {name for name in named if name.split()[-1] in ("varlen", "masked") or "in-a-queue" in name}
    of_gates = named.keys() - others - dict(cells.with_functions()).keys()
    assert len(of_gates) == len(gates.cells())
    assert {case.device for case in named.values() if case.attention == "varlen"} == set(gates.DEVICES.values())
    assert {case.device for case in named.values() if case.in_bands} == set(gates.DEVICES.values())
    assert all(isinstance(size, int) for case in named.values() for size in (case.q_len, case.kv_len, case.kv_heads, case.batch))
    assert any(case.settings.get("kernel") == "gluon" for case in named.values())
    assert len(named) / 15 < len(cells.tenth()) < len(named) / 7
    assert list(cells.tenth()) == list(named)[: len(cells.tenth())]


def test_functions_under_masks() -> None:
    """Each function is under each mask at each of the head dims, and has each dtype and each way to cut chains."""
    named = dict(cells.with_functions())
    of = [(case.score_mod, case.mask_mod, case.head_dim, case.value_dim) for case in named.values()]
    assert len(named) == len({*of}) >= 150 and named.keys() <= cells.cells().keys()
    assert {kind[:2] for kind in of} == {*product(mods.SCORE_MODS, cells.FUNCTION_MASKS)}
    assert all(case.settings["kernel"] == "gluon" and max(case.q_len, case.kv_len) <= 384 for case in named.values())
    for function in mods.SCORE_MODS:
        own = {name: case for name, case in named.items() if case.score_mod == function}
        assert {case.dtype for case in own.values()} == {*HALF_DTYPES}
        assert {chains for name in own for chains in cells.CHAINS if name.endswith(f"-{chains}")} == {*cells.CHAINS}


def test_a_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executed: list[Case] = []

    def execute(case: Case, seeds: int, races: bool, barriers: bool) -> dict[str, object]:
        executed.append(case)
        return {"bad": [], "seconds": 1.0}

    monkeypatch.setattr(cells, "executed", execute)
    monkeypatch.setattr(cells, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))
    todo = dict(list(cells.cells().items())[:3])
    first, log = next(iter(todo)), tmp_path / "log.jsonl"
    log.write_text(json.dumps({"cell": first, "bad": ["a race"], "seconds": 2.0}) + "\n")
    assert list(cells.run(todo, log, 0, True)) == [first] and not executed
    results = cells.run(todo, log, 1, True)
    assert sorted(map(id, executed)) == sorted(map(id, list(todo.values())[1:])) and results[first]["bad"] == ["a race"]
    assert cells.run(todo, log, 1, True) == results and len(executed) == 2
    assert sum(line["bad"] for line in cells.summary(results)) == 1


def test_some_lines_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others keep what they say, and their commit."""
    monkeypatch.setattr(cells, "RESULTS", tmp_path)
    named = [f"{name} bf16 d=64 full" for name in ("sm_80 one_pass", "sm_90 gluon")]
    rows = cells.summary({name: {"cell": name, "bad": [], "seconds": 1} for name in named})
    path = cells.write("3.7.1", rows)
    path.write_text(path.read_text().replace("sm_80,1", "sm_80,7"))
    cells.write("3.7.1", rows[1:])
    assert [line.split(",")[1:4] for line in path.read_text().replace('"', "").splitlines()[1:]] == [
        ["sm_80", "7", "0"],
        ["sm_90", " Gluon", "1"],
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda case: None, ""),
        (lambda case: setattr(case, "mask", "diagonal"), "unknown mask"),
        (lambda case: case.settings.update(template="two_pass"), "keeps its stock kernel|takes whatever SMs are free"),
    ],
)
def test_what_cannot_be_executed_is_bad(change: Callable[[Case], None], said: str) -> None:
    case = Case("h100", 128, 128, heads=1, settings={"template": "one_pass", "kernel": "triton", "sm_reserve": 129})
    change(case)
    bad = cells.executed(case, 1, races=True)["bad"]
    assert bool(bad) == bool(said) and all(any(part in text for part in said.split("|")) for text in bad)


@pytest.mark.nightly
@pytest.mark.parametrize("name", cells.tenth())
def test_the_tenth(name: str, record_property: Callable[[str, object], None]) -> None:
    """Five interleavings, the first with races: right, and the same bits."""
    result = cells.executed(cells.tenth()[name], cells.SEEDS, races=True)
    assert result["bad"] == []
    record_property("steps executed", result["steps"])
