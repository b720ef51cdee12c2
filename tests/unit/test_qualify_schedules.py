"""What `qualify` times without Inductor, with a launch that is pretended: every schedule, its table, its digest."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from dash_inductor import templates
from dash_inductor.config import GLUON, Config
from dash_inductor.devices.target import Target
from dash_inductor.lowering.launch import gluon
from dash_inductor.problem import Problem
from dash_inductor.qualify import schedules
from dash_inductor.resolve import resolve
from dash_inductor.schedule.packing import pack_plan
from dash_inductor.templates.operands import Operands

H200 = Target("h200", 90, 132)


class Watch:
    """Of a clock each of whose answers is one more."""

    def __init__(self, flushed: Any) -> None:
        self.now = 0.0

    def milliseconds(self, launch: Any) -> float:
        launch()
        self.now += 1.0
        return self.now


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Operands]:
    """What each launch is given, on a CPU; gradients are others by a table of WRONG_ROLES roles, or by OTHER."""
    asked: list[Operands] = []

    def launch_of(kernel: object, operands: Operands) -> SimpleNamespace:
        def run() -> None:
            asked.append(operands)
            for x in (operands.dq, operands.dk, operands.dv):
                x.fill_(1.0 if operands.table[0] == WRONG_ROLES or kernel is OTHER else 2.0)

        return SimpleNamespace(run=run)

    monkeypatch.setattr(gluon, "launch_of", launch_of)
    for name, value in {"BATCH": 1, "LENGTH": 256, "HIDDEN": 256, "ROUNDS": 3, "Clock": Watch}.items():
        monkeypatch.setattr(schedules, name, value)
    monkeypatch.setattr(schedules, "flushed", lambda: None)
    monkeypatch.setattr(schedules, "sm_mhz", lambda: 1800)
    monkeypatch.setattr(schedules, "target_of", lambda device, settings: H200)
    return asked


WRONG_ROLES = 1
OURS, SAME, OTHER = ModuleType("ours"), ModuleType("same"), ModuleType("other")
KERNELS = {schedules.COMMITTED: OURS}


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_every_candidate_is_launched_with_its_own_table(launched: list[tuple[Any, ...]], mask: str) -> None:
    rows, far = schedules.measured(64, mask, KERNELS, "cpu")
    problem = Problem(mask, 1, 4, 4, 256, 256, 64, "bf16")
    choice = resolve(problem, Config(kernel=GLUON, template="one_pass"), H200).choice
    assert choice
    expected = [each for each in choice.considered if not each.family.endswith("round_robin")]
    assert [(row.family, row.roles, row.heads_in_flight) for row in rows] == [tuple(each[:3]) for each in expected]
    for candidate, operands in zip(expected, launched, strict=False):
        plan = schedules.replace(choice, candidate=candidate).plan()
        assert operands.table.tolist() == pack_plan(plan) and operands.workers == candidate.roles * candidate.heads_in_flight
        assert operands.causal == (mask == "causal")
    assert len({row.digest for row in rows}) == len({row.roles == WRONG_ROLES for row in rows})
    assert bool(far) == (len({row.digest for row in rows}) > 1)
    assert all(row.min_ms <= row.median_ms <= row.max_ms and row.sm_mhz == 1800 for row in rows)


def test_rows_are_kept_in_one_file(launched: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = schedules.measured
    monkeypatch.setattr(schedules, "measured", lambda *arguments: measured(*arguments, "cpu"))
    monkeypatch.setattr(schedules, "kernels", lambda variants: KERNELS)
    schedules.run(tmp_path, 60.0)
    with (tmp_path / schedules.FILE).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(int(row["head_dim"]), row["mask"]) for row in rows} == set(schedules.SHAPES)
    with (Path(__file__).parents[2] / "benchmarks/results/h200/gluon/gluon_tables.csv").open() as file:
        assert list(rows[0])[:-1] == next(csv.reader(file))
    before = len(launched)
    assert schedules.run(tmp_path, 0.0) == 0 and len(launched) == before  # the time limit


def test_the_digest_is_of_all_bits() -> None:
    zero = torch.zeros(4)
    one = schedules.digest((zero, zero, zero))
    assert one == schedules.digest((zero.clone(), zero, zero)) != schedules.digest((-zero, zero, zero))


def test_variants_take_turns_with_the_chosen_schedule(launched: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]) -> None:
    """One whose gradients are others is wrong; equal bits are told by the digest."""
    kernels = {schedules.COMMITTED: OURS, "same": SAME, "other": OTHER}
    rows, far = schedules.measured(64, "full", kernels, "cpu")
    by_name = {row.variant: row for row in rows}
    own = next(row for row in rows if (row.family, row.roles) == (by_name["same"].family, by_name["same"].roles))
    assert by_name["same"].digest == own.digest != by_name["other"].digest
    assert any(name.endswith(", other") for name in far) and not any(name.endswith(", same") for name in far)
    said = capsys.readouterr().out
    assert "other: other bits than as committed" in said and "same: other bits" not in said
    assert "fa4-deterministic: needs a GPU" in said


def test_a_variant_is_a_copy_of_the_kernel(tmp_path: Path) -> None:
    folder = tmp_path / "gluon"  # the name of the package's own
    shutil.copytree(Path(templates.__file__).parent / "gluon", folder)
    with (folder / "launch.py").open("a") as file:
        file.write("\nOPTIONS = {**OPTIONS, 'num_warps': 4}\n")
    found = schedules.kernels(str(tmp_path))
    assert list(found) == [schedules.COMMITTED, "gluon"] and found[schedules.COMMITTED] is templates.gluon_kernel()
    assert found["gluon"].OPTIONS["num_warps"] == 4 != found[schedules.COMMITTED].OPTIONS["num_warps"]
    assert found["gluon"].sdpa_backward is not found[schedules.COMMITTED].sdpa_backward
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty is no copy of templates/gluon"):
        schedules.kernels(str(tmp_path))
