"""The benchmarks' commands, and the script of the first run on a GPU, where there is none."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import red_throughput, tuning
from benchmarks.attention import contenders as who
from benchmarks.attention import runner
from benchmarks.attention.__main__ import main
from benchmarks.attention.environment import Environment
from benchmarks.attention.measure import LostDeviceError, Result
from benchmarks.attention.rows import OK, read
from benchmarks.attention.shapes import MODELS, QUICK, SWEEP, Shape

ROOT = Path(__file__).parent.parent.parent
HOPPER = Environment("NVIDIA H100", 132, "580.1", "2.11.0", "3.6.0")
STOCK = who.contenders()


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("command", [main, tuning.main, red_throughput.main], ids=["attention", "tuning", "red"])
def test_without_a_gpu(command, no_gpu, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        command(["--out", str(tmp_path)])
    assert ended.value.code == 2
    assert "needs a GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "d64-*,nothing"], "no shape is called 'nothing'"),
        (["--contenders", "flex,theirs"], "no contender is called 'theirs'"),
        (["--rounds", "0"], "0 is not a positive number"),
        (["--from", "missing.csv"], "missing.csv"),
    ],
)
def test_arguments_that_make_no_sense(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_choosing():
    assert runner.chosen_shapes("llama*,d64-full-512", []) == [MODELS[0], next(s for s in SWEEP if s.name == "d64-full-512")]
    assert runner.chosen_shapes(None, QUICK) == list(QUICK)
    assert list(runner.chosen_contenders("flex,ours", STOCK, who.BASELINE)) == [
        who.BASELINE, "sdpa-flash", "ours", "ours-unordered", "flex",
    ]  # fmt: skip
    assert list(runner.chosen_contenders(None, STOCK, who.BASELINE)) == list(STOCK)


def test_list(no_gpu, capsys):
    assert main(["--list", "--shapes", "llama3-8b", "--contenders", "ours"]) == 0
    said = capsys.readouterr().out
    assert "llama3-8b" in said and "needs a GPU" in said


def measured(shape: Shape, contenders, rounds, baseline, say, pace) -> list[Result]:
    """In place of a GPU: every contender takes as many ms as there are rounds, and one faults at one shape."""
    if shape.name == "d64-full-512" and "flex" in contenders:
        raise LostDeviceError("flex", RuntimeError("an illegal memory access"))
    return [Result(c, OK, who.Prepared(lambda: ()), True, {"dq": 0.0}, 0, times_ms=(1.0,) * rounds) for c in contenders.values()]


@pytest.fixture
def pretended_gpu(monkeypatch):
    monkeypatch.setattr(runner, "has_gpu", lambda: True)
    monkeypatch.setattr(runner, "environment", lambda: HOPPER)
    monkeypatch.setattr(runner, "sm_mhz", lambda: None)
    monkeypatch.setattr(runner, "measure", measured)

    def started(command, **_):
        """Another process, in this one."""
        assert command[:3] == [sys.executable, "-m", "benchmarks.attention"]
        return subprocess.CompletedProcess(command, main(command[3:]))

    monkeypatch.setattr(runner, "subprocess", SimpleNamespace(run=started, DEVNULL=subprocess.DEVNULL))


def test_a_kernel_that_faults_fails_alone(pretended_gpu, tmp_path, capsys):
    """Another process goes on with its shape, and it is left out from there on."""
    names = "d128-full-512,d64-full-512,d64-full-1024"
    arguments = ["--shapes", names, "--contenders", "flex", "--out", str(tmp_path), "--rounds", "3", "--label", "x", "--json"]
    assert main([*arguments, "--minutes", "5"]) == 1
    rows = {(row.shape, row.contender): row for row in read(tmp_path / runner.FILE)}
    assert len(rows) == 9 and {row.run for row in rows.values()} == {"x"}
    for shape in names.split(","):
        assert {rows[shape, name].status for name in (who.BASELINE, "sdpa-flash")} == {OK}
        assert {rows[shape, name].rounds for name in (who.BASELINE, "sdpa-flash")} == {3}
    assert [rows[shape, "flex"].status for shape in ("d128-full-512", "d64-full-512", "d64-full-1024")] == [
        OK, "failed: a kernel faulted: an illegal memory access", "not run: a kernel faulted at d64-full-512",
    ]  # fmt: skip
    said = capsys.readouterr()
    assert said.out.rstrip().endswith("]") and '"contender": "flex"' in said.out
    assert "[2/3]" in said.err and "flex faulted: an illegal memory access" in said.err


def test_a_baseline_that_faults(pretended_gpu, tmp_path, monkeypatch):
    def faulting(shape, contenders, rounds, baseline, say, pace):
        if baseline in contenders:
            raise LostDeviceError(baseline, RuntimeError("gone"))
        return measured(shape, contenders, rounds, baseline, say, pace)

    monkeypatch.setattr(runner, "measure", faulting)
    assert main(["--shapes", "llama3-8b", "--contenders", "ours", "--out", str(tmp_path)]) == 1
    rows = {row.contender: row.status for row in read(tmp_path / runner.FILE)}
    assert rows.pop(who.BASELINE) == "failed: a kernel faulted: gone"
    assert rows == {"sdpa-flash": OK, "ours": OK, "ours-unordered": OK}


def test_an_interrupted_run_says_what_is_left(pretended_gpu, tmp_path, monkeypatch):
    def interrupted(shape, *others):
        if shape.name == "d64-full-512":
            raise KeyboardInterrupt
        return measured(shape, *others)

    monkeypatch.setattr(runner, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main(["--shapes", "d64-full-2048,d64-full-1024,d64-full-512", "--contenders", "sdpa-flash", "--out", str(tmp_path)])
    assert {(row.shape, row.status) for row in read(tmp_path / runner.FILE)} == {
        ("d64-full-2048", OK), ("d64-full-512", "not run: interrupted"), ("d64-full-1024", "not run: interrupted"),
    }  # fmt: skip


def test_time_limit(pretended_gpu, tmp_path):
    assert main(["--quick", "--minutes", "0", "--out", str(tmp_path)]) == 0
    rows = read(tmp_path / runner.FILE)
    assert {row.shape for row in rows} == {shape.name for shape in QUICK}
    assert {row.status for row in rows} == {"not run: the time limit"}


def test_json(pretended_gpu, tmp_path, capsys):
    import json

    assert tuning.main(["--shapes", "llama3-8b", "--contenders", "ours-release-after-s", "--json", "--out", str(tmp_path)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["contender"] for row in rows] == ["ours", "ours-unordered", "ours-release-after-s"]
    assert {row["baseline"] for row in rows} == {"ours"} and {row["speedup"] for row in rows} == {1.0}


def test_red_throughput(tmp_path):
    cases = list(red_throughput.cases())
    times = {case: [2.0, 4.0, 2.0] if case.operation == "red" else [1.0, 2.0, 1.0] for case in cases}
    rows = red_throughput.rows_of(times, "NVIDIA H100", 132)
    for case, row in zip(cases, rows, strict=True):
        added = 132 * case.ctas_per_sm * red_throughput.STEPS * 64 * 128 * 4
        assert row.tb_per_s == pytest.approx(added / (row.median_ms / 1e3) / 1e12)
        assert row.ratio == (0.5 if case.operation == "red" else 1.0)
    in_l2, beyond = (next(row for row in rows if row.pattern == f"own tiles {where}") for where in ("in L2", "beyond L2"))
    assert in_l2.mib < 50 < 500 < beyond.mib
    red_throughput.write(tmp_path / "red.csv", rows)
    assert len((tmp_path / "red.csv").read_text().splitlines()) == 1 + len(rows)


SCRIPT = ROOT / "benchmarks" / "gpu_first_run.sh"


def first_run(*arguments: str, **environ: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments], env={**os.environ, "PYTHON": sys.executable, **environ}, capture_output=True, text=True
    )


def interpreter(folder: Path, body: str) -> str:
    """A program in place of Python."""
    path = folder / "python"
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_stages_of_the_first_run(tmp_path):
    said = first_run("--dry-run", str(tmp_path / "out"))
    assert said.returncode == 0, said.stderr
    *stages, last = said.stdout.splitlines()
    assert [line.split()[:2] for line in stages] == [
        ["1", "tests"], ["2", "additions"], ["3", "tuning"], ["4", "order"], ["5", "costs"],
        ["6", "placement"], ["7", "table"], ["8", "two-pass"], ["9", "gluon"],
    ]  # fmt: skip
    limits = [int(line.split()[2]) for line in stages]
    assert sum(limits) < 25 * 60
    assert last.startswith("in all at most")
    assert not (tmp_path / "out").exists()
    assert len(first_run("--dry-run", "--stages", "2,7", str(tmp_path)).stdout.splitlines()) == 3


def test_commands_of_the_first_run(tmp_path, pretended_gpu):
    """Every command of the benchmark's own has arguments that it takes, and measures within its stage's limit."""
    for line in first_run("--dry-run", str(tmp_path)).stdout.splitlines()[:-1]:
        _, _, limit, _, _, _, module, *arguments = line.split()
        command = {"benchmarks.attention": main, "benchmarks.tuning": tuning.main}.get(module)
        if command is not None:
            minutes = float(arguments[arguments.index("--minutes") + 1])
            assert 60 * minutes < int(limit)
            jobs = arguments.index("--jobs")
            assert command([*arguments[:jobs], *arguments[jobs + 2 :]]) in (0, 1)
    assert {"tuning", "order", "placement", "table", "two-pass", "gluon"} == {row.run for row in read(tmp_path / runner.FILE)}


def test_a_stage_that_fails_is_recorded_and_the_rest_go_on(tmp_path):
    python = interpreter(
        tmp_path,
        """case "$*" in
            *gpu_tests*) echo no pytest; exit 3 ;;
            *red_throughput*) echo broken >&2; exit 7 ;;
            *environment*) echo gpu: pretended ;;
        esac""",
    )
    out = tmp_path / "out"
    said = first_run("--stages", "1,2,7", str(out), PYTHON=python)
    assert said.returncode == 1
    summary_lines = (out / "summary.txt").read_text().splitlines()
    assert summary_lines[0] == "gpu: pretended"
    assert [line.rpartition(",")[0] for line in summary_lines[1:]] == [
        "stage 1, tests: not available", "stage 2, additions: failed (exit code 7)", "stage 7, table: ok",
    ]  # fmt: skip
    assert "broken" in (out / "log.txt").read_text()
    assert first_run("--stages", "7", str(out), PYTHON=python).returncode == 0


def test_a_stage_that_takes_too_long(tmp_path):
    script = tmp_path / "benchmarks" / "first_run.sh"
    script.parent.mkdir()
    text = SCRIPT.read_text()
    assert "stage 2 additions 60 " in text
    script.write_text(text.replace("stage 2 additions 60 ", "stage 2 additions 1 "))
    python = interpreter(tmp_path, '[[ "$*" != *red_throughput* ]] || exec sleep 60')
    out = tmp_path / "out"
    said = subprocess.run(
        ["bash", str(script), "--stages", "2,4", str(out)], env={**os.environ, "PYTHON": python}, capture_output=True, text=True
    )
    assert said.returncode == 1
    lines = [line.rpartition(",")[0] for line in (out / "summary.txt").read_text().splitlines()]
    assert lines == ["stage 2, additions: time limit", "stage 4, order: ok"]


def test_first_run_without_a_gpu(tmp_path):
    said = first_run(str(tmp_path / "out"), CUDA_VISIBLE_DEVICES="")
    assert said.returncode == 2 and "needs a GPU" in said.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [(), ("--stages", "x", "out"), ("a", "b"), ("--unknown", "out")])
def test_first_run_with_wrong_arguments(arguments):
    said = first_run(*arguments)
    assert said.returncode == 2 and "usage:" in said.stderr


def test_nothing_heavy_is_imported():
    """The commands start where rich and matplotlib are missing."""
    code = """
import sys
import benchmarks.attention.__main__, benchmarks.red_throughput, benchmarks.tuning
print(sorted({"rich", "matplotlib"} & set(sys.modules)))
"""
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
