"""Without Triton, as on macOS and Windows: plain torch.compile as ever, and a sentence for who asks for this package."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dash_inductor import import_hook
from dash_inductor.import_hook import NO_TRITON

# Python has no Triton from its start on: a finder that says so comes first, and torch's autoload is as in any process.
BEGIN = """
import contextlib, io, json, sys

class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTriton())
import torch
torch.use_deterministic_algorithms(True)
said = {}
"""
WAYS_IN = """
said["plain"] = torch.compile(torch.mm)(torch.ones(1, 1), torch.ones(1, 1)).item()  # all of Inductor, but no C++ compiler
import dash_inductor
for name, act in {
    "dash": lambda: torch.compile(torch.nn.Linear(2, 2), backend="dash"),
    "explain": lambda: dash_inductor.explain(torch.nn.Linear(2, 2), torch.ones(2)),
    "manifest": lambda: dash_inductor.manifest(),
    "check": lambda: dash_inductor.check(lambda: {"ones": torch.ones(1)}, kinds=["same"]).identical,
    "enable": dash_inductor.enable,
    "emulate": lambda: dash_inductor.emulate().__enter__(),
    "eager": lambda: torch.nn.attention.activate_flash_attention_impl("DASH"),
}.items():
    try:
        said[name] = act()
    except Exception as error:
        said[name] = [type(error).__name__, str(error)]
"""
ENV = """
from dash_inductor.cli.main import main
with contextlib.redirect_stdout(io.StringIO()) as out:
    status = main(["env", "--json"])
print(json.dumps({**said, "env": json.loads(out.getvalue()), "status": status}))
"""


def process(program: str, **variables: str) -> tuple[dict[str, Any], list[str]]:
    """What each way in says, and the lines on stderr, but for torch's own warnings, which have its files in them."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("DASH", "TORCH_LOGS", "TRITON"))}
    environ |= {"PYTHONPATH": ".", **variables}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), [line for line in done.stderr.splitlines() if not re.match(r"W\d+ .*\btorch/", line)]


def test_each_way_in_says_a_sentence():
    """Plain torch.compile says nothing."""
    said, stderr = process(BEGIN + WAYS_IN + ENV)
    assert (said["plain"], said["check"], stderr) == (1, True, [])
    for name in ("dash", "enable", "emulate", "eager", "explain", "manifest"):
        assert said[name] == ["ValueError" if name == "explain" else "ImportError", NO_TRITON], name
    env = said["env"]
    assert [problem for problem in env["problems"] if "entry point" not in problem] == [NO_TRITON] and said["status"] == 1
    assert env["versions"]["torch"] == torch.__version__ and env["versions"]["triton"].startswith("cannot be imported")
    assert env["this_package_in_torch"] == dict.fromkeys(("attention_pass", "emulation"), "off, since there is no Triton")
    assert env["places_of_torch_that_are_filled"] == {} and env["gpus"] == []


def test_emulation_that_is_asked_for():
    """One line when torch is imported, and no device in `env`."""
    said, stderr = process(BEGIN + ENV, DASH_INDUCTOR_EMULATE="1")
    assert stderr == [f"{NO_TRITON}; torch.compile is plain Inductor"]
    assert NO_TRITON in said["env"]["problems"] and said["env"]["gpus"] == []


@pytest.mark.parametrize(("finder", "found"), [(lambda name: None, False), (lambda name: 1, True)])
def test_whether_there_is_one(monkeypatch, finder, found):
    monkeypatch.setattr(import_hook.importlib.util, "find_spec", finder)
    assert import_hook.has_triton() == found
