"""What `make dist PUBLISH=tag` refuses, and that building asks for none of it."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from dash_inductor import __version__

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".ci" / "publishable.py"
reasons = runpy.run_path(str(SCRIPT))["reasons"]
REAL = '[project]\nauthors = [{ name = "Ada" }]\n[project.urls]\nRepository = "https://example.org/dash-inductor"\n'


def checkout(folder: Path, metadata: str = REAL, changelog: str = "## 1.2.3, today\n") -> Path:
    (folder / "dash_inductor").mkdir()
    (folder / "dash_inductor" / "__init__.py").write_text('__version__ = "1.2.3"\n')
    (folder / "pyproject.toml").write_text(metadata)
    (folder / "CHANGELOG.md").write_text(changelog)
    return folder


def test_placeholders_are_named():
    """Those of this checkout, on the standard error of the command."""
    done = subprocess.run([sys.executable, SCRIPT, f"v{__version__}"], capture_output=True, text=True)
    fields = [line.partition(" is ")[0] for line in done.stderr.splitlines() if "placeholder" in line]
    assert done.returncode == 1 and set(fields) == {"pyproject.toml: authors", "pyproject.toml: urls"}


def test_what_may_be_published(tmp_path):
    assert reasons(checkout(tmp_path), "v1.2.3") == []


@pytest.mark.parametrize(
    ("changed", "tag", "said"),
    [
        ({}, "v1.2.4", "the tag v1.2.4 is not v1.2.3"),
        ({"changelog": "## Unreleased\n"}, "v1.2.3", "CHANGELOG.md has no section 1.2.3"),
        ({"metadata": '[project]\nauthors = [{ name = "Ada" }]\n'}, "v1.2.3", "urls is missing"),
        ({"metadata": REAL.replace("example.org", "host.invalid")}, "v1.2.3", "urls is a placeholder"),
    ],
)
def test_what_may_not(tmp_path, changed, tag, said):
    (found,) = reasons(checkout(tmp_path, **changed), tag)
    assert said in found


@pytest.mark.parametrize(("publish", "asks"), [("", False), ("PUBLISH=v1.2.3", True)])
def test_only_publishing_asks(publish, asks):
    plan = subprocess.run(["make", "--dry-run", "dist", *publish.split()], cwd=ROOT, capture_output=True, text=True).stdout
    assert "python -m build" in plan.replace("  ", " ") and ("publishable.py v1.2.3" in plan) == asks
