"""The process of a trial: what it gets of this one, how it ends, and what counts of what it says. Its program is another here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dash_inductor.first_use import process
from dash_inductor.first_use.known import Verdict

BEGIN = f"""
import json, os, subprocess, sys, time
def at(stage): print("{process.STAGE}" + stage, flush=True)
def verdict(**said): print("{process.VERDICT}" + json.dumps({{"version": 2, "fit": True, "said": ""}} | said), flush=True)
"""


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Verdict]:
    """Puts a program in the place of the trial's, in a package beside which nothing is, and runs it."""
    (tmp_path / "packages" / "stub").mkdir(parents=True)
    (tmp_path / "packages" / "stub" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setattr(process, "PACKAGES", (*process.PACKAGES, "stub"))
    monkeypatch.setattr(process, "TRIAL", "stub")

    def run(code: str, seconds: float = 30) -> Verdict:
        (tmp_path / "packages" / "stub" / "__main__.py").write_text(BEGIN + code)
        return process.tried_by_another("JOB", seconds)

    return run


def said_in(verdict: Verdict) -> Any:
    assert verdict.fit
    return json.loads(verdict.said)


def test_what_lies_in_the_working_directory_changes_nothing(
    trial: Callable[[str], Verdict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor what PYTHON* variables and the user's packages bring: modules have the places that they have here."""
    here = tmp_path / "here"
    (here / "torch").mkdir(parents=True)
    for name in ("random.py", "triton.py", "torch/__init__.py", "sitecustomize.py", "usercustomize.py", "json.py"):
        (here / name).write_text("raise SystemExit('executed')")
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONPATH", str(here))
    monkeypatch.setenv("PYTHONSTARTUP", str(here / "random.py"))
    monkeypatch.setenv("PYTHONUSERBASE", str(here))
    found = said_in(
        trial(
            "import random, site, importlib.util as u\n"
            "places = {name: u.find_spec(name).origin for name in ('random', 'torch', 'triton', 'dash_inductor.lowering')}\n"
            "verdict(said=json.dumps([places, sys.path, site.ENABLE_USER_SITE, sys.argv]))"
        )
    )
    places, path, user_site, argv = found
    assert places == {name: __import__("importlib.util").util.find_spec(name).origin for name in places}
    assert str(here) not in path and "" not in path and not user_site
    assert argv[1] == "JOB"


def test_it_has_no_input_and_a_group_of_its_own(trial: Callable[[str], Verdict]) -> None:
    """The package's settings are not among its variables."""
    os.environ["DASH_INDUCTOR_SEED"] = "7"
    try:
        stdin, group, variables = said_in(trial("verdict(said=json.dumps([sys.stdin.read(), os.getpgid(0), dict(os.environ)]))"))
    finally:
        del os.environ["DASH_INDUCTOR_SEED"]
    assert stdin == "" and group != os.getpgid(0)
    assert not any(name.startswith("DASH_INDUCTOR") for name in variables) and variables["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize(
    ("code", "fit", "said"),
    [
        ("", None, "the process that tried it ended with status 0: without a word"),
        ("at('started'); sys.exit('no torch')", None, "the process that tried it ended with status 1: no torch, started"),
        ("at('compiled'); os.abort()", None, "the process that tried it ended with status -6: without a word, compiled"),
        ("at('launched'); os.abort()", False, "the process that tried it ended with status -6: without a word, launched"),
        ("at('launched'); verdict(fit=None, said='no memory')", None, "no memory"),
        ("at('launched'); verdict(fit=False, said='dq is off'); at('launched')", False, "dq is off"),
        ("at('launched'); verdict(fit='false')", False, "the process that tried it ended with status 0: without a word, launched"),
    ],
)
def test_how_far_it_came_decides(trial: Callable[[str], Verdict], code: str, fit: bool | None, said: str) -> None:
    assert trial(code) == Verdict(fit, said)


@pytest.mark.parametrize(("stage", "fit"), [("started", None), ("compiled", None), ("launched", False)])
def test_past_its_time_it_is_killed_with_all_that_it_started(
    trial: Callable[..., Verdict], stage: str, fit: bool | None, tmp_path: Path
) -> None:
    code = (
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid)); at({stage!r}); time.sleep(60)"
    )
    begin = time.monotonic()
    assert trial(code, seconds=3) == Verdict(fit, f"it did not end in 3 s, {stage}")
    assert time.monotonic() - begin < 20
    assert has_ended(int((tmp_path / "pid").read_text()))


def has_ended(pid: int) -> bool:
    """Whether a process is gone soon, or a zombie, whom nobody here can wait for."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.1)
    return False


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    """Which is killed while it waits."""
    pid = tmp_path / "pid"
    instead = f"open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    boot = process.BOOT.replace('runpy.run_module(module, run_name="__main__")', instead)
    assert boot != process.BOOT
    arguments = [sys.executable, "-I", "-c", boot, json.dumps([{}, [], "", ""])]
    parent = f"import subprocess; subprocess.run({arguments!r}, start_new_session=True)"
    started = subprocess.Popen([sys.executable, "-c", parent])
    while not pid.exists() or not pid.read_text():
        time.sleep(0.05)
    started.kill()
    started.wait()
    assert has_ended(int(pid.read_text()))


def test_however_much_it_says_little_is_kept(trial: Callable[..., Verdict]) -> None:
    """A line without an end, and many lines, on both of its outputs."""
    code = (
        "for stream in (sys.stdout, sys.stderr):\n"
        "    stream.write('x' * (1 << 22)); stream.write('\\n' + 'y\\n' * 100_000); stream.flush()\n"
        "verdict(said='done')"
    )
    assert trial(code) == Verdict(True, "done")
    failed = trial("sys.stderr.write('x' * (1 << 22)); sys.exit(3)")
    assert failed.fit is None and len(failed.said) < 2 * process.LINE


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("frozen", True, "this is a frozen application"),
        ("executable", None, "sys.executable"),
        ("executable", "", "sys.executable"),
    ],
)
def test_no_application_is_started_again(
    monkeypatch: pytest.MonkeyPatch, trial: Callable[..., Verdict], name: str, value: object, said: str
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: 1 / 0)
    monkeypatch.setattr(sys, name, value, raising=False)
    verdict = trial("")
    assert verdict.fit is None and verdict.said.startswith(said)


def test_a_process_that_cannot_be_started_says_so(monkeypatch: pytest.MonkeyPatch, trial: Callable[..., Verdict]) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert trial("").fit is None and "No such file" in trial("").said
