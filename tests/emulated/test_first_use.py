"""A kernel is tried before its first use: what is right is used, and what is not leaves attention to stock, with a reason.

The GPU is the emulated one. A fault and a kernel that never ends are another program in the place of the trial's.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from attention import WAIT, assert_right, attention, gradients, mutate, tables_used
from tensors import qkv
from test_faults import compiled
from torch._dynamo.exc import BackendCompilerFailed

import dash_inductor
from dash_inductor import decisions
from dash_inductor.config import ALWAYS, Config
from dash_inductor.devices.target import Target
from dash_inductor.first_use import verdict as first_use
from dash_inductor.first_use.kind import Kind, kinds_of, settings_for
from dash_inductor.first_use.verdict import Verdict
from dash_inductor.problem import Problem
from dash_inductor.reproduce import trial
from dash_inductor.resolve import resolve
from dash_inductor.rewrite.declined import InternalErrorWarning
from dash_inductor.templates.tiles import EMULATED

*INPUTS, GRAD_OUT = qkv(1, 2, 40, 40, 16)
CAUSAL = Kind("one_pass", "triton", "grouped", "emulated", "fp32", 16, 16, "causal", 16, 32)
BLOCK_MASK = Kind("one_pass", "triton", "chained", "emulated", "fp32", 16, 16, "block_mask", 16, 32, 32)
FULL = Kind("two_pass", "triton", "plain", "emulated", "bf16", 24, 16, "full", 16, 32)
LONG = replace(CAUSAL, shared_row=True)
LARGE = Kind("two_pass", "triton", "plain", "emulated", "fp32", 144, 144, "block_mask", 16, 32, 64)
FAILED = "one_pass .grouped, causal mask, fp32, head dim 16. on emulated failed its trial on this GPU: "


@pytest.fixture(autouse=True)
def on(as_installed: None) -> Iterator[None]:
    first_use._verdict.cache_clear()
    with dash_inductor.enabled(guard=ALWAYS, template="one_pass"):
        yield


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command lines of trials."""
    stock, lines = subprocess.run, []

    def run(line: list[str], **options: object) -> object:
        if first_use.TRIAL in line:
            lines.append(line)
        return stock(line, **options)

    monkeypatch.setattr(subprocess, "run", run)
    return lines


@pytest.fixture
def trial_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Puts a program in the place of the trial's."""

    def put(code: str) -> None:
        (tmp_path / "another_trial.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "another_trial", raising=False)
        monkeypatch.setattr(first_use, "TRIAL", "another_trial")

    return put


def attend() -> tuple[torch.Tensor, ...]:
    return gradients(compiled(attention(causal=True)), INPUTS, GRAD_OUT)


def assert_rewritten() -> None:
    assert_right(attend(), attention(causal=True), INPUTS, GRAD_OUT)
    assert decisions()[-1].rewritten


def assert_left(said: str) -> None:
    """One warning, the reason in the decision, stock's gradients."""
    with pytest.warns(InternalErrorWarning, match=f"please report: UnfitKernelError: {FAILED}{re.escape(said)}"):
        assert_right(attend(), attention(causal=True), INPUTS, GRAD_OUT)
    (decision,) = decisions()
    assert not decision.rewritten and said in str(decision.reason)


def test_a_kernel_that_works_is_tried_once_and_used(processes):
    assert_rewritten()
    assert_rewritten()
    ((_, _, module, job),) = processes
    assert module == "dash_inductor.reproduce.trial" and Kind(**json.loads(job)["kind"]) == CAUSAL
    assert len(decisions()) == 2  # the trial's own is none


@pytest.mark.parametrize("kind", [CAUSAL, LONG, BLOCK_MASK, FULL, LARGE], ids=str)
def test_kinds(kind):
    settings = Config(template=kind.template, guard="off", on_unsupported="error", emulate=True)
    verdict = trial.tried(kind, "cpu", settings)
    assert verdict.fit and verdict.said.startswith("dq is ")


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("tried_wrong", {"dk = dk*SCALE": "dk = dk*SCALE*1.01"}, "dk is 1.0e-02 off"),
        ("tried_without_wait", {WAIT: "pass"}, "3 launches differ in dq"),
    ],
)
def test_a_kernel_that_does_not_work(name, changes, said, monkeypatch):
    mutate(monkeypatch, "ONE_PASS", name, changes)
    verdict = trial.tried(CAUSAL, "cpu", Config(template="one_pass", guard="off", on_unsupported="error", emulate=True))
    assert verdict.fit is False and said in verdict.said


def test_a_long_sequence_has_a_kind_of_its_own():
    """What is tried takes a shared row for its small attention; the order is forced, by which it would take another family."""
    problem = Problem("causal", 1, 2, 1, 1 << 16, 1 << 16, 16, "fp32")
    resolution = resolve(problem, Config(emulate=True), Target(EMULATED, EMULATED, 6))
    (kind,) = kinds_of(resolution)
    assert kind == LONG and kinds_of(resolve(replace(problem, q_len=64, kv_len=64), Config(), resolution.target)) != [kind]
    with tables_used() as tables:
        verdict = trial.tried(kind, "cpu", settings_for(kind, resolution))
        trial.tried(CAUSAL, "cpu", settings_for(kind, resolution))
    long, *_, short = tables
    assert verdict.fit and len(long) < len(short) and long[:5] == short[:5]


