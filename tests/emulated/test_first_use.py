"""A kernel is tried before its first use: what is right is used, and what is not leaves attention to stock, with a reason.

The GPU is the emulated one. A fault and a kernel that never ends are another program in the place of the trial's.
"""

from __future__ import annotations

import json
import re
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
from dash_inductor.decision import Declined
from dash_inductor.devices import target
from dash_inductor.devices.target import Target
from dash_inductor.first_use import known, process
from dash_inductor.first_use import verdict as first_use
from dash_inductor.first_use.kind import Kind, kinds_of, settings_for
from dash_inductor.first_use.known import Verdict
from dash_inductor.problem import Problem
from dash_inductor.reproduce import trial
from dash_inductor.resolve import resolve
from dash_inductor.rewrite.declined import InternalErrorWarning
from dash_inductor.templates.tiles import EMULATED

*INPUTS, GRAD_OUT = qkv(1, 2, 40, 40, 16)
CAUSAL = Kind("one_pass", "triton", "grouped", "emulated", "fp32", 16, 16, "causal", 16, 32)
BLOCK_MASK = Kind("one_pass", "triton", "chained", "emulated", "fp32", 16, 16, "block_mask", 16, 32, 32)
FULL = Kind("two_pass", "triton", "plain", "emulated", "bf16", 24, 16, "full", 16, 32)
LONG = replace(CAUSAL, long_schedule="descending")
LARGE = Kind("two_pass", "triton", "plain", "emulated", "fp32", 144, 144, "block_mask", 16, 32, 64)
SAID = """import json, os, time
def at(stage): print("stage:", stage, flush=True)
def verdict(fit, said=""): print("verdict:", json.dumps({"version": 2, "fit": fit, "said": said}), flush=True)
"""
FAILED = "one_pass .grouped, causal mask, fp32, head dim 16. on emulated failed its trial on this GPU: "


@pytest.fixture(autouse=True)
def on(as_installed: None) -> Iterator[None]:
    first_use._verdict.cache_clear()
    with dash_inductor.enabled(guard=ALWAYS, template="one_pass"):
        yield


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """Those of trials in other processes."""
    stock, seen = process.command, []

    def command(job: str) -> list[str]:
        seen.append(json.loads(job))
        return stock(job)

    monkeypatch.setattr(process, "command", command)
    return seen


@pytest.fixture
def trial_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Puts a program in the place of the trial's, and another in that of a second trial and of one in this process."""

    def put(code: str, again: str = "raise RuntimeError('not asked for')", here: str = "1 / 0") -> None:
        programs = [code, again]
        monkeypatch.setattr(process, "command", lambda job: [sys.executable, "-c", SAID + programs.pop(0)])
        (tmp_path / "another_trial.py").write_text(
            f"from dash_inductor.first_use.known import Verdict\ndef tried(*_): return {here}"
        )
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
    decision = decisions()[-1]
    assert not decision.rewritten and said in str(decision.reason)


def test_a_kernel_that_works_is_tried_once_and_used(jobs):
    assert_rewritten()
    assert_rewritten()
    (job,) = jobs
    assert Kind(**job["kind"]) == CAUSAL
    assert len(decisions()) == 2  # the trial's own is none


IN_BANDS, IN_SETS = replace(BLOCK_MASK, bands=True), replace(BLOCK_MASK, sets=True)


@pytest.mark.parametrize("kind", [CAUSAL, LONG, BLOCK_MASK, IN_BANDS, IN_SETS, FULL, LARGE], ids=str)
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


@pytest.mark.parametrize("kind", [IN_BANDS, IN_SETS], ids=str)
def test_how_chains_are_cut_is_tried(kind, monkeypatch):
    """By a kernel in which dk is that of the last part of a chain; where chains are whole that is right."""
    settings = Config(template="one_pass", guard="off", on_unsupported="error", emulate=True)
    sums = "dk += tl.load(dk_ptrs, mask=tl.full(dk_ptrs.shape, 1, tl.int1) & (place > {})"
    mutate(monkeypatch, "BLOCK_MASK_ONE_PASS", f"tried_in_parts_{kind.bands}", {sums.format(0): sums.format(99)})
    assert trial.tried(kind, "cpu", settings).fit is False
    assert trial.tried(BLOCK_MASK, "cpu", settings).fit


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({}, [(False, False)]),  # 32 heads of 64 KV tiles
        ({"batch": 1, "kv_heads": 4}, [(True, True)]),
        ({"batch": 1, "heads": 4, "kv_heads": 4}, [(True, False)]),
        ({"batch": 1, "heads": 4, "kv_heads": 1, "q_len": 512, "kv_len": 512}, [(False, True)]),
        ({"masks": 16}, [(False, False), (False, True)]),  # of query heads, or of batch elements
        ({"mask": "causal", "block_size": None}, [(False, False)]),
    ],
    ids=str,
)
def test_the_kinds_of_a_mask_in_blocks(changes, parts):
    sizes = {"batch": 4, "heads": 16, "kv_heads": 8, "q_len": 8192, "kv_len": 8192, "head_dim": 128, "block_size": (128, 128)}
    problem = Problem(**{"mask": "block_mask", "dtype": "bf16"} | sizes | changes)
    resolution = resolve(problem, Config(guarantee="device"), Target("h100", 90, 132))
    assert [(kind.bands, kind.sets) for kind in kinds_of(resolution) if kind.template == "one_pass"] == parts
    batch = resolve(problem, Config(guarantee="batch"), Target("h100", 90, 132))
    assert not any(kind.bands for kind in kinds_of(batch))


