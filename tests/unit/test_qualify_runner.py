"""How a qualification goes through shapes: who is measured, what a fault, an interruption and a time limit leave behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from attention_results import H100, STOCK, result

from dash_inductor.qualify import additions, child, environment, gpu_tests, runner
from dash_inductor.qualify import contenders as who
from dash_inductor.qualify.measure import LostDeviceError, Result
from dash_inductor.qualify.rows import OK, read
from dash_inductor.qualify.runner import Job
from dash_inductor.qualify.shapes import MODELS, QUICK, SHAPES, SWEEP, Shape, shapes_called


def test_shapes_by_name_and_by_size():
    assert shapes_called("llama*b,d64-full-512") == [MODELS[0], next(s for s in SWEEP if s.name == "d64-full-512")]
    assert shapes_called("*") == list(SHAPES) and Job("").chosen_shapes() == list(QUICK)
    (given,) = shapes_called("causal:2x32x8x8192x128")
    assert given == Shape("causal:2x32x8x8192x128", "causal", 2, 32, 8, 8192, 128)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("d64-*,nothing", "no shape is called 'nothing'"),
        ("causal:2x32x8x8192", "is not of the form MASK:BxHxKxSxD"),
        ("full:0x1x1x1x1", "is not of the form"),
        ("window:1x1x1x1x1", "mask='window' is not one of"),
        ("full:1x3x2x64x64", "kv_heads=2 does not divide heads=3"),
    ],
)
def test_shapes_that_are_none(names, message):
    with pytest.raises(ValueError, match=message):
        shapes_called(names)


def test_contenders():
    """The baselines and the twins come along; of one that is left out nothing is measured."""
    job = Job("", shapes="llama3-8b", contenders="sdpa-cudnn,ours")
    assert list(job.chosen()) == [who.BASELINE, "sdpa-flash", "ours", "ours-unordered", "sdpa-cudnn"]
    assert list(Job("", shapes="llama3-8b-packed", contenders="sdpa-flash").chosen()) == ["sdpa-flash", "flex"]
    assert list(Job("", shapes="*").chosen()) == list(STOCK)
    tuned = Job("", contenders="ours-release-after-s", tuned=True, without="ours-unordered")
    assert list(tuned.chosen()) == ["ours", "ours-release-after-s"] and tuned.baseline_of(QUICK[0]) == "ours"
    with pytest.raises(ValueError, match="no contender is called 'theirs'"):
        Job("", contenders="flex,theirs").chosen()


def measured(shape: Shape, contenders, rounds, baseline, say, pace) -> list[Result]:
    """In place of a GPU: every contender takes as many ms as there are rounds, and one faults at one shape."""
    if shape.name == "d64-full-512" and "flex" in contenders:
        raise LostDeviceError("flex", RuntimeError("an illegal memory access"))
    return [result(name, *[1.0] * rounds, contender=contender) for name, contender in contenders.items()]


@pytest.fixture
def pretended_gpu(monkeypatch):
    monkeypatch.setattr(runner, "environment", lambda: H100)
    monkeypatch.setattr(runner, "sm_mhz", lambda: None)
    monkeypatch.setattr(runner, "measure", measured)

    def started(command, check):
        """Another process, in this one."""
        assert command[:3] == [sys.executable, "-m", "dash_inductor.qualify.child"] and not check
        return subprocess.CompletedProcess(command, child.main(command[3]))

    monkeypatch.setattr(runner, "subprocess", SimpleNamespace(run=started, DEVNULL=subprocess.DEVNULL))


def test_a_kernel_that_faults_fails_alone(pretended_gpu, tmp_path, capsys):
    """Another process goes on with its shape, and it is left out from there on."""
    names = "d128-full-512,d64-full-512,d64-full-1024"
    assert runner.run_job(Job("x", shapes=names, contenders="flex", rounds=3, seconds=300.0), tmp_path) == 1
    rows = {(row.shape, row.contender): row for row in read(tmp_path / runner.FILE)}
    assert len(rows) == 9 and {row.run for row in rows.values()} == {"x"}
    for shape in names.split(","):
        assert {rows[shape, name].status for name in (who.BASELINE, "sdpa-flash")} == {OK}
        assert {rows[shape, name].rounds for name in (who.BASELINE, "sdpa-flash")} == {3}
    assert [rows[shape, "flex"].status for shape in ("d128-full-512", "d64-full-512", "d64-full-1024")] == [
        OK, "failed: a kernel faulted: an illegal memory access", "not run: a kernel faulted at d64-full-512",
    ]  # fmt: skip
    said = capsys.readouterr().out
    assert "[2/3]" in said and "flex faulted: an illegal memory access" in said


def test_a_baseline_that_faults(pretended_gpu, tmp_path, monkeypatch):
    def faulting(shape, contenders, rounds, baseline, say, pace):
        if baseline in contenders:
            raise LostDeviceError(baseline, RuntimeError("gone"))
        return measured(shape, contenders, rounds, baseline, say, pace)

    monkeypatch.setattr(runner, "measure", faulting)
    assert runner.run_job(Job("", shapes="llama3-8b", contenders="ours"), tmp_path) == 1
    rows = {row.contender: row.status for row in read(tmp_path / runner.FILE)}
    assert rows.pop(who.BASELINE) == "failed: a kernel faulted: gone"
    assert rows == {"sdpa-flash": OK, "ours": OK, "ours-unordered": OK}


def test_ratios_at_shapes_of_flex_attention_are_to_stock_flex(pretended_gpu, tmp_path):
    assert runner.run_job(Job("", shapes="llama3-8b*", contenders="ours"), tmp_path) == 0
    rows = {(row.shape, row.contender): row for row in read(tmp_path / runner.FILE)}
    for shape, baseline in (("llama3-8b", who.BASELINE), ("llama3-8b-packed", "flex")):
        assert (rows[shape, "ours"].baseline, rows[shape, "ours"].speedup) == (baseline, 1.0)


def test_an_interrupted_run_says_what_is_left(pretended_gpu, tmp_path, monkeypatch):
    def interrupted(shape, *others):
        if shape.name == "d64-full-512":
            raise KeyboardInterrupt
        return measured(shape, *others)

    monkeypatch.setattr(runner, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runner.run_job(Job("", shapes="d64-full-2048,d64-full-1024,d64-full-512", contenders="sdpa-flash"), tmp_path)
    assert {(row.shape, row.status) for row in read(tmp_path / runner.FILE)} == {
        ("d64-full-2048", OK), ("d64-full-512", "not run: interrupted"), ("d64-full-1024", "not run: interrupted"),
    }  # fmt: skip


def test_time_limit(pretended_gpu, tmp_path):
    assert runner.run_job(Job("", seconds=0.0), tmp_path) == 0
    rows = read(tmp_path / runner.FILE)
    assert {row.shape for row in rows} == {shape.name for shape in QUICK}
    assert {row.status for row in rows} == {"not run: the time limit"}


def test_variants_are_held_against_ours(pretended_gpu, tmp_path):
    assert runner.run_job(Job("", shapes="llama3-8b", contenders="ours-release-after-s", tuned=True, rounds=2), tmp_path) == 0
    rows = read(tmp_path / runner.FILE)
    assert all((row.times_ms, row.sms, row.sm_mhz, row.baseline, row.speedup) == ((1.0, 1.0), 132, None, "ours", 1) for row in rows)
    assert [row.contender for row in rows] == ["ours", "ours-unordered", "ours-release-after-s"]


def test_what_is_compiled_first(pretended_gpu, tmp_path, monkeypatch):
    """What has a compiler, each graph in one of the processes, whose time is half of all; none of them is left."""
    started, ended = [], []

    class Process:
        def __init__(self, command, env, stdout, stderr):
            assert env["TORCHINDUCTOR_COMPILE_THREADS"] == "1"
            started.append(json.loads(command[3]))

        def wait(self, timeout=None):
            ended.append(timeout)
            if timeout is not None:
                raise subprocess.TimeoutExpired("child", timeout)

        def kill(self):
            ended.append("killed")

    names = {"Popen": Process, "TimeoutExpired": subprocess.TimeoutExpired, "DEVNULL": subprocess.DEVNULL}
    monkeypatch.setattr(runner, "subprocess", SimpleNamespace(**names))
    runner.run_job(Job("", shapes="llama3-8b,d64-full-2048", contenders="ours,flex,sdpa-cudnn", seconds=10.0, jobs=4), tmp_path)
    assert {each["task"] for each in started} == {"compile"} and len(started) == 4
    pairs = [tuple(pair) for each in started for pair in each["pairs"]]
    assert sorted(pairs) == sorted(
        (shape, name) for shape in ("llama3-8b", "d64-full-2048") for name in ("flex", "ours", "ours-unordered")
    )
    assert 0 < ended[0] <= 5 and ended.count("killed") == 4
    compiled = []  # each of which fails for want of inputs, and keeps no other from it
    monkeypatch.setattr(runner, "random_inputs", lambda shape, device: compiled.append(shape.name) or 1 / 0)
    for each in started:
        assert child.main(json.dumps(each)) == 0
    assert sorted(compiled) == sorted(shape for shape, _ in pairs)


def test_additions():
    cases = list(additions.cases())
    times = {case: [2.0, 4.0, 2.0] if case.operation == "red" else [1.0, 2.0, 1.0] for case in cases}
    rows = additions.table_of(times, "NVIDIA H100", 132)
    for case, row in zip(cases, rows, strict=True):
        added = 132 * case.ctas_per_sm * additions.STEPS * 64 * 128 * 4
        assert row.tb_per_s == pytest.approx(added / (row.median_ms / 1e3) / 1e12)
        assert row.ratio == (0.5 if case.operation == "red" else 1.0)
    in_l2, beyond = (next(row for row in rows if row.pattern == f"own tiles {where}") for where in ("in L2", "beyond L2"))
    assert in_l2.mib < 50 < 500 < beyond.mib


def test_gpu_tests_end_in_time(tmp_path, monkeypatch, capfd):
    """Past the time limit pytest is interrupted, which says what failed until then, and the next group has its turn.

    The limit is past once the slow test has begun, however long pytest takes to start, and to end. Interrupts are ignored here, as
    they are in what a shell starts in the background.
    """
    slow, quick, begun = tmp_path / "test_slow.py", tmp_path / "test_quick.py", tmp_path / "begun"
    slow.write_text(
        "import pathlib, time\n\ndef test_wrong():\n    assert 1 == 2\n\n"
        f"def test_slow():\n    pathlib.Path({str(begun)!r}).touch()\n    time.sleep(600)\n"
    )
    quick.write_text("def test_quick():\n    pass\n")
    groups = (gpu_tests.Group((str(slow), "-p", "no:xdist"), False, 0.5), gpu_tests.Group((str(quick),), False, 1.0))
    monkeypatch.setattr(gpu_tests, "GROUPS", groups)
    monkeypatch.setattr(gpu_tests, "HELPERS", ("pytest",))
    monkeypatch.setattr(gpu_tests, "SECONDS_TO_END", 200)
    limits = []

    class Process(subprocess.Popen):
        def wait(self, timeout: float = 60) -> int:
            limits.append(timeout)
            end = time.monotonic() + timeout
            while time.monotonic() < end and not begun.exists():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return super().wait(0.1)
            begun.unlink(missing_ok=True)
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(gpu_tests.subprocess, "Popen", Process)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert gpu_tests.run(300) == gpu_tests.TIME_LIMIT
    finally:
        signal.signal(signal.SIGINT, before)
    assert 140 < limits[0] <= 150 and limits[1] == 200 and 100 < limits[2] <= 300
    said = capfd.readouterr().out
    for part in ("::test_wrong FAILED", "assert 1 == 2", "what is left of these tests was not run", "1 passed"):
        assert part in said


def test_gpu_tests_are_of_a_checkout(tmp_path, monkeypatch, capsys):
    named = {path for group in gpu_tests.GROUPS for path in group.paths}
    assert named == {f"tests/gpu/{path.name}" for path in (gpu_tests.ROOT / "tests" / "gpu").glob("test_*.py")}
    monkeypatch.setattr(gpu_tests, "ROOT", tmp_path)
    assert gpu_tests.run(1) == gpu_tests.NOT_AVAILABLE and "this is no checkout" in capsys.readouterr().out


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