def test_a_gradient_that_is_no_number_is_wrong():
    ones = (torch.ones(2),) * 3
    assert not trial.verdict_on([(torch.full((2,), torch.nan), *ones[1:])], ones, 1.0).fit


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os; os.abort()", "the process that tried it ended with status -6: without a word"),
        ("raise RuntimeError('no such module')", "the process that tried it ended with status 1: RuntimeError: no such module"),
        ("import time; time.sleep(60)", "it did not end in 2 s"),
        ('print(\'verdict: {"fit": false, "said": "dq is 1.0e+00 off"}\')', "dq is 1.0e+00 off"),
    ],
    ids=["fault", "error", "hangs", "wrong"],
)
def test_what_fails_leaves_attention_to_stock(code, said, trial_is, monkeypatch):
    """What is compiled when the kernel works again is rewritten: no cache has the graph that was left."""
    monkeypatch.setattr(first_use, "MOST_SECONDS", 2)
    trial_is(code)
    assert_left(said)
    trial_is('print(\'verdict: {"fit": true, "said": ""}\\ngoodbye\')')
    first_use._verdict.cache_clear()
    assert_rewritten()


def test_an_error_if_so_asked(trial_is):
    trial_is("import os; os.abort()")
    dash_inductor.configure(on_unsupported="error")
    with pytest.raises(BackendCompilerFailed, match=FAILED):
        attend()
    dash_inductor.configure(on_unsupported="fallback")


@pytest.mark.parametrize("fit", [True, False])
def test_where_no_other_process_gets_the_gpu_this_one_tries(fit, trial_is):
    trial_is(
        "def tried(*_):\n"
        "    from dash_inductor.first_use.verdict import Verdict\n"  # which imports torch: not in the other process
        f"    return Verdict({fit}, 'tried here')\n"
        'if __name__ == \'__main__\': print(\'verdict: {"fit": null, "said": "busy or unavailable"}\')\n'
    )
    if fit:
        assert_rewritten()
    else:
        assert_left("tried here")


def test_another_process_on_the_machine_knows(monkeypatch):
    """Unless it is always to be tried, or is another kind."""
    settings = Config(template="one_pass", guard="off", emulate=True)
    verdicts = [Verdict(True, "right", judged=True), Verdict(False, "wrong", judged=True)]
    monkeypatch.setattr(first_use, "_tried_by_another", lambda *_: verdicts.pop())
    for kind, fit in ((CAUSAL, False), (CAUSAL, False), (BLOCK_MASK, True)):
        assert first_use._verdict(kind, "cpu", settings, False).fit is fit
        first_use._verdict.cache_clear()
    verdicts += [Verdict(True, "right", judged=True)]
    assert first_use._verdict(CAUSAL, "cpu", settings, True).fit


def test_nobody_relies_on_what_says_nothing_of_the_kernel(monkeypatch):
    """A trial that was too slow, or found no memory, is none for other processes."""
    settings = Config(template="one_pass", guard="off", emulate=True)
    verdicts = [Verdict(True, "right", judged=True), Verdict(False, "it did not end in 180 s")]
    monkeypatch.setattr(first_use, "_tried_by_another", lambda *_: verdicts.pop())
    for fit in (False, True):
        assert first_use._verdict(CAUSAL, "cpu", settings, False).fit is fit
        first_use._verdict.cache_clear()


def test_a_cache_that_cannot_be_written(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setattr(first_use, "cache_dir", lambda: str(tmp_path / "file"))
    monkeypatch.setattr(first_use, "_tried_by_another", lambda *_: Verdict(True, "right", judged=True))
    assert_rewritten()
    assert "what came out of a trial cannot be kept" in caplog.text


def test_off_and_under_emulation_nothing_is_tried(monkeypatch):
    monkeypatch.setattr(first_use, "_tried_by_another", lambda *_: 1 / 0)
    for guard in ("off", "auto"):
        dash_inductor.configure(guard=guard)
        assert_rewritten()


@pytest.mark.parametrize("changes_scores", [False, True])
def test_what_is_tried_has_the_tile_of_its_kind(changes_scores, monkeypatch):
    """At head dim 64 an H100 has two, and what is tried has no function of scores."""
    plain, target, found = Problem("full", 1, 2, 1, 4096, 4096, 64, "bf16"), Target("h100", 90, 132), []
    resolution = resolve(replace(plain, changes_scores=changes_scores), Config(template="one_pass"), target)
    (kind,) = kinds_of(resolution)

    def launches(kind: Kind, inputs: object) -> list[tuple[torch.Tensor, ...]]:
        found.append(resolve(plain, settings_for(kind, resolution), target).tile)
        return [(torch.ones(1),) * 3]

    monkeypatch.setattr(trial, "_attention", lambda *_: ([], (torch.ones(1),) * 3))
    monkeypatch.setattr(trial, "_launches", launches)
    assert trial.tried(kind, "cpu", Config()).fit
    assert found == [resolution.tile] and found[0].block_m == (64 if changes_scores else 128)
