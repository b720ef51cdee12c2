"""What `qualify` compiles for a GPU that is not there: all graphs of its stages, once, for one version of everything."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from attention_results import empty_operands

from dash_inductor.cli.main import main
from dash_inductor.codegen.fake_gpu import fake_gpu
from dash_inductor.lowering.launch import gluon
from dash_inductor.qualify import prepare, stages
from dash_inductor.qualify.child import TASKS
from dash_inductor.qualify.contenders import GLUON_ONLY
from dash_inductor.qualify.kernels import CASES, Case
from dash_inductor.qualify.shapes import Shape
from dash_inductor.templates import gluon_kernel

SMALL = ["--stages", "glance", "--shapes", "causal:1x2x2x256x64", "--contenders", "ours-triton,flex,sdpa-cudnn"]


def prepared(folder: Path, capsys: pytest.CaptureFixture[str], device: str = "h200") -> dict[str, str]:
    """What the command says."""
    assert main(["qualify", "--prepare", str(folder), "--device", device, *SMALL]) == 0
    lines = (line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.startswith("  "))
    return {name: value for name, value in lines}


@pytest.mark.nightly
def test_nothing_is_left_to_compile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beginning with what was prepared the same command compiles no kernel. For another GPU it does not begin."""
    first, again = (prepared(tmp_path, capsys) for _ in range(2))
    assert first["graphs"] == again["graphs"] == "2" and first["compiled"] == first["kernels"] == again["kernels"]
    assert int(first["kernels"]) >= 6 and again["compiled"] == "0"
    assert {path.name for path in tmp_path.iterdir()} == {prepare.PACKED, prepare.ABOUT}
    with pytest.raises(SystemExit):
        prepared(tmp_path, capsys, "h100")
    assert "was prepared with device h200, and here is h100" in capsys.readouterr().err
    caches = tmp_path / "caches"
    about = prepare.unpack(tmp_path, caches)
    assert about and prepare.kernels_in(caches) == about["kernels"] == int(first["kernels"])


def test_every_graph_of_the_stages_is_compiled_once() -> None:
    for part in (1, 2, 3):
        own = [stage for stage in stages.FULL if stage.part == part]
        pairs = prepare.pairs_of(own)
        assert len(pairs) == len(set(pairs))
        jobs = [stage.job for stage in own if stage.job]
        graphs = [(shape.name, job.chosen()) for job in jobs for shape in job.chosen_shapes()]
        expected = {(name, shape) for shape, chosen in graphs for name, each in chosen.items() if each.compiled}
        expected |= {(name, "") for name in CASES} if part == 1 else set()
        if part == 2:
            sizes = [f"{mask}:2x{2048 // d}x{2048 // d}x8192x{d}" for d in (64, 128) for mask in ("causal", "full")]
            expected |= {(name, shape) for name in ("flex", "ours-two-pass") for shape in sizes}
            sizes = [f"d{d}-{mask}-8192" for d in (64, 128) for mask in ("causal", "full")]
            expected |= {(name, shape) for name in ("flex", "ours-two-pass", "ours-gluon", "ours-triton") for shape in sizes}
        assert {(pair.contender, pair.shape) for pair in pairs} == expected


@pytest.mark.parametrize("name", ["torch", "triton", "python", "sources"])
def test_other_versions_are_refused(tmp_path: Path, name: str) -> None:
    about: dict[str, Any] = {"device": "h200", **prepare.versions(), name: "0.1"}
    (tmp_path / prepare.ABOUT).write_text(json.dumps(about))
    said = f"{tmp_path} was prepared with {name} 0.1, and here is {prepare.versions()[name]}"
    with pytest.raises(ValueError, match=said.replace("+", r"\+")):
        prepare.unpack(tmp_path, tmp_path / "caches")


