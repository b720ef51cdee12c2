"""What `qualify` compiles for a GPU that is not there: all graphs of its stages, once, for one version of everything."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from dash_inductor.cli.main import main
from dash_inductor.qualify import prepare, stages
from dash_inductor.qualify.kernels import CASES

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
        of_cases = {(name, "") for name in CASES} if part == 1 else set()
        assert {(pair.contender, pair.shape) for pair in pairs} == expected | of_cases


@pytest.mark.parametrize("name", ["torch", "triton", "python"])
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
