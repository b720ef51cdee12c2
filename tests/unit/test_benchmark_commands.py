"""The benchmarks' commands, and the script of the first run on a GPU, where there is none."""

import itertools
import json
import os
import re
import statistics
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pandas
import pytest
import torch
from attention_results import H100, STOCK, result

from benchmarks import gpu_tests, red_throughput, tuning
from benchmarks.attention import contenders as who
from benchmarks.attention import environment, runner
from benchmarks.attention.__main__ import main
from benchmarks.attention.measure import LostDeviceError, Result
from benchmarks.attention.rows import OK, read
from benchmarks.attention.shapes import MODELS, QUICK, SWEEP, Shape
from benchmarks.block_masks import __main__ as block_masks
from benchmarks.schedules import __main__ as schedules
from dash_inductor.cli import main as cli

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "benchmarks" / "gpu_first_run.sh"


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
    assert runner.chosen_shapes("llama*b,d64-full-512", []) == [MODELS[0], next(s for s in SWEEP if s.name == "d64-full-512")]
    assert runner.chosen_shapes(None, QUICK) == list(QUICK)
    assert list(runner.chosen_contenders("sdpa-cudnn,ours", STOCK, [who.BASELINE, who.BASELINE])) == [
        who.BASELINE, "sdpa-flash", "ours", "ours-unordered", "sdpa-cudnn",
    ]  # fmt: skip
    assert list(runner.chosen_contenders("sdpa-flash", STOCK, [who.FLEX_BASELINE])) == ["sdpa-flash", "flex"]
    assert list(runner.chosen_contenders(None, STOCK, [who.BASELINE])) == list(STOCK)


def test_list(no_gpu, capsys):
    assert main(["--list", "--shapes", "llama3-8b", "--contenders", "ours"]) == 0
    said = capsys.readouterr().out
    assert "llama3-8b" in said and "needs a GPU" in said


def measured(shape: Shape, contenders, rounds, baseline, say, pace) -> list[Result]:
    """In place of a GPU: every contender takes as many ms as there are rounds, and one faults at one shape."""
    if shape.name == "d64-full-512" and "flex" in contenders:
        raise LostDeviceError("flex", RuntimeError("an illegal memory access"))
    return [result(name, *[1.0] * rounds, contender=contender) for name, contender in contenders.items()]


@pytest.fixture
def pretended_gpu(monkeypatch):
    monkeypatch.setattr(runner, "has_gpu", lambda: True)
    monkeypatch.setattr(runner, "environment", lambda: H100)
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
    rows = {(row.shape, row.contender): row for row in read(tmp_path / runner.FILE).itertuples()}
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
    rows = {row.contender: row.status for row in read(tmp_path / runner.FILE).itertuples()}
    assert rows.pop(who.BASELINE) == "failed: a kernel faulted: gone"
    assert rows == {"sdpa-flash": OK, "ours": OK, "ours-unordered": OK}


def test_ratios_at_shapes_of_flex_attention_are_to_stock_flex(pretended_gpu, tmp_path):
    assert main(["--shapes", "llama3-8b*", "--contenders", "ours", "--out", str(tmp_path), "--no-pictures"]) == 0
    rows = {(row.shape, row.contender): row for row in read(tmp_path / runner.FILE).itertuples()}
    for shape, baseline in (("llama3-8b", who.BASELINE), ("llama3-8b-packed", "flex")):
        assert (rows[shape, "ours"].baseline, rows[shape, "ours"].speedup) == (baseline, 1.0)


