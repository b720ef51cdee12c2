"""What `check` says: of runs, of steps that it cannot run, of functions that no other process can import."""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
from pathlib import Path

import check_children
import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import dash_inductor
from dash_inductor.commands import check as command
from dash_inductor.commands.check_report import Difference, Report, Run
from dash_inductor.commands.cli import main
from dash_inductor.reproduce import StepError
from dash_inductor.reproduce.processes import run

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
    assert_expected_inline(
        REPORT.to_json(),
        """\
{
  "identical": false,
  "step": "train:step",
  "runs": [
    {
      "kind": "first run",
      "process": 1,
      "tensors": 21,
      "differing": 0,
      "identical": true
    },
    {
      "kind": "again in the same process",
      "process": 1,
      "tensors": 21,
      "differing": 0,
      "identical": true
    },
    {
      "kind": "another process, warm caches",
      "process": 2,
      "tensors": 21,
      "differing": 3,
      "identical": false
    }
  ],
  "first_difference": {
    "run": 2,
    "parameter": "embed.weight",
    "index": [
      5,
      2
    ],
    "ulps": 4,
    "what": "835 of 8,192 elements differ; the first is 0.5 in the first run and 0.25 in this one",
    "op": "triton_per_fused_embedding_dense_backward_0",
    "source": "train.py:11",
    "lines": [
      "models/llama.py:370",
      "models/llama.py:64"
    ],
    "cause": "its inputs are equal, and its output is not: it is not deterministic in the backward of this line"
  },
  "notes": [
    "deterministic mode is on with warn_only=True"
  ]
}""",
    )


def test_the_help(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        main(["check", "--help"])
    assert_expected_inline(
        capsys.readouterr().out,
        """\
usage: python -m dash_inductor check [-h] [--runs N] [--kinds KIND [KIND ...]] [--timeout SECONDS]
                                     [--traceback] [--json]
                                     FUNCTION

Runs a training step several times, compares every bit of its gradients, and names the first
operation that differs.

FUNCTION does one training step, from its seeds on: it takes no arguments, makes model and data
anew, calls backward(), and returns the model, whose gradients are compared, or a dict of tensors.

It runs again in the same process, in a fresh process with warm compile caches and in one with
cold caches; under emulation with the CTAs of each kernel in another order, and on a GPU beside a
process that keeps it busy. Where a bit differs, the step runs once more operation by operation,
compiled graphs kernel by kernel, and the first one that makes something else of the same inputs
is named with your line. The gradients of the first run lie in the temporary folder meanwhile
(TMPDIR); no setting is changed.

The exit status is 0 if all runs agree, 1 if one differs, 2 if the step cannot be run.

positional arguments:
  FUNCTION              package.module:function, which does one training step

options:
  -h, --help            show this help message and exit
  --runs N              runs in each process (default 2)
  --kinds KIND [KIND ...]
                        which runs (default: all); same: again in the same process; fresh: another
                        process, warm caches; cold: another process, cold caches; seed: another
                        process, CTAs in another order; busy: another process, busy GPU
  --timeout SECONDS     of each process (default 3600)
  --traceback           where the step cannot be run: show the whole traceback
  --json                print the result as JSON

examples:
  python -m dash_inductor check train:step
  python -m dash_inductor check train:step --runs 5 --kinds same cold
  python -m dash_inductor check train:step --json
""",
    )


@pytest.mark.parametrize(
    ("step", "settings", "message"),
    [
        (raises, {}, r"^step raised KeyError at tests/unit/test_check.py:\d+: 'no such\\nkey'$"),
        (lambda: 3, {}, "^step must return the model whose gradients count, or a dict of tensors; it returned one of type int$"),
        (lambda: None, {}, "it returned nothing$"),
        (dict, {}, "it returned an empty dict$"),
        (lambda: {"loss": 1.0}, {}, "its 'loss' is one of type float$"),
        (without_gradients, {}, r"^step returned a Linear without gradients: call backward\(\) in step, and leave out"),
        (gradients, {"runs": 0}, "^runs=0 is not a whole number of at least 1$"),
        (gradients, {"runs": 1, "kinds": ["same"]}, "^one run has nothing to agree with: ask for at least 2 runs$"),
        (gradients, {"kinds": ["warm"]}, "^'warm' is none of the kinds same, fresh, cold, seed, busy$"),
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
        ([{"a": [1.0]}, {"a": [1.0, 2.0]}], "a", "its shape is [1] in the first run and [2] in this one"),
        (
            [{"b": 1.0, "a": 2.0}, {"b": 1.0, "a": 3.0}],
            "a",
            "1 of 1 elements differ; the first is 2 in the first run and 3 in this one",
        ),
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

    assert command._importable(local)[1].startswith("local is defined inside another function")
    hidden = gradients
    monkeypatch.setattr(sys.modules[__name__], "gradients", raises)
    assert command._importable(hidden)[1].startswith(f"{__name__}.gradients is not this function")
    assert command._importable(without_gradients)[0] == {"module": __name__, "name": "without_gradients"}


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
import dash_inductor, torch

def step():
    names = {{"sin", "cos", "tanh", "exp"}}
    x = weight = torch.ones(2, requires_grad=True)
    for name in names:
        x = getattr(x, name)()
    x.sum().backward()
    return {{"grad": weight.grad}}

torch.set_default_dtype(torch.float64)
{guard}print(dash_inductor.check(step, runs=1, kinds=["fresh"]))
"""


def test_a_script(tmp_path):
    """Its functions are imported from its file, with its settings, and without what is under its guard."""
    (tmp_path / "train.py").write_text(SCRIPT.format(guard='if __name__ == "__main__":\n    '))
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    environ.pop("PYTHONHASHSEED", None)
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=environ | {"PYTHONHASHSEED": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0 and "step: identical, 2 runs in 2 processes" in done.stdout, done.stderr


def test_an_unguarded_script_is_told(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT.format(guard=""))
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert 'StepError: check() runs again where its script is imported: put it under `if __name__ == "__main__":`' in done.stderr


def test_hints():
    facts = {"deterministic": 1, "benchmark": True, "gpu": True, "emulated": False, "seed": 0}
    hints = " ".join(command._hints(None, facts, elsewhere=True))
    assert "warn_only=True" in hints and "cudnn.benchmark" in hints
    assert list(command._hints(None, facts | {"deterministic": 2, "gpu": False}, elsewhere=True)) == []


def test_the_arguments_are_those_of_the_function():
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args(["train:step"])
    assert (args.runs, args.kinds, args.timeout, args.json) == (command.RUNS, None, int(command.TIMEOUT), False)
