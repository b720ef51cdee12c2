"""`python -m dash_inductor qualify` rehearsed on a pretended H100: stages and texts. What it prints was never measured."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.device_interface as device_interface
from attention_results import result
from test_calibration import pretended as pretended_ns
from torch.autograd import DeviceType

from benchmarks.attention import merge
from dash_inductor import config
from dash_inductor.cli import env_torch
from dash_inductor.cli.main import main
from dash_inductor.codegen.fake_gpu import fake_gpu
from dash_inductor.devices.cost_files import FOLDER, has_estimates, require_of
from dash_inductor.qualify import (
    additions,
    child,
    costs,
    gpu_tests,
    kernel_times,
    kernels,
    marks,
    overlaps,
    runner,
    schedules,
    stages,
    training,
)
from dash_inductor.qualify.measure import Result
from dash_inductor.qualify.rows import OK, read
from tests.unit.expected_text import assert_expected

GPU = "NVIDIA H100 80GB HBM3"
PART_3 = {"marks.csv", "overlaps.csv", "training.csv", "timings.jsonl", "costs.toml"}
STATUS = {"two passes, d = 256": "refused: declined: no tile"}


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the command line says on its way out, in one line, with status 2."""
    with pytest.raises(SystemExit) as stopped:
        main(["qualify", *words])
    out, err = capsys.readouterr()
    last = err.splitlines()[-1]
    assert (stopped.value.code, out) == (2, "") and last.startswith("python -m dash_inductor qualify: error: ")
    return last.removeprefix("python -m dash_inductor qualify: error: ")


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """A pretended one: each stage's task runs here, on times that the test makes up. The tasks that ran."""
    ran: list[str] = []

    def measured(shape: Any, contenders: Any, rounds: int, baseline: str, say: Any, pace: Any) -> Any:
        slower = {"ours": 2.4, "ours-unordered": 2.35}
        return [
            Result(each, f"not available: {name[:3]} is not importable")
            if name.startswith("fa")
            else result(name, *[slower.get(name, 6.0)] * rounds, contender=each)
            for name, each in contenders.items()
        ]

    def ended(command: list[str], seconds: float, environ: Any, log: Any, echo: Any) -> tuple[str, int]:
        assert command[:3] == [sys.executable, "-m", "dash_inductor.qualify.child"] and "TRITON_INTERPRET" not in environ
        ran.append(json.loads(command[3])["task"])
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            code = child.main(command[3])
        print(said.getvalue(), end="", file=log)
        for line in said.getvalue().splitlines():
            echo(line)
        return stages.SAID.get(code, f"failed (exit code {code})"), code

    def finding(case: kernels.Case, deadline: float) -> kernels.Finding:
        status = STATUS.get(case.name, OK)
        errors = {"dq": 0.003, "dk": 0.002, "dv": 0.002} if status == OK else {}
        return kernels.Finding(case.name, status, errors, kernels.ALLOWED[case.shape.dtype], 20 if errors else 0, "descending", 1.0)

    monkeypatch.setattr(config, "_current", config.Config())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91000)
    monkeypatch.setattr(stages, "_ended", ended)
    monkeypatch.setattr(runner, "measure", measured)
    monkeypatch.setattr(runner, "_compile_first", lambda *_: None)
    monkeypatch.setattr(kernels, "_in_a_process", finding)
    synthetic = {case: [1.0, 1.0] for case in additions.cases()}
    monkeypatch.setattr(additions, "measure", lambda: additions.table_of(synthetic, GPU, 132))
    own = schedules.Timed("as committed", 128, "full", "shift", 64, 2, 4.2, 4.1, 4.3, "abc", 1800)
    monkeypatch.setattr(schedules, "measured", lambda *_: ([own], []))
    timed = kernel_times.KernelTime("as committed", "d128-causal-8192", "flex", "", "main", 2800.0, 20, 1800)
    monkeypatch.setattr(kernel_times, "kernels_of", lambda shape, name: [timed])
    monkeypatch.setattr(marks, "chains", lambda kernel, head_dim, mask: [marks.Mark(head_dim, mask, "shift", *range(9))])
    monkeypatch.setattr(overlaps, "measured", lambda n: overlaps.Overlap(overlaps.WITH[n], 128.0, 127.0, 129.0))
    monkeypatch.setattr(training, "steps", lambda way, mode: [training.Step(way, mode, 8192, "ok", 40.0, 39.0, 41.0, True, 30.0)])
    monkeypatch.setattr(training, "tried", lambda kernel: [])
    monkeypatch.setattr(costs, "measure", pretended_ns)
    monkeypatch.setattr(costs, "compile_first", lambda *_: None)
    monkeypatch.setattr(gpu_tests, "_pytest", lambda deadline, *arguments: 0)
    monkeypatch.setenv("PATH", "/nowhere")  # where no nvidia-smi is
    with fake_gpu("h100"):
        yield ran