def test_a_process_that_dies_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there then is no whole preparation."""
    monkeypatch.setattr(prepare, "child", lambda *_, **__: [sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(ValueError, match=r"was not prepared: a process that compiled ended with status 3"):
        prepare.run([], tmp_path, "h200", tmp_path / "caches", dict(os.environ), 2)
    assert not (tmp_path / prepare.ABOUT).exists()


def test_a_folder_without_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare.unpack(tmp_path, tmp_path / "caches") is None
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(SystemExit):
        main(["qualify", "--prepared", str(tmp_path)])
    assert f"--prepared {tmp_path}: --prepare has left nothing there" in capsys.readouterr().err


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], int]:
    """How many kernels Triton's cache holds, which is empty at first."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "triton"))
    return lambda: prepare.kernels_in(tmp_path)


def test_the_gluon_kernel_of_tensors_without_memory_is_that_of_others(compiled: Callable[[], int]) -> None:
    """They share a place in Triton's cache; another shape has another."""

    def launch(device: str, heads: int) -> gluon.Launch:
        return gluon.launch_of(gluon_kernel(), empty_operands(device, heads, 64))

    def capability(device: torch.device | None = None) -> tuple[int, int]:
        if device is not None and device.type != "cuda":
            raise ValueError(f"Expected a cuda device, but got: {device}")  # as torch says where there is one
        return 9, 0

    before = compiled()
    with fake_gpu("h200"), mock.patch.object(torch.cuda, "get_device_capability", capability):
        launch("meta", 4).compile()
        first = compiled()
        gluon_kernel().sdpa_backward.device_caches.clear()  # of this process
        launch("cpu", 4).compile()
        assert compiled() == first == before + 1
        launch("meta", 16).compile()  # heads that 16 divides
        assert compiled() == first + 1


@pytest.mark.nightly
@pytest.mark.parametrize("case", [Case("Gluon", Shape("", "causal", 1, 2, 2, 512, 64), GLUON_ONLY)], ids=str)
def test_what_a_first_use_tries_is_compiled_too(case: Case, compiled: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, case.name, case)
    trials: dict[Any, Any] = {}
    assert prepare._compiled("h200", prepare.Pair(case.name, ""), trials) is None
    ((kind, settings),) = trials.items()
    assert (kind.kernel, kind.head_dim, settings.guard) == ("gluon", 64, "off")
    of_graph = compiled()
    assert prepare._compiled_trial("h200", kind, settings) is None and compiled() > of_graph >= 3
    everything = compiled()
    torch._dynamo.reset()
    assert prepare._compiled("h200", prepare.Pair(case.name, ""), {}) is None and compiled() == everything
    assert "head dim 512 is outside" in str(prepare._compiled_trial("h200", replace(kind, head_dim=512, value_dim=512), settings))


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What processes are started for, which do nothing."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(prepare, "child", lambda task, **job: found.append({"task": task, **job}) or [sys.executable, "-c", ""])
    return found


@pytest.mark.parametrize("task", ["schedules", "marks", "profile"])
def test_kernels_that_no_graph_has_are_compiled_for_each_stage_that_launches_them(
    task: str, tasks: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Parts are prepared apart: `profile` and `marks` are not in that of `schedules`."""
    chosen = [stage for stage in stages.FULL if stage.task == task]
    prepare.run(chosen, tmp_path, "h200", tmp_path / "caches", dict(os.environ), 0)
    assert chosen and [job["task"] for job in tasks] == ["prepare schedules"]


def test_each_process_has_a_task_that_there_is(tasks: list[dict[str, Any]], tmp_path: Path) -> None:
    """For all stages; variants are handed on."""
    chosen = [replace(stage, arguments={**stage.arguments, "variants": "V"}) for stage in stages.FULL if stage.task == "schedules"]
    prepare.run([*stages.FULL, *chosen], tmp_path, "h200", tmp_path / "caches", dict(os.environ), 2)
    assert {job["task"] for job in tasks} == {"prepare", "prepare schedules", "prepare training"} <= set(TASKS)
    assert [job for job in tasks if "variants" in job] == [{"task": "prepare schedules", "device": "h200", "variants": "V"}]