def test_what_is_tried_writes_where_nan_was(monkeypatch):
    """Each float buffer of the generated code."""
    filled = []
    fill = trial._fill_what_is_allocated

    def filling(compiled):
        fill(compiled)
        filled.append(compiled.current_callable.__globals__["empty_strided_cpu"]((8,), (1,), torch.float32))

    monkeypatch.setattr(trial, "_fill_what_is_allocated", filling)
    settings = Config(template="one_pass", guard="off", on_unsupported="error", emulate=True)
    assert trial.tried(CAUSAL, "cpu", settings).fit and filled[0].isnan().all()


def test_a_long_sequence_has_a_kind_of_its_own():
    """What is tried takes a shared row for its small attention; the order is forced, by which it would take another family."""
    problem = Problem("causal", 1, 2, 1, 1 << 16, 1 << 16, 16, "fp32")
    resolution = resolve(problem, Config(emulate=True), Target(EMULATED, EMULATED, 6))
    (kind,) = kinds_of(resolution)
    assert kind == LONG and kinds_of(resolve(replace(problem, q_len=64, kv_len=64), Config(), resolution.target)) != [kind]
    with tables_used() as tables:
        verdict = trial.tried(kind, "cpu", settings_for(kind, resolution.settings))
        trial.tried(CAUSAL, "cpu", settings_for(kind, resolution.settings))
    long, *_, short = tables
    assert verdict.fit and len(long) < len(short) and long[:5] == short[:5]


def test_a_gradient_that_is_no_number_is_wrong():
    ones = (torch.ones(2),) * 3
    assert not trial.verdict_on([(torch.full((2,), torch.nan), *ones[1:])], ones, 1.0).fit


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("at('launched'); os.abort()", "the process that tried it ended with status -6: without a word, launched"),
        ("at('launched'); raise RuntimeError('no')", "the process that tried it ended with status 1: RuntimeError: no, launched"),
        ("at('launched'); time.sleep(60)", "it did not end in 1 s, launched"),
        ("verdict(False, 'dq is 1.0e+00 off')", "dq is 1.0e+00 off"),
    ],
    ids=["fault", "error", "hangs", "wrong"],
)
def test_what_fails_once_it_is_launched_leaves_attention_to_stock(code, said, trial_is, monkeypatch):
    """Whoever comes later reads that. What is compiled when the kernel works again is rewritten: no cache has the graph."""
    monkeypatch.setattr(first_use, "SECONDS", (1, 1))
    trial_is(code)
    assert_left(said)
    trial_is("raise RuntimeError('not asked for')")
    first_use._verdict.cache_clear()
    kind = settings_for(CAUSAL, Config(emulate=True))
    assert first_use._verdict(CAUSAL, "cpu", kind, False).fit is False
    trial_is("verdict(True)")
    first_use._verdict.cache_clear()
    assert_rewritten()


@pytest.mark.parametrize(
    "code",
    [
        "at('started'); os.abort()",
        "raise RuntimeError('no such module')",
        "at('compiled'); time.sleep(60)",
        "at('launched'); verdict(None, 'OutOfMemoryError: CUDA out of memory')",
    ],
    ids=["fault", "error", "hangs", "memory"],
)
def test_what_says_nothing_of_the_kernel_is_tried_again(code, trial_is, monkeypatch):
    """By another process, which has more time, and then by this one."""
    monkeypatch.setattr(first_use, "SECONDS", (1, 2))
    trial_is(code, again="time.sleep(1.5); verdict(True)")
    assert_rewritten()
    first_use._verdict.cache_clear()
    trial_is(code, again="os.abort()", here="Verdict(True, '')")
    assert_rewritten()
    first_use._verdict.cache_clear()
    trial_is(code, again="os.abort()", here="Verdict(False, 'dq is off')")
    assert_left("dq is off")


def test_without_an_answer_always_raises(trial_is):
    """With the words of all that was tried, and whatever `on_unsupported` says."""
    trial_is("os.abort()", again="raise RuntimeError('no room')", here="Verdict(None, 'OutOfMemoryError')")
    said = "the process that tried it ended with status 1: RuntimeError: no room; here: OutOfMemoryError"
    with pytest.raises(BackendCompilerFailed, match=f"could not be tried on this GPU: {said}"):
        attend()


