"""Verdicts that processes of a machine share: their files, and the lock by which one process at a time tries a kernel."""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dash_inductor.first_use import known
from dash_inductor.first_use.known import Verdict

RIGHT, WRONG, UNTRIED = Verdict(True, "right"), Verdict(False, "dq is off"), Verdict(None, "no room")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trials" / "kind.json"


def never() -> Verdict:
    raise AssertionError("it was tried")


@pytest.mark.parametrize("verdict", [RIGHT, WRONG], ids=["fit", "unfit"])
def test_who_comes_later_reads(file: Path, verdict: Verdict) -> None:
    assert known.read(file) is None
    assert known.alone(file, False, 1.0, lambda: verdict) == verdict
    assert known.read(file) == known.alone(file, False, 1.0, never) == verdict
    assert known.alone(file, True, 1.0, lambda: WRONG) == WRONG == known.read(file)  # always tries, and tells


def test_that_it_could_not_be_tried_is_no_verdict(file: Path) -> None:
    assert known.alone(file, False, 1.0, lambda: UNTRIED) == UNTRIED and known.read(file) is None
    assert known.alone(file, False, 1.0, lambda: RIGHT) == RIGHT


@pytest.mark.parametrize("verdict", [RIGHT, WRONG, UNTRIED], ids=["fit", "unfit", "untried"])
def test_one_tries_and_the_others_wait_and_read(file: Path, verdict: Verdict) -> None:
    """What they read may be that it could not be tried: they had it tried at once."""
    tried, waiting = [], threading.Event()

    def trial() -> Verdict:
        waiting.wait(10)
        time.sleep(3 * known.POLL)
        tried.append(1)
        return verdict

    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(known.alone, file, False, 30.0, trial) for _ in range(4)]
        waiting.set()
        assert [each.result() for each in asked] == [verdict] * 4
    assert tried == [1]


def test_a_trial_that_does_not_end_is_not_waited_for_without_end(file: Path) -> None:
    begun, end = threading.Event(), threading.Event()

    def trial() -> Verdict:
        begun.set()
        end.wait(30)
        return RIGHT

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(known.alone, file, False, 30.0, trial)
        begun.wait(10)
        late = known.alone(file, False, 0.3, never)
        end.set()
        assert first.result() == RIGHT
    assert late.fit is None and "another process has tried it for" in late.said


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", '"fit"', "[" * 100_000, "\x00" * 100, "9" * 10_000),
        *('{"fit": true, "said": ""}', '{"version": 1, "fit": true, "said": ""}', '{"version": 2, "fit": "false", "said": ""}'),
        *(
            '{"version": 2, "fit": 1, "said": ""}',
            '{"version": 2, "fit": true, "said": null}',
            '{"version": 2, "fit": null, "said": ""}',
        ),
        json.dumps({"version": 2, "fit": True, "said": "x" * known.MOST_BYTES}),
    ],
    ids=range(15),
)
def test_garbage_is_no_verdict(file: Path, text: str) -> None:
    file.parent.mkdir()
    file.write_text(text)
    assert known.read(file) is None
    assert known.alone(file, False, 1.0, lambda: WRONG) == WRONG == known.read(file)


def test_what_is_no_file_is_no_verdict(file: Path) -> None:
    """Nor does it block."""
    file.parent.mkdir()
    os.mkfifo(file)
    assert known.read(file) is None
    file.unlink()
    file.symlink_to("/dev/zero")
    assert known.read(file) is None
    file.unlink()
    file.mkdir()
    assert known.read(file) is None


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o775, 0o777])
def test_whoever_may_read_the_folder_may_read_the_verdict(file: Path, mode: int) -> None:
    file.parent.mkdir()
    file.parent.chmod(mode)
    before = os.umask(0o022)
    try:
        known.alone(file, False, 1.0, lambda: RIGHT)
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == mode & 0o666


def test_a_write_that_fails_leaves_nothing(file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    assert known.alone(file, False, 1.0, lambda: RIGHT) == RIGHT
    assert "what came out of a trial cannot be kept: no space left" in caplog.text
    assert [path.name for path in file.parent.iterdir()] == ["kind.lock"]


def test_a_folder_that_cannot_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    assert known.alone(tmp_path / "file" / "kind.json", False, 1.0, lambda: RIGHT) == RIGHT
    assert "cannot be kept" in caplog.text


def test_a_file_system_without_locks_has_each_process_try(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def refused(*_: object) -> None:
        raise OSError("not supported")

    monkeypatch.setattr(fcntl, "flock", refused)
    tried: list[Callable[[], Verdict]] = []
    assert known.alone(file, False, 1.0, lambda: tried.append(never) or UNTRIED) == UNTRIED and len(tried) == 1  # type: ignore[func-returns-value]