def test_an_interrupted_run_says_what_is_left(pretended_gpu, tmp_path, monkeypatch):
    def interrupted(shape, *others):
        if shape.name == "d64-full-512":
            raise KeyboardInterrupt
        return measured(shape, *others)

    monkeypatch.setattr(runner, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main(["--shapes", "d64-full-2048,d64-full-1024,d64-full-512", "--contenders", "sdpa-flash", "--out", str(tmp_path)])
    assert {(row.shape, row.status) for row in read(tmp_path / runner.FILE).itertuples()} == {
        ("d64-full-2048", OK), ("d64-full-512", "not run: interrupted"), ("d64-full-1024", "not run: interrupted"),
    }  # fmt: skip


def test_time_limit(pretended_gpu, tmp_path):
    assert main(["--quick", "--minutes", "0", "--out", str(tmp_path)]) == 0
    rows = read(tmp_path / runner.FILE)
    assert set(rows["shape"]) == {shape.name for shape in QUICK}
    assert set(rows["status"]) == {"not run: the time limit"}


def test_json(pretended_gpu, tmp_path, capsys):
    arguments = ["--shapes", "llama3-8b", "--contenders", "ours-release-after-s", "--json", "--out", str(tmp_path)]
    assert tuning.main([*arguments, "--label", "before"]) == 0
    capsys.readouterr()
    assert tuning.main([*arguments, "--rounds", "2"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert all((row["run"], row["times_ms"], row["sms"], row["sm_mhz"]) == ("", [1.0] * 2, 132, None) for row in rows)
    assert [row["contender"] for row in rows] == ["ours", "ours-unordered", "ours-release-after-s"]
    assert {row["baseline"] for row in rows} == {"ours"} and {row["speedup"] for row in rows} == {1.0}


def test_red_throughput(tmp_path):
    cases = list(red_throughput.cases())
    times = {case: [2.0, 4.0, 2.0] if case.operation == "red" else [1.0, 2.0, 1.0] for case in cases}
    table = red_throughput.table_of(times, "NVIDIA H100", 132)
    rows = list(table.itertuples())
    for case, row in zip(cases, rows, strict=True):
        added = 132 * case.ctas_per_sm * red_throughput.STEPS * 64 * 128 * 4
        assert row.tb_per_s == pytest.approx(added / (row.median_ms / 1e3) / 1e12)
        assert row.ratio == (0.5 if case.operation == "red" else 1.0)
    in_l2, beyond = (next(row for row in rows if row.pattern == f"own tiles {where}") for where in ("in L2", "beyond L2"))
    assert in_l2.mib < 50 < 500 < beyond.mib
    red_throughput.write(tmp_path / "red.csv", table)
    assert len((tmp_path / "red.csv").read_text().splitlines()) == 1 + len(rows)
    pandas.testing.assert_frame_equal(red_throughput.read(tmp_path / "red.csv"), table)


def test_schedules(tmp_path, capsys):
    """A few lines of the file, and a summary of them."""
    assert schedules.main(["--every", "440"]) == 0
    shown = capsys.readouterr().out
    rows = [schedules.row(point) for point in itertools.islice(schedules.points(), 0, None, 440)]
    schedules.write(schedules.table_of(rows), tmp_path / "schedules.csv")
    header, *lines = (schedules.RESULTS / "schedules.csv").read_text().splitlines()
    assert (tmp_path / "schedules.csv").read_text().splitlines() == [header, *lines[::440]]
    *groups, overall = schedules.summary(schedules.table_of(rows))
    assert sum(int(group["shapes"]) for group in groups) == int(overall["shapes"]) == len(rows) == 6
    assert overall["chosen"] == f"{statistics.fmean(row.chosen / row.bound for row in rows):.3f}" and overall["chosen"] in shown
    assert overall["paper's best"] == f"{statistics.fmean(row.paper / row.bound for row in rows):.3f}"
    assert overall["at most"] == f"{max(row.chosen / row.bound for row in rows):.2f}" and overall["paper faster"] == "0"
    assert overall["with the margin"].endswith(f", {max(row.cautious / row.paper for row in rows):.3f} of the paper's at most")


def test_block_masks(tmp_path, capsys, monkeypatch):
    """A third of the file, with more chains than CTAs; a picture and a summary of it."""
    header, *lines = (block_masks.RESULTS / "block_masks.csv").read_text().splitlines()
    points = list(block_masks.points())
    kept = [(point, line) for point, line in zip(points, lines, strict=True) if point[0] == 16]
    monkeypatch.setattr(block_masks, "points", lambda: [point for point, _ in kept])
    monkeypatch.setattr(block_masks, "RESULTS", tmp_path)
    assert block_masks.main([]) == 0
    assert (tmp_path / "block_masks.csv").read_text().splitlines() == [header, *(line for _, line in kept)]
    assert (tmp_path / "block_masks.png").exists() == (find_spec("matplotlib") is not None)
    rows = pandas.read_csv(tmp_path / "block_masks.csv").query("hop_percent == 75")
    over = list(rows["ascending_up"] / rows["bound"])
    assert len(over) == 14 and f"{statistics.fmean(over):.2f}, {max(over):.2f}" in capsys.readouterr().out


def first_run(*arguments: str, script: Path = SCRIPT, **environ: str) -> subprocess.CompletedProcess:
    environ = {**os.environ, "PYTHON": sys.executable, **environ}
    return subprocess.run(["bash", str(script), *arguments], env=environ, capture_output=True, text=True)


def first_run_with(folder: Path, old: str, new: str) -> Path:
    """The script with a line of another text, beside what it looks for."""
    script = folder / "benchmarks" / "first_run.sh"
    script.parent.mkdir()
    text = SCRIPT.read_text()
    assert old in text
    script.write_text(text.replace(old, new))
    return script


def stages_of(out: Path) -> list[str]:
    """What the summary says of each stage, without its seconds."""
    return [line.rpartition(",")[0] for line in (out / "summary.txt").read_text().splitlines()]


def interpreter(folder: Path, body: str) -> str:
    """A program in place of Python."""
    path = folder / "python"
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)
    return str(path)


PARTS = {
    "1": ["tests", "additions", "order", "glance"],
    "2": ["tuning", "costs", "placement"],
    "3": ["table", "two-pass", "gluon"],
}


def dry_run(*arguments: str) -> tuple[list[list[str]], list[str]]:
    """The words of every stage's line, and the lines of the parts."""
    said = first_run("--dry-run", *arguments)
    assert said.returncode == 0, said.stderr
    lines = said.stdout.splitlines()
    return [line.split() for line in lines if line[0] in PARTS], [line for line in lines if line.startswith("part ")]


def test_stages_of_the_first_run(tmp_path):
    stages, parts = dry_run(str(tmp_path / "out"))
    assert [(part, name) for part, name, *_ in stages] == [(part, name) for part, names in PARTS.items() for name in names]
    assert not (tmp_path / "out").exists()
    head = SCRIPT.read_text().partition("set -euo")[0]
    for part, said in zip(PARTS, parts, strict=True):
        limits = {name: int(limit) for number, name, limit, *_ in stages if number == part}
        in_all = 30 + 5 + sum(limit + 5 for limit in limits.values())  # and the environment; 5 s to end
        assert said == f"part {part}: at most {in_all} s of 540 s" and in_all <= 540
        alone, (line,) = dry_run("--part", part, str(tmp_path))
        assert [name for _, name, *_ in alone] == PARTS[part] and line == said
        for name, limit in limits.items():
            assert re.search(rf"\b{name} {limit} s\b", head), name  # as its top says
    assert [name for _, name, *_ in dry_run("--stages", "additions,table", str(tmp_path))[0]] == ["additions", "table"]


def test_a_part_past_its_budget(tmp_path):
    said = first_run("--dry-run", "out", script=first_run_with(tmp_path, "stage tuning 190 ", "stage tuning 290 "))
    assert said.returncode == 1 and "part 2: at most 635 s of 540 s" in said.stdout


def taken(command, arguments: list[str]) -> None:
    """A command on a machine without a GPU: it takes its arguments and says that it needs one."""
    with pytest.raises(SystemExit) as ended:
        command(arguments)
    assert ended.value.code == 2


def test_commands_of_the_first_run(tmp_path, pretended_gpu, monkeypatch, capsys):
    """Every stage's command takes its arguments, and ends by itself before its limit."""
    started: list[list[str]] = []
    monkeypatch.setattr(gpu_tests, "_pytest", lambda deadline, *arguments: started.append(list(arguments)) or 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(red_throughput, "require_gpu", lambda parser: parser.exit(2, "needs a GPU"))
    for _, name, limit, _, _, _, module, *arguments in dry_run(str(tmp_path))[0]:
        if "--minutes" in arguments:
            assert 60 * float(arguments[arguments.index("--minutes") + 1]) <= int(limit) - 10
        if "--jobs" in arguments and module.startswith("benchmarks"):
            jobs = arguments.index("--jobs")
            arguments = [*arguments[:jobs], *arguments[jobs + 2 :]]
        match module:
            case "benchmarks.attention" | "benchmarks.tuning":
                assert {"benchmarks.attention": main, "benchmarks.tuning": tuning.main}[module](arguments) in (0, 1), name
            case "benchmarks.gpu_tests":
                assert gpu_tests.main(arguments) == 0
            case "benchmarks.red_throughput":
                taken(red_throughput.main, arguments)
            case "dash_inductor":
                taken(cli.main, arguments)
                assert "calibrate measures a GPU" in capsys.readouterr().err
    runs = {row.run for row in read(tmp_path / runner.FILE).itertuples()}
    assert runs == {name for names in PARTS.values() for name in names} - {"tests", "additions", "costs"}
    named = {part for arguments in started for part in arguments if part.startswith("tests/")}
    assert named == {f"tests/gpu/{path.name}" for path in (ROOT / "tests" / "gpu").glob("test_*.py")}


def test_gpu_tests_end_in_time(tmp_path, monkeypatch, capfd):
    """Past the time limit pytest is interrupted, which says what failed until then, and the next group has its turn."""
    slow, quick = tmp_path / "test_slow.py", tmp_path / "test_quick.py"
    slow.write_text("import time\n\ndef test_wrong():\n    assert 1 == 2\n\ndef test_slow():\n    time.sleep(100)\n")
    quick.write_text("def test_quick():\n    pass\n")
    groups = (gpu_tests.Group((str(slow), "-p", "no:xdist"), False, 0.5), gpu_tests.Group((str(quick),), False, 1.0))
    monkeypatch.setattr(gpu_tests, "GROUPS", groups)
    monkeypatch.setattr(gpu_tests, "HELPERS", ("pytest",))
    assert gpu_tests.main(["--minutes", "0.5"]) == gpu_tests.TIME_LIMIT
    said = capfd.readouterr().out
    for part in ("::test_wrong FAILED", "assert 1 == 2", "what is left of these tests was not run", "1 passed"):
        assert part in said


def test_a_stage_that_fails_is_recorded_and_the_rest_go_on(tmp_path):
    python = interpreter(
        tmp_path,
        """case "$*" in
            *gpu_tests*) echo no pytest; exit 3 ;;
            *red_throughput*) echo broken >&2; exit 7 ;;
            *environment*) echo gpu: pretended; mkdir -p "${@: -1}" ;;
        esac""",
    )
    out = tmp_path / "out"
    said = first_run("--stages", "tests,additions,table", str(out), PYTHON=python)
    assert said.returncode == 1
    assert stages_of(out) == ["stage tests: not available", "stage additions: failed (exit code 7)", "stage table: ok"]
    log = (out / "log.txt").read_text()
    assert log.startswith("gpu: pretended\n") and "broken" in log
    assert first_run("--stages", "table", str(out), PYTHON=python).returncode == 0
    assert first_run("--part", "1", "--stages", "table", str(tmp_path / "nothing"), PYTHON=python).returncode == 0


def test_a_stage_that_takes_too_long(tmp_path):
    script = first_run_with(tmp_path, "stage additions 40 ", "stage additions 1 ")
    python = interpreter(tmp_path, 'mkdir -p "$PWD/out"; [[ "$*" != *red_throughput* ]] || exec sleep 60')
    out = tmp_path / "out"
    assert first_run("--stages", "additions,order", str(out), script=script, PYTHON=python).returncode == 1
    assert stages_of(out) == ["stage additions: time limit", "stage order: ok"]


def test_a_first_run_whose_environment_is_not_known(tmp_path):
    """It goes on all the same."""
    python = interpreter(tmp_path, '[[ "$*" != *environment* ]] || { echo broken; exit 1; }')
    assert first_run("--stages", "order", str(tmp_path / "out"), PYTHON=python).returncode == 1
    lines = (tmp_path / "out" / "summary.txt").read_text().splitlines()
    assert lines[0] == "environment: failed (exit code 1)" and lines[1].startswith("stage order: ok")


def test_nvidia_smi(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\n[ $1 = --query-gpu=clocks.sm,power.draw ] && echo '1980, 350.5' && echo '0, 0' || echo 580.1\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert environment.nvidia_smi("clocks.sm", "power.draw") == ["1980", "350.5"]
    assert environment.nvidia_smi("driver_version") == ["580.1"]
    assert environment.nvidia_smi("driver_version", "clocks.mem") == ["", ""]
    monkeypatch.setenv("PATH", "/nowhere")
    assert environment.nvidia_smi("clocks.sm") == [""] and environment.sm_mhz() is None


def test_first_run_without_a_gpu(tmp_path):
    said = first_run(str(tmp_path / "out"), CUDA_VISIBLE_DEVICES="")
    assert said.returncode == 2 and "needs a GPU" in said.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("line", ["", "--stages x out", "--stages table, out", "--part 4 out", "--part", "a b", "--new out"])
def test_first_run_with_wrong_arguments(line):
    said = first_run(*line.split())
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