def test_without_an_answer_auto_takes_what_has_run_on_such_a_gpu(monkeypatch, caplog):
    """With a warning. Any other is declined, which is no bug of it."""
    h200 = replace(CAUSAL, arch=90, dtype="bf16", head_dim=128, value_dim=128, block_m=64, block_n=128)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    monkeypatch.setattr(target, "is_there", lambda device: True)
    monkeypatch.setattr(first_use, "_tried", lambda *_: Verdict(None, "no room"))
    monkeypatch.setattr(known, "file_of", lambda *_: Path(known.cache_dir(), "trials", "one.json"))
    auto, device = Config(guard="auto"), torch.device("cuda", 0)
    first_use.require_fit_kinds([h200], device, auto)
    assert first_use.is_used[h200]
    (said,) = [message for message in caplog.messages if "used untried" in message]
    assert "(no room): such a kernel has run on a GPU of this model" in said
    others = {"dtype": "fp32", "mask": "block_mask", "head_dim": 96, "long_schedule": "shift", "dropout": "flash"}
    h200 = replace(h200, kernel="gluon")
    for name, value in others.items():
        first_use._verdict.cache_clear()
        with pytest.raises(Declined, match="its kernel could not be tried on this GPU: no room"):
            first_use.require_fit_kinds([replace(h200, **{name: value})], device, auto)
        assert not first_use.is_used[replace(h200, **{name: value})]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H100 80GB HBM3")
    first_use._verdict.cache_clear()
    with pytest.raises(Declined):
        first_use.require_fit_kinds([h200], device, auto)


def test_a_process_that_is_not_safe_tries_nothing(trial_is, monkeypatch):
    monkeypatch.setattr(first_use, "_is_safe_here", lambda device: False)
    trial_is("os.abort()", again="os.abort()", here="Verdict(True, '')")
    with pytest.raises(BackendCompilerFailed, match="could not be tried"):
        attend()


def test_an_error_if_so_asked(trial_is):
    trial_is("at('launched'); os.abort()")
    dash_inductor.configure(on_unsupported="error")
    with pytest.raises(BackendCompilerFailed, match=FAILED):
        attend()
    dash_inductor.configure(on_unsupported="fallback")


def test_another_process_on_the_machine_knows(monkeypatch):
    """Unless it is always to be tried, or is another kind."""
    settings = Config(template="one_pass", guard="off", emulate=True)
    verdicts = [Verdict(True, "right"), Verdict(False, "wrong")]
    monkeypatch.setattr(first_use, "_tried", lambda *_: verdicts.pop())
    for kind, fit in ((CAUSAL, False), (CAUSAL, False), (BLOCK_MASK, True)):
        assert first_use._verdict(kind, "cpu", settings, False).fit is fit
        first_use._verdict.cache_clear()
    verdicts += [Verdict(True, "right")]
    assert first_use._verdict(CAUSAL, "cpu", settings, True).fit


def test_nobody_relies_on_what_says_nothing_of_the_kernel(monkeypatch):
    """A trial that found no memory is none for processes that start later."""
    settings = Config(template="one_pass", guard="off", emulate=True)
    verdicts = [Verdict(True, "right"), Verdict(None, "no room")]
    monkeypatch.setattr(first_use, "_tried", lambda *_: verdicts.pop())
    for fit in (None, True):
        assert first_use._verdict(CAUSAL, "cpu", settings, False).fit is fit
        first_use._verdict.cache_clear()


def test_off_and_under_emulation_nothing_is_tried(monkeypatch):
    monkeypatch.setattr(first_use, "_tried", lambda *_: 1 / 0)
    for guard in ("off", "auto"):
        dash_inductor.configure(guard=guard)
        assert_rewritten()


@pytest.mark.parametrize("changes_scores", [False, True])
def test_what_is_tried_has_the_tile_of_its_kind(changes_scores, monkeypatch):
    """At head dim 64 an H100 has two, and what is tried has no function of scores."""
    plain, target, found = Problem("full", 1, 2, 1, 4096, 4096, 64, "bf16"), Target("h100", 90, 132), []
    resolution = resolve(replace(plain, changes_scores=changes_scores), Config(template="one_pass", kernel="triton"), target)
    (kind,) = kinds_of(resolution)

    def launches(kind: Kind, inputs: object, stage: object) -> list[tuple[torch.Tensor, ...]]:
        found.append(resolve(plain, settings_for(kind, resolution.settings), target).tile)
        return [(torch.ones(1),) * 3]

    monkeypatch.setattr(trial, "attention", lambda *_: ([], (torch.ones(1),) * 3))
    monkeypatch.setattr(trial, "_launches", launches)
    assert trial.tried(kind, "cpu", Config()).fit
    assert found == [resolution.tile] and found[0].block_m == (64 if changes_scores else 128)
