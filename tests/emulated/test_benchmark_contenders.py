"""The attention benchmark's way to our kernel, under emulation: each contender is what its name says, and its checks tell.

Times of an emulation mean nothing, and the benchmark takes none.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from attention import FP32_ERROR

from dash_inductor import emulation
from dash_inductor.qualify import contenders as who
from dash_inductor.qualify import training
from dash_inductor.qualify.inputs import Inputs, Reference, random_inputs
from dash_inductor.qualify.measure import LAUNCHES, Result, attempt, settings
from dash_inductor.qualify.rows import OK
from dash_inductor.qualify.shapes import Shape

pytestmark = pytest.mark.nightly

CAUSAL = Shape("tiny", "causal", 1, 4, 2, 70, 16)
FULL = Shape("tiny", "full", 1, 2, 2, 70, 16)
GEMMA = Shape("tiny", "causal", 1, 2, 1, 150, 16, window=40, softcap=1.5)
FLEX = {
    "window, soft-cap": GEMMA,
    "soft-cap": replace(GEMMA, window=None),
    "documents": Shape("tiny", "causal", 2, 1, 1, 150, 16, documents=(90, 3, 57)),
    "both directions, window, documents": Shape("tiny", "full", 1, 2, 1, 100, 16, window=20, documents=(60, 3, 37)),
}
KNOWN = who.contenders() | who.tuned()


@pytest.fixture(autouse=True)
def emulated() -> Iterator[None]:
    emulation.clear_launches()
    with settings(), emulation.emulate(seed=3):
        yield
    torch._dynamo.reset()


def tried(name: str, shape: Shape, inputs: Inputs | None = None) -> Result:
    """The contender's forward, backwards and checks."""
    inputs = inputs or random_inputs(shape, "cpu", torch.float32)
    return attempt(KNOWN[name], shape, inputs, Reference.of(shape, inputs, torch.float64))


def test_ours_and_the_baseline():
    ours, baseline = (tried(name, CAUSAL) for name in ("ours", who.BASELINE))
    assert (ours.status, ours.same_bits) == (baseline.status, baseline.same_bits) == (OK, True)
    assert ours.error <= max(2 * baseline.error, FP32_ERROR)
    assert ours.prepared is not None and baseline.prepared is not None
    decision = ours.prepared.decision
    assert decision is not None and decision.rewritten and baseline.prepared.decision is None
    assert (decision.mask, decision.heads, decision.kv_heads, decision.q_len) == ("causal", 4, 2, 70)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("name", FLEX)
def test_flex_attention(name):
    """Ours comes from FlexAttention there; stock's kernel runs as well."""
    shape = FLEX[name]
    inputs = random_inputs(shape, "cpu", torch.float32)
    ours, stock = (tried(name, shape, inputs) for name in ("ours", "flex"))
    assert (ours.status, ours.same_bits) == (stock.status, stock.same_bits) == (OK, True)
    assert ours.error <= max(2 * stock.error, FP32_ERROR) and stock.error < 1e-5
    decision = ours.prepared.decision
    assert decision.rewritten and decision.op == "flex_attention_backward" and stock.prepared.decision is None
    assert (decision.mask, decision.predicted_us, decision.q_len) == ("block_mask", None, shape.length)
    assert len(emulation.launches()) == LAUNCHES  # of ours: stock's has no atomics


@pytest.mark.parametrize("name", ["documents", "both directions, documents"])
def test_packed_sequences(name):
    """Documents alone, by torch's attention of packed sequences."""
    shape = replace(FLEX["documents"], mask="causal" if name == "documents" else "full", heads=2)
    ours, flex = (tried(name, shape) for name in ("ours-varlen", "ours"))
    assert (ours.status, ours.same_bits) == (OK, True) and ours.error <= max(2 * flex.error, FP32_ERROR)
    assert "varlen" in ours.prepared.decision.op
    for other in (CAUSAL, GEMMA):
        assert tried("ours-varlen", other).status.startswith("refused: it is asked for documents alone")


@pytest.mark.parametrize("mode", ["default", "dynamic"])
def test_training_steps(mode):
    """Each way of a layer's step, at each length, has the same bits twice; what is not installed says so."""
    sizes = training.Sizes(64, 4, 2, 96, torch.float32)
    found = [step for way in training.WAYS for step in training.steps(way, mode, sizes, (96, 80), "cpu")]
    lengths = [96, 80] if mode == "dynamic" else [96]
    assert [(step.way, step.length) for step in found[:-1]] == [(way, n) for way in training.WAYS[:3] for n in lengths]
    assert all(step.status == "ok" and step.same_bits and step.median_ms is None for step in found[:-1])
    assert found[-1].status == "flash_attn.cute is not importable"
    assert len(emulation.launches()) == 2 * len(lengths)  # of ours alone


@pytest.mark.parametrize("shape", [CAUSAL, GEMMA], ids=["causal", "flex"])
def test_the_price_of_order_is_paid_in_wrong_gradients(shape):
    """Without waiting some rank 0 stores over what came before it: dq is wrong, dk and dv are not sums across CTAs."""
    unordered = tried("ours-unordered", shape)
    assert unordered.errors["dq"] > 0.01 > 1e-5 > max(unordered.errors["dk"], unordered.errors["dv"])
    assert not unordered.contender.valid and not unordered.contender.deterministic
    assert tried("ours", shape).error < 1e-5  # and what is compiled after it is the kernel again


@pytest.mark.parametrize("name", ["ours-release-after-s", "ours-release-after-dv"])
def test_where_a_step_is_released_decides_no_bits(name):
    inputs = random_inputs(CAUSAL, "cpu", torch.float32)
    ours, variant = (tried(n, CAUSAL, inputs).prepared.launch() for n in ("ours", name))
    for gradient, expected in zip(variant, ours, strict=True):
        assert torch.equal(gradient, expected)


def test_forced_settings():
    shift, chained = (tried(name, FULL) for name in ("ours-shift", "ours-chained"))
    assert (shift.status, chained.status) == (OK, OK)
    assert shift.prepared.decision.family == "shift"
    assert chained.prepared.decision.launch == "chained"


@pytest.mark.parametrize("name", ["ours", "ours-two-pass"])  # a module with a table as its constant, and one without constants
def test_the_decision_is_known_when_everything_comes_out_of_a_cache(name):
    first, second = (tried(name, FULL).prepared.decision for _ in range(2))
    assert first is not None and first.text() == second.text()


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("ours-shift", CAUSAL, "refused: declined: family 'shift' serves the full mask only"),
        ("ours-symmetric", FULL, "refused: declined: family 'symmetric' serves causal masks only"),
        ("ours", Shape("wide", "full", 1, 1, 1, 16, 512), "refused: declined: head dim 512"),
        ("ours-unordered", Shape("wide", "causal", 1, 1, 1, 16, 256), "refused: declined: head dim 256 is more than the 128"),
        ("ours-two-per-sm", FULL, "refused: two-per-sm changes nothing at head dim 16 on emulated"),
        ("ours-shift", GEMMA, "refused: declined: schedule='shift' takes no BlockMask"),
        ("ours", replace(GEMMA, head_dim=256), "refused: declined: head dim 256 is more than the 128 of one pass"),
    ],
)
def test_reasons(name, shape, reason):
    found = tried(name, shape)
    assert found.status.startswith(reason)
    assert found.prepared is None and found.times_ms == ()
