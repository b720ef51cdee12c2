"""A nightly run goes on where the last one stopped, and never takes what passed on other sources."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

COMMAND = Path(__file__).parents[1] / "nightly" / "__main__.py"
# Each run adds a letter to a file. It fails where the file says so.
TEST = """
from pathlib import Path

def test_it(record_property):
    runs = Path(__file__).with_name("runs")
    runs.write_text(runs.read_text() + "x")
    record_property("cases tried", 7)
    assert not Path(__file__).with_name("broken").exists()
"""


def command() -> ModuleType:
    """The module, which stands in no package."""
    spec = importlib.util.spec_from_file_location("nightly", COMMAND)
    assert spec and spec.loader
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture
def nightly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The command, with one part, of one test in a folder of its own."""
    made = command()
    (tmp_path / "test_it.py").write_text(TEST)
    (tmp_path / "runs").write_text("")
    monkeypatch.setattr(made, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(made, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(made, "ROOT", tmp_path)
    monkeypatch.setattr(made, "PARTS", {"one part": ("test_it.py", {})})
    monkeypatch.setattr(made, "sources", lambda: "1a2b3c4")
    return made


def test_what_passed_on_equal_sources_is_not_run_again(
    nightly: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for runs, at in (("x", "1a2b3c4"), ("x", "1a2b3c4"), ("xx", "5d6e7f8"), ("xxx", "5d6e7f8-dirty"), ("xxxx", "5d6e7f8-dirty")):
        monkeypatch.setattr(nightly, "sources", lambda at=at: at)
        assert nightly.main([]) == 0 and (tmp_path / "runs").read_text() == runs
        text = capsys.readouterr().out
        assert "one part: 7 cases tried\nat " in text and text.endswith(": 0 minutes of a core\n")


def test_what_failed_is_run_again(nightly: ModuleType, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.touch()
    assert nightly.main([]) == 1
    broken.unlink()
    assert nightly.main([]) == 0 and (tmp_path / "runs").read_text() == "xx"


def test_sources_that_change_during_a_run_keep_nothing(
    nightly: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = iter(["1a2b3c4", "5d6e7f8", "5d6e7f8"])
    monkeypatch.setattr(nightly, "sources", lambda: next(commits))
    assert nightly.main([]) == 0 and not (tmp_path / "kept").exists()


def test_a_run_that_comes_to_no_test_is_a_failure_whatever_an_earlier_one_left(
    nightly: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert nightly.main([]) == 0
    monkeypatch.setattr(nightly, "sources", lambda: "5d6e7f8")
    nightly.PARTS["one part"] = ("--no-such-option", {})
    assert nightly.main([]) == 1


def test_files_may_be_patterns_and_are_in_one_part(nightly: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text("def test_one(): pass\ndef test_two(): pass\n")
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "test_deeper.py").write_text("def test_three(): pass\n")
    (tmp_path / "logs").mkdir()
    nightly.PARTS |= {"one part": ("test_i*.py", {}), "others": ("-k 'not one' .", {}), "none": ("test_x*.py", {})}
    assert (nightly.run("one part")[0], nightly.run("others")[0]) == ({"passed": 1}, {"passed": 2})
    assert nightly.run("none")[0] == {"failure": 1}


def test_where_there_is_no_git_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = command()
    monkeypatch.setattr(made, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(made, "ROOT", tmp_path)
    assert made.sources().endswith("-dirty")


def test_pages_and_results_are_no_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = command()
    monkeypatch.setattr(made, "ROOT", tmp_path)

    def commit(file: str, text: str) -> str:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
        for arguments in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", file]):
            subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
        return str(made.sources())

    first = commit("dash_inductor/a.py", "1")
    assert first == commit("docs/page.md", "2") == commit("benchmarks/results/nightly/x.json", "3")
    assert commit("tests/unit/test_a.py", "4") != first
    clean = commit("dash_inductor/a.py", "1 ")
    (tmp_path / "README.md").write_text("5")
    assert made.sources() == clean
    (tmp_path / "lowering").mkdir()
    (tmp_path / "lowering" / "b.py").write_text("6")
    assert made.sources() == f"{clean}-dirty"
