"""What `check` says: of runs, of steps that it cannot run, of functions that no other process can import."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections import deque
from dataclasses import asdict
from pathlib import Path

import check_children
import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import dash_inductor
from dash_inductor.reproduce import StepError, settings
from dash_inductor.reproduce import check as library
from dash_inductor.reproduce.processes import run
from dash_inductor.reproduce.report import Difference, Report, Run

ROOT = Path(dash_inductor.__file__).parents[1]
check = dash_inductor.check


def gradients():
    model = nn.Linear(2, 2)
    torch.nn.init.ones_(model.weight)
    model(torch.ones(1, 2)).sum().backward()
    return model


def without_gradients():
    return nn.Linear(2, 2)


def raises():
    raise KeyError("no such\nkey")


def leaves():
    sys.exit(0)


REPORT = Report(
    "train:step",
    (Run("first run", 1, 21, 0), Run("again in the same process", 1, 21, 0), Run("another process, warm caches", 2, 21, 3)),
    Difference(
        run=2,
        parameter="embed.weight",
        index=(5, 2),
        ulps=4,
        what="835 of 8,192 elements differ; the first is 0.5 in the first run and 0.25 in this one",
        op="triton_per_fused_embedding_dense_backward_0",
        source="train.py:11",
        lines=("models/llama.py:370", "models/llama.py:64"),
        cause="its inputs are equal, and its output is not: it is not deterministic in the backward of this line",
    ),
    ("deterministic mode is on with warn_only=True",),
)


def test_the_text_of_a_report():
    assert_expected_inline(
        str(REPORT),
        """\
train:step: DIFFERENT, 3 runs in 2 processes

run  process  how                           bits
---  -------  ----------------------------  ----------------------
  1        1  first run                     21 tensors
  2        1  again in the same process     identical
  3        2  another process, warm caches  3 of 21 tensors differ

First difference: embed.weight[5, 2] in run 3, 4 ulps apart: 835 of 8,192 elements differ; the first is 0.5 in the first
run and 0.25 in this one.
First operation: triton_per_fused_embedding_dense_backward_0 at train.py:11
  its inputs are equal, and its output is not: it is not deterministic in the backward of this line
  computed at models/llama.py:370, models/llama.py:64

Note: deterministic mode is on with warn_only=True.""",
    )


def test_the_json_of_a_report():
    """The fields of the report, and what follows from them."""
    figures = json.loads(REPORT.to_json())
    assert list(figures) == ["identical", "step", "runs", "first_difference", "notes"]
    assert figures["runs"] == [asdict(run) | {"identical": run.identical} for run in REPORT.runs]
    assert [run["identical"] for run in figures["runs"]] == [True, True, False] and figures["identical"] is False
    assert figures["first_difference"] == asdict(REPORT.first_difference) | {
        "index": [5, 2],
        "lines": list(REPORT.first_difference.lines),
    }
    assert (figures["step"], figures["notes"]) == (REPORT.step, list(REPORT.notes))


@pytest.mark.parametrize(
    ("step", "settings", "message"),
    [
        (raises, {}, r"^step raised KeyError at tests/unit/test_check.py:\d+: 'no such\\nkey'$"),
        (leaves, {}, r"^step raised SystemExit at tests/unit/test_check.py:\d+: 0$"),
        (lambda: 3, {}, "^step must return the model whose gradients count, or a dict of tensors; it returned one of type int$"),
        (lambda: None, {}, "it returned nothing$"),
        (dict, {}, "it returned an empty dict$"),
        (lambda: {"loss": 1.0}, {}, "its 'loss' is one of type float$"),
        (without_gradients, {}, r"^step returned a Linear without gradients: call backward\(\) in step, and leave out"),
        (gradients, {"runs": 0}, "^runs=0 is not a whole number of at least 1$"),
        (gradients, {"runs": 1, "kinds": ["same"]}, "^one run has nothing to agree with: ask for at least 2 runs$"),
        (gradients, {"kinds": ["warm"]}, "^'warm' is none of the kinds same, fresh, cold, seed, busy, reserve, device, split$"),
        (gradients, {"kinds": ["seed"]}, "^the kind seed needs emulation: set DASH_INDUCTOR_EMULATE=1$"),
        (gradients(), {}, None),
        (3, {}, "^check takes a function that does one training step, not one of type int$"),
    ],
)
def test_what_cannot_be_checked(step, settings, message):
    with pytest.raises(ValueError, match=message):
        check(step, **settings)


@pytest.mark.parametrize(
    ("tensors", "parameter", "what"),
    [
        ([{"a": 1.0, "b": 2.0}, {"a": 1.0}], "b", "only the first run has it"),
        ([{"a": 1.0}, {"a": 1.0, "b": 2.0}], "b", "only this run has it"),
        ([{"a": 1.0}, {"a": None}], "a", "there is no gradient in this run"),
        ([{"b": 1, "a": 2}, {"b": 1, "a": 3}], "a", "1 of 1 elements differ; the first is 2 in the first run and 3 in this one"),
    ],
)
def test_tensors_that_differ(tensors, parameter, what):
    runs = iter([*tensors, *tensors, *tensors, *tensors])
    report = check(lambda: {name: None if value is None else torch.tensor(value) for name, value in next(runs).items()})
    assert (report.first_difference.parameter, report.first_difference.what) == (parameter, what)
    assert [run.differing for run in report.runs] == [0, 1] and not report.identical


def test_sparse_gradients():
    def step():
        embedding = nn.Embedding(4, 2, sparse=True)
        nn.init.ones_(embedding.weight)
        embedding(torch.tensor([0, 0, 3])).sum().backward()
        return embedding

    report = check(step)
    assert report.identical and report.runs[0].tensors == 2


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (lambda: gradients(), "a lambda has no name by which another process could import it"),
        (functools.partial(gradients), "one of type partial has no name by which another process could import it"),
    ],
)
def test_what_runs_in_this_process_alone(step, reason):
    report = check(step, kinds=["same", "fresh"]) if isinstance(step, functools.partial) else check(step)
    assert report.notes == (f"step ran in this process alone, because {reason}",)
    assert {run.process for run in report.runs} == {1}


def test_a_local_function_and_one_that_is_hidden(monkeypatch):
    def local():
        return gradients()

    assert library._importable(local)[1].startswith("local is defined inside another function")
    hidden = gradients
    monkeypatch.setattr(sys.modules[__name__], "gradients", raises)
    assert library._importable(hidden)[1].startswith(f"{__name__}.gradients is not this function")
    assert library._importable(without_gradients)[0] == {"module": __name__, "name": "without_gradients"}


@pytest.mark.parametrize(
    ("does", "message"),
    [
        ("die", "^a process that runs step was killed by SIGSEGV, a fault in native code; --traceback shows what it printed last$"),
        ("exit", "^a process that runs step ended with status 3 before step returned; --traceback"),
        ("hang", r"^a process that runs step took longer than 0.5 seconds, and was ended: give it more \(--timeout SECONDS\)"),
        ("fail", "^step raised ValueError at train.py:3: no$"),
    ],
)
def test_a_process_that_fails(does, message, tmp_path):
    with pytest.raises(StepError, match=message) as raised:
        run({"main": check_children.__name__, "does": does}, {}, tmp_path, 0.5 if does == "hang" else None)
    assert raised.value.traceback == ("whole" if does == "fail" else "last words")


def test_a_process_that_writes(tmp_path):
    assert run({"main": check_children.__name__, "does": "write"}, {"DASH_INDUCTOR_SEED": "7"}, tmp_path, None) == [{"seed": "7"}]


SCRIPT = """
import sys
import dash_inductor, torch
from dash_inductor import config
from dash_inductor.reproduce import settings