def test_the_first_minutes(h100: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.0.0")
    monkeypatch.setattr("triton.__version__", "3.0.0")
    monkeypatch.setattr(stages.time, "monotonic", lambda: 0.0)
    assert main(["qualify"]) == 0
    assert h100 == ["environment", "kernels", "measure"]
    out, err = capsys.readouterr()
    assert_expected(out, "qualify")
    assert "[2/3] kernels: " in err and f"  [{len(kernels.CASES)}/{len(kernels.CASES)}] " in err


def test_as_json(h100: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The same, with shapes that are given."""
    sizes = "causal:1x8x2x4096x128"
    assert main(["qualify", "--json", "--shapes", f"llama3-8b,{sizes}", "--contenders", "ours"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {
        *("environment", "stages", "kernels", "backwards", "predictions", "targets", "kernels_of_one_pass", "wrong", "written"),
    }  # fmt: skip
    assert report["environment"]["gpu"] == GPU and [stage["said"] for stage in report["stages"]] == ["ok"] * 3
    assert {row["shape"] for row in report["backwards"]} == {"llama3-8b", sizes}
    assert {row["contender"] for row in report["backwards"]} == {"ours", "ours-unordered", "sdpa-flash-strict", "sdpa-flash"}
    assert all(each["held"] and each["ratio"] == pytest.approx(2.4 / 2.5) for each in report["predictions"])
    assert report["wrong"] == [] and report["written"] is None


@pytest.mark.nightly
@pytest.mark.parametrize("part", [1, 2, 3])
def test_every_stage_of_a_full_run(part: int, h100: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["qualify", "--full", "--part", str(part), "--out", str(out)]) == 0
    expected = [stage for stage in stages.FULL if stage.part == part]
    assert h100 == [stage.task for stage in expected]
    lines = (out / "summary.txt").read_text().splitlines()
    said = {"profile": stages.NO_TESTS}  # no ncu is here
    assert [line.rpartition(",")[0] for line in lines] == [f"stage {stage.name}: {said.get(stage.name, OK)}" for stage in expected]
    runs = {row.run for row in read(out / "attention.csv")}
    assert runs == {stage.name for stage in expected if stage.task == "measure"}
    files = {1: {"kernels.jsonl"}, 2: {"gluon_tables.csv", "kernel_times.csv", "red_throughput.csv"}, 3: PART_3}[part]
    assert {path.name for path in out.iterdir()} == files | {
        "environment.json",
        "attention.csv",
        "summary.txt",
        "log.txt",
        "report",
    }
    reported = {path.name for path in (out / "report").iterdir()}
    assert files | {"attention.csv", "report.md"} <= reported and any(name.endswith(".png") for name in reported)
    assert f"Kept in: {out}" in capsys.readouterr().out


@pytest.mark.nightly
def test_folders_of_the_parts_merge(h100: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(tmp_path / f"part{part}") for part in (1, 2, 3)]
    for part, folder in enumerate(folders, 1):
        assert main(["qualify", "--full", "--part", str(part), "--out", folder]) == 0
    assert merge.main([*folders, "--out", str(tmp_path / "merged")]) == 0
    report = (tmp_path / "merged" / "report.md").read_text()
    titles = [line for line in report.splitlines() if line.startswith("## ")]
    assert {"## Kernels, against float64", "## Tuning", "## Kinds", "## Cost constants", "## fp32 additions in L2"} <= set(titles)
    assert "## What went wrong\n\nNo row says so.\n" in report and "| two passes, d = 256 | refused: declined: no tile |" in report


def test_what_a_stage_leaves_the_next_one_has(
    h100: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what a stage itself may begin within is longer by as much."""
    seen: list[stages.Stage] = []
    run = stages.run
    monkeypatch.setattr(stages, "run", lambda stage, *others: (seen.append(stage), run(stage, *others))[1])
    monkeypatch.setattr(stages.time, "monotonic", lambda: 0.0)  # no stage takes any time
    assert main(["qualify"]) == 0
    _, kernels_, glance = stages.DEFAULT
    assert glance.job
    assert [stage.seconds for stage in seen] == [20, 20 + 70, 20 + 70 + 75]
    assert seen[1].arguments["seconds"] == kernels_.arguments["seconds"] + 20
    assert seen[2].job and seen[2].job.seconds == (glance.job.seconds or 0) + 90
    assert "at most 20 s for environment, 70 s for kernels, 75 s for glance" in capsys.readouterr().err


def test_a_cost_file_that_is_written(h100: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is one for the setting `costs`, and nothing takes it until then."""
    path = tmp_path / "mine.toml"
    assert main(["qualify", "--write", str(path)]) == 0
    assert h100 == ["environment", "kernels", "measure", "costs"] and f"Written: {path}" in capsys.readouterr().out
    assert require_of(str(path), GPU, 90) and not has_estimates(str(path)) and config.current().costs == ""
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_wrong_is_said_last(
    h100: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STATUS, "as chosen", "not deterministic: launch 12 of 20 has other bits than the first")
    trial = "refused: declined: two_pass (...) failed its trial on this GPU: dq is 1 off"
    monkeypatch.setitem(STATUS, "two passes, full, d = 64", trial)
    monkeypatch.setitem(STATUS, "one pass, shift", "not run: the time limit")

    def measured(shape: Any, contenders: Any, *_: Any) -> Any:
        wrong = {"ours": "wrong: dq 1.0e+00 off, allowed 1.0e-02", "flex": "failed: RuntimeError"}
        return [result(name, 1.0, contender=each, status=wrong.get(name, OK)) for name, each in contenders.items()]

    monkeypatch.setattr(runner, "measure", measured)
    assert main(["qualify", "--shapes", "llama3-8b"]) == 1
    out = capsys.readouterr().out
    assert "Not checked, for want of time: one pass, shift\n" in out
    (line,) = (line for line in out.splitlines() if line.startswith("llama3-8b  ours  "))
    assert line.split() == ["llama3-8b", "ours", "2.0e-03", "wrong:", *line.split()[4:]]  # it has no time
    assert main(["qualify", "--shapes", "llama3-8b", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["wrong"] == [
        "as chosen: not deterministic: launch 12 of 20 has other bits than the first",
        f"two passes, full, d = 64: {trial}",
        "ours at llama3-8b: wrong: dq 1.0e+00 off, allowed 1.0e-02",
        "stage kernels: failed (exit code 1)",
    ]


def test_an_interruption_keeps_what_was_done(
    h100: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = stages._ended

    def interrupted(command: list[str], *others: Any) -> Any:
        return ("interrupted", None) if "measure" in command[3] else ended(command, *others)

    monkeypatch.setattr(stages, "_ended", interrupted)
    assert main(["qualify", "--write", str(tmp_path / "mine.toml")]) == 1
    out = capsys.readouterr().out
    assert "one pass, full, d = 64" in out and "stage glance: interrupted" in out and "Backwards" not in out
    assert h100 == ["environment", "kernels"] and not list(tmp_path.iterdir())


def test_without_a_gpu_there_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert refused(capsys) == "qualify needs a GPU, and torch.cuda.is_available() is False here"


def test_a_gpu_without_tiles_is_told_as_env_tells_it(
    h100: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    v100 = SimpleNamespace(name="Tesla V100-SXM2-32GB", major=7, minor=0, multi_processor_count=80)
    worker = device_interface.get_interface_for_device("cuda").Worker
    monkeypatch.setattr(worker, "get_device_properties", lambda device=None: v100)
    problems: list[str] = []
    env_torch._target(torch.device("cuda", 0), problems)
    assert [refused(capsys)] == problems and "Tesla V100" in problems[0]
    assert h100 == ["environment"]


def test_a_cost_file_of_another_gpu(
    h100: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "costs.toml"
    path.write_text((FOLDER / "h100.toml").read_text().replace("NVIDIA H100 80GB HBM3", "NVIDIA H200", 1))
    monkeypatch.setattr(config, "_current", config.Config(costs=str(path)))
    assert refused(capsys) == f"cost file {path} is of NVIDIA H200 (sm_90), and this device is {GPU} (sm_90)"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--part 1", "--part is of --full"),
        ("--variants .", "--variants is of --full"),
        ("--full", "--full keeps what it finds: give --out DIR"),
        ("--full --out x --shapes llama3-8b", "--full has shapes and contenders of its own"),
        ("--write mine", "--write mine: a cost file ends in .toml"),
        (f"--write {FOLDER}/h100.toml", "the package's own cost files come with its releases alone"),
        ("--stages glance,costs", "there is no stage 'costs'; there are environment, kernels, glance"),
        ("--shapes nothing", "no shape is called 'nothing'"),
        ("--contenders theirs", "no contender is called 'theirs'"),
    ],
)
def test_arguments_that_make_no_sense(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(capsys, *words.split())


def test_each_part_is_within_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    """A stage ends by itself before its limit; the time of the file is that of the sum."""
    for part in (1, 2, 3):
        own = [stage for stage in stages.FULL if stage.part == part]
        assert stages.seconds_of(own) <= stages.BUDGET
        assert main(["qualify", "--full", "--part", str(part), "--out", "x", "--dry-run"]) == 0
        out = capsys.readouterr().out
        assert f"at most {stages.seconds_of(own)} s" in out and all(stage.name in out for stage in own)
    assert stages.seconds_of(stages.DEFAULT) <= stages.DEFAULT_BUDGET
    for stage in (*stages.FULL, *stages.DEFAULT):
        within = stage.job.seconds if stage.job else stage.arguments.get("seconds")
        assert within is None or within <= stage.seconds - 10
        if stage.job:
            assert stage.job.chosen()


def test_stages_run_alone(h100: list[str], tmp_path: Path) -> None:
    assert main(["qualify", "--full", "--stages", "additions,two-pass", "--out", str(tmp_path)]) == 0
    assert h100 == ["environment", "additions", "measure"]


def ended(program: str, seconds: float) -> tuple[tuple[str, int | None], str, list[str]]:
    log, echoed = io.StringIO(), []
    with open(os.devnull, "w") as stderr:
        log.fileno = stderr.fileno  # type: ignore[method-assign]
        outcome = stages._ended([sys.executable, "-c", program], seconds, os.environ, log, echoed.append)
    return outcome, log.getvalue(), echoed


def test_how_a_stage_ends() -> None:
    assert ended("print('a'); print('b')", 60) == (("ok", 0), "a\nb\n", ["a", "b"])
    assert ended("raise SystemExit(7)", 60)[0] == ("failed (exit code 7)", 7)
    assert ended("raise SystemExit(3)", 60)[0] == ("not available", 3)
    assert ended("raise SystemExit(124)", 60)[0] == ("time limit", 124)


@pytest.mark.nightly
def test_a_stage_that_takes_too_long_ends_with_what_it_started(tmp_path: Path) -> None:
    """Also one that does not listen."""
    mark = tmp_path / "mark"
    grandchild = f"import time; time.sleep(8); open({str(mark)!r}, 'w')"
    program = (
        f"import os, signal, subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {grandchild!r}])\n"
        "print(os.getpid(), flush=True)\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(100)"
    )
    start = time.monotonic()
    outcome, _, echoed = ended(program, 2)
    assert outcome == ("time limit", None)
    with pytest.raises(ProcessLookupError):
        os.kill(int(echoed[0]), 0)
    assert time.monotonic() - start < 30
    time.sleep(max(0.0, 9 - (time.monotonic() - start)))
    assert not mark.exists()


def test_an_interruption_ends_the_stage() -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 1)
    try:
        assert ended("import time; time.sleep(100)", 60)[0] == ("interrupted", None)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_the_variables_of_a_stage(tmp_path: Path) -> None:
    ours = {"DASH_INDUCTOR": "0", "DASH_INDUCTOR_EMULATE": "1", "DASH_INDUCTOR_SCHEDULE": "shift", "DASH_INDUCTOR_COSTS": "a.toml"}
    outer = {"TRITON_INTERPRET": "1", "PYTHONPATH": "/x", "TRITON_CACHE_DIR": "/mine", "HOME": "/h", **ours}
    environ = stages.environ_of(outer, tmp_path)
    assert {name for name in outer if name not in environ} == {"TRITON_INTERPRET", *ours} - {"DASH_INDUCTOR_COSTS"}
    assert environ["PYTHONPATH"] == f"{stages.ROOT}{os.pathsep}/x" and environ["TRITON_CACHE_DIR"].startswith(str(tmp_path))
    assert [stages.jobs_of(mode) for mode in ("Exclusive_Process", "Default")] == [1, min(stages.MOST_JOBS, os.cpu_count() or 1)]


CASE = next(iter(kernels.CASES.values()))


def test_a_case_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last line of its process is the finding; what ends without one, or does not end, is one as well."""
    found = kernels.Finding(CASE.name, OK, {"dq": 0.001}, 0.01, 20, "descending", 2.0)
    answers = iter(
        [
            subprocess.CompletedProcess([], 0, f"noise\n{json.dumps(kernels.asdict(found))}\n", ""),
            subprocess.CompletedProcess([], -11, "noise\n", "CUDA error\n"),
        ]
    )

    def run(command: list[str], timeout: float, **_: Any) -> Any:
        assert json.loads(command[3]) == {"task": "kernel", "case": CASE.name}
        answer = next(answers, None)
        if answer is None:
            raise subprocess.TimeoutExpired(command, timeout)
        return answer

    monkeypatch.setattr(kernels.subprocess, "run", run)
    deadline = time.monotonic() + 60
    assert kernels._in_a_process(CASE, deadline) == found
    assert kernels._in_a_process(CASE, deadline).status == "failed: its process ended with status -11: CUDA error"
    assert kernels._in_a_process(CASE, deadline).status.startswith("not run: it did not end")
    assert kernels._in_a_process(CASE, 0.0).status == "not run: the time limit"


def test_kernels_of_a_backward_are_told_apart_by_their_place() -> None:
    """Two have one name. Backwards that differ are an error; columns are those of the results."""
    backward = [("main", 37.0), ("main", 3500.0), ("convert", 70.0)]
    events = [(name, us + n) for n in range(kernel_times.LAUNCHES) for name, us in backward]
    found = kernel_times.in_order(events)
    assert [name for name, _ in found] == ["main", "main", "convert"]
    assert [min(times) for _, times in found] == [37.0, 3500.0, 70.0] and all(
        len(times) == kernel_times.LAUNCHES for _, times in found
    )
    for wrong in (events[:-1], [], [*events[1:], ("other", 1.0)]):
        with pytest.raises(ValueError, match="not 20 times the same"):
            kernel_times.in_order(wrong)
    with (FOLDER.parents[1] / "benchmarks/results/h200/kernel_times.csv").open() as file:
        assert file.readline().strip().split(",") == [each.name for each in fields(kernel_times.KernelTime)]


def test_calls_of_the_host_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's profiler lists the launches beside what they launch, also where it is asked for the GPU alone."""
    events = []
    for start in range(kernel_times.LAUNCHES):
        for device, name in ((DeviceType.CPU, "cudaLaunchKernel"), (DeviceType.CUDA, "main")):
            events.append(SimpleNamespace(name=name, device_type=device, device_time=3.0, time_range=SimpleNamespace(start=start)))
    events.append(SimpleNamespace(**vars(events[0]) | {"name": "cudaDeviceSynchronize"}))
    monkeypatch.setattr(kernel_times, "profile", lambda activities: contextlib.nullcontext(SimpleNamespace(events=lambda: events)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert kernel_times.profiled(lambda: None) == [("main", [3.0] * kernel_times.LAUNCHES)]
