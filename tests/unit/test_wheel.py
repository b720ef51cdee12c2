"""The wheel has every file of the package, and works in a project of its own, beside a torch and without this checkout."""

from __future__ import annotations

import configparser
import email
import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from dash_inductor import __version__

ROOT = Path(__file__).parents[2]
FOLDERS = ("dash_inductor", "lowering", "templates")
TRAIN = """
import torch, torch.nn.functional as F
import dash_inductor

torch.use_deterministic_algorithms(True)
attend = torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), backend="dash")
attend(*torch.randn(3, 1, 2, 64, 16).requires_grad_().unbind()).sum().backward()
print(dash_inductor.__file__, *(decision.rewritten for decision in dash_inductor.decisions()), sep="\\n")
"""
CHOOSE = "choose --mask causal --q-len 512 --kv-len 512 --batch 1 --heads 4 --kv-heads 4 --head-dim 64 --dtype bf16 --device h100"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in a copy of the tree, which stays as it is."""
    tree, built = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("built")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    command = [sys.executable, "-m", "pip", "wheel", str(tree), "--no-deps", "--no-build-isolation", "--wheel-dir", str(built)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return next(built.glob("*.whl"))


def test_every_file_is_in_the_wheel(wheel):
    """A new folder needs a line in pyproject.toml."""
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = {path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()}
    files = {path for path in files if path.parent.name != "__pycache__"}
    assert packed == {str(path if path.parts[0] == "dash_inductor" else "dash_inductor" / path) for path in files}


def test_what_an_installer_reads(wheel):
    """The version of the source, and a script that exists."""
    with zipfile.ZipFile(wheel) as archive:
        metadata, entry_points = (
            archive.read(next(name for name in archive.namelist() if name.endswith(f".dist-info/{file}"))).decode()
            for file in ("METADATA", "entry_points.txt")
        )
    assert email.message_from_string(metadata)["Version"] == __version__
    scripts = configparser.ConfigParser()
    scripts.read_string(entry_points)
    module, _, function = scripts["console_scripts"]["dash-inductor"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.nightly
def test_in_another_project(wheel, tmp_path):
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv/bin/python"
    (site,) = (tmp_path / "venv/lib").glob("python3*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)
    (site / "torch.pth").write_text(sysconfig.get_path("purelib"))  # .pth files there, such as this checkout's, are not read
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    environ = inherited | {"DASH_INDUCTOR_EMULATE": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}

    def run(*arguments: str) -> str:
        result = subprocess.run([python, *arguments], cwd=tmp_path, env=environ, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return result.stdout

    assert run("-c", TRAIN).splitlines() == [str(site / "dash_inductor/__init__.py"), "True"]
    assert "h100" in run("-m", "dash_inductor", *CHOOSE.split())