assert sys.argv[1:] == ["--lr", "3"], sys.argv

def step():
    names = {{"sin", "cos", "tanh", "exp"}}
    x = weight = torch.ones(2, requires_grad=True)
    for name in names:
        x = getattr(x, name)()
    x.sum().backward()
    told = repr([settings.of_torch(), config.current()])
    return {{"grad": weight.grad, "settings": torch.tensor(list(told.encode()), dtype=torch.uint8)}}

if __name__ == "__main__":
    before = settings.of_torch()
    changed = {{"deterministic": 2, "fill": False, "cudnn": [True, True], "precision": "high", "dtype": "float64"}}
    changed |= {{"sdp": dict.fromkeys(before["sdp"], False), "reduced": dict.fromkeys(before["reduced"], False)}}
    changed |= {{"threads": before["threads"] + 1, "enabled": not before["enabled"]}}
    settings.apply(changed)
    assert settings.of_torch() == changed and all(changed[name] != before[name] for name in changed)
    dash_inductor.configure(guarantee="batch", sm_reserve=2, emulate=False)
{guard}print(dash_inductor.check(step, runs=1, kinds=["fresh"]))
"""


def script(folder: Path, guard: str) -> subprocess.CompletedProcess:
    (folder / "train.py").write_text(SCRIPT.format(guard=guard))
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "1"}
    command = [sys.executable, "train.py", "--lr", "3"]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)


def test_a_script(tmp_path):
    """Functions of a script are imported from its file, with its settings and arguments, and without what is under its guard."""
    done = script(tmp_path, guard="    ")
    assert done.returncode == 0 and "step: identical, 2 runs in 2 processes" in done.stdout, done.stderr


@pytest.mark.nightly
def test_an_unguarded_script_is_told(tmp_path):
    done = script(tmp_path, guard="")
    assert 'StepError: check() runs again where its script is imported: put it under `if __name__ == "__main__":`' in done.stderr


def test_hints():
    facts = {"deterministic": 1, "benchmark": True, "gpu": True, "dynamic_later": False, "timed": False}
    hints = " ".join(library._hints(None, facts, elsewhere=True))
    assert "warn_only=True" in hints and "cudnn.benchmark" in hints
    quiet = facts | {"deterministic": 2, "gpu": False}
    assert list(library._hints(None, quiet, elsewhere=True)) == []
    (graphs,) = library._hints(None, quiet | {"dynamic_later": True}, elsewhere=False)
    (timed,) = library._hints(None, quiet | {"timed": True}, elsewhere=False)
    assert "dynamic=True" in graphs and "max_autotune" in timed and "FlexAttention" in timed


@pytest.mark.parametrize(("dynamic", "later"), [(None, True), (True, False), (False, False)])
def test_a_function_that_was_compiled_static_and_later_dynamic(dynamic, later, monkeypatch):
    monkeypatch.setattr(torch._dynamo.utils, "_compilation_metrics", deque())
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x * 2, backend="eager", dynamic=dynamic)
    for length in (4, 6, 8):
        compiled(torch.ones(length))
    assert settings.facts()["dynamic_later"] == later
