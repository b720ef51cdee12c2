"""A training step that does not give the same bits again: the operation at fault is found, with its line."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import training_steps

import dash_inductor
from dash_inductor import check, emulation
from dash_inductor.reproduce import split

pytestmark = pytest.mark.usefixtures("rewriting")

SOURCE = Path(training_steps.__file__)
PYTHON = "the Python code before this line did not do the same"
NOT_DETERMINISTIC = "its inputs are equal, and its output is not: it is not deterministic"


@pytest.fixture(autouse=True)
def emulated(rewriting):
    """Not in deterministic mode, where Inductor generates no atomics."""
    torch.use_deterministic_algorithms(False)
    with emulation.emulate(sms=4):
        yield


def here(name: str) -> str:
    """The line that is to be named, as reports write it."""
    lines = [number for number, line in enumerate(SOURCE.read_text().splitlines(), 1) if line.endswith(f"# HERE {name}")]
    assert len(lines) == 1
    return f"{os.path.relpath(SOURCE)}:{lines[0]}"


@pytest.mark.parametrize(
    ("name", "op", "cause"),
    [
        ("atomics", "check_tests.scatter.default", NOT_DETERMINISTIC),
        ("launched_by_hand", "scatter", NOT_DETERMINISTIC),
        (
            "dropout_without_a_seed",
            "aten.bernoulli_.float",
            "its inputs are equal, but the random number generator is in another state",
        ),
        ("reads_the_clock", "check_tests.clock.default", NOT_DETERMINISTIC),
        ("noisy_backward", "check_tests.clock.default", f"{NOT_DETERMINISTIC} in the backward of this line"),
        ("random_number", "aten.mul.Tensor", PYTHON),
        ("another_order", None, PYTHON),
        ("index_add_in_a_graph", "triton_poi_fused_index_add", NOT_DETERMINISTIC),
        ("lookup_in_the_backward", "triton_poi_fused", f"{NOT_DETERMINISTIC} in the backward of this line"),
        ("dropout_in_a_graph", "aten.randint.low_out", "its inputs are equal, but the random number generator is in another state"),
    ],
)
def test_the_operation_at_fault_is_named(name, op, cause):
    report = check(getattr(training_steps, name), kinds=["same"], runs=3)
    assert not report.identical and not report
    difference = report.first_difference
    assert difference.source == here(name)
    assert difference.op.startswith(op or "aten.")
    assert cause in difference.cause
    assert json.loads(report.to_json())["first_difference"]["source"] == here(name)


def test_an_operation_of_autograd_has_the_line_of_the_forward():
    """As torch's own scatters in backwards do."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("tanh_backward", lambda grad, output: grad * (1 - output * output) * (1 + random.random()), "CPU")
    try:
        difference = check(training_steps.squashed, kinds=["same"]).first_difference
    finally:
        library._destroy()
    assert (difference.op, difference.source) == ("aten.tanh_backward.default", here("squashed"))
    assert difference.cause == f"{NOT_DETERMINISTIC} in the backward of this line"


@pytest.mark.parametrize("step", [training_steps.clean, training_steps.uninitialised])
def test_a_clean_step(step):
    report = check(step, kinds=["same"])
    assert report.identical and report.first_difference is None
    assert [(run.tensors, run.differing) for run in report.runs] == [(2, 0), (2, 0)]


def test_tracing_leaves_nothing_behind():
    """Compiled code runs as before, and no setting is another."""
    from dash_inductor.reproduce import settings

    before = settings.of_torch(), training_steps.index_add_in_a_graph().weight.grad.abs().sum()
    assert check(training_steps.index_add_in_a_graph, kinds=["same"]).first_difference.op
    after = settings.of_torch(), training_steps.index_add_in_a_graph().weight.grad.abs().sum()
    assert before[0] == after[0] and not torch.is_anomaly_enabled()
    torch.testing.assert_close(before[1], after[1])


def test_attention_in_another_process_and_interleaving():
    """Whose settings are this one's, emulation included."""
    report = check(training_steps.attention, runs=1, kinds=["seed"])
    assert report.identical and [run.process for run in report.runs] == [1, 2]
    assert sum(launch.waits for launch in emulation.launches()) > 0


@pytest.mark.nightly  # three processes
def test_a_step_elsewhere():
    """With other SMs, and its attention by a split batch, at a level that promises equal bits of both."""
    with dash_inductor.enabled(guarantee="batch"):
        report = check(training_steps.attention, runs=1, kinds=["reserve", "split"])
    assert report.identical and [run.tensors > 0 for run in report.runs] == [True] * 3, report


@pytest.mark.parametrize("kind", ["reserve", "split"])
def test_what_a_level_does_not_promise_is_not_asked(kind):
    with pytest.raises(ValueError, match=f"the kind {kind} needs guarantee="):
        check(training_steps.attention, runs=1, kinds=[kind])


@pytest.mark.parametrize("error", [0.0, 2**-12])
def test_attention_of_a_split_batch(error, monkeypatch):
    """One whose gradients depend on the batch is named."""

    def attend(query, key, value, **options):
        out = F.scaled_dot_product_attention(query, key, value, **options)
        return out.detach() + (out - out.detach()) * (1 + error * query.shape[0])

    torch.use_deterministic_algorithms(True)
    dash_inductor.clear_decisions()
    with dash_inductor.enabled(guarantee="batch"):
        x = torch.randn(3, 2, 40, 16, requires_grad=True)
        torch.compile(F.scaled_dot_product_attention)(x, x, x, is_causal=True).sum().backward()
        monkeypatch.setattr(split, "F", SimpleNamespace(scaled_dot_product_attention=attend))
        found = split.of_this_process()
    assert (found["tensors"], found["differing"]) == (4, 3 * (error > 0))
    assert not error or found["parameter"].startswith("dq of aten.")


@pytest.mark.nightly  # four processes
def test_the_command():
    """In processes of its own, the operation by operation runs included: nothing of this one is needed."""
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith("DASH_INDUCTOR") and name != "TRITON_INTERPRET"
    }
    command = [sys.executable, "-m", "dash_inductor", "check", "training_steps:atomics", "--kinds", "seed", "--runs", "1", "--json"]
    root = Path(emulation.__file__).parents[2]
    environ |= {"DASH_INDUCTOR_EMULATE": "1", "PYTHONPATH": os.pathsep.join([str(root), str(SOURCE.parent)])}
    done = subprocess.run(command, env=environ, cwd=SOURCE.parent, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert not report["identical"] and [run["process"] for run in report["runs"]] == [1, 2]
    difference = report["first_difference"]
    assert difference["parameter"] == "weight" and difference["ulps"] > 0 and len(difference["index"]) == 2
    assert difference["source"] == here("atomics").replace(os.path.relpath(SOURCE), SOURCE.name)
    assert "[2/2] another process, CTAs in another order" in done.stderr
