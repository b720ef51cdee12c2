"""What tests/gpu does with a GPU, done here once with the emulated device and small sizes: no body fails for its own mistakes."""

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "gpu"))
import test_eager_on_gpu as eager
import test_flex_on_gpu as flex
import test_masked_on_gpu as masked
import test_on_gpu as bodies
import test_side_by_side as beside
import test_stock_ops_on_gpu as stock_ops
import test_varlen_on_gpu as varlen
import test_wait as wait

import dash_inductor
from dash_inductor import emulation
from dash_inductor.hooks import install

SMS = 6


INPUTS, BACKWARD_OF = bodies.inputs, bodies.backward_of
SHAPE = (1, 1, 1, 40, 40, 16)
SIX_HEADS = (1, SMS, SMS, 40, 40, 16)
FLEX = (1, flex.HEADS, flex.KV_HEADS, 40, 40, 16)


@pytest.fixture(autouse=True)
def emulated(rewriting, monkeypatch):
    """The CPU, two launches, and one CUDA stream after the other."""
    for module in (bodies, beside):
        monkeypatch.setattr(module, "DEVICE", "cpu")
        monkeypatch.setattr(module, "LAUNCHES", 2)
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in {
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda entered: nullcontext(),
        "synchronize": lambda: None,
        "get_device_properties": lambda device: SimpleNamespace(multi_processor_count=SMS),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(install, "OUTSIDE", ())  # references are eager
    with emulation.emulate(seed=1, sms=SMS), dash_inductor.enabled(on_unsupported="error"):
        yield


@pytest.fixture
def small(monkeypatch):
    """Whatever sizes a test asks for, these are what it gets."""

    def replace(*sizes):
        for module in (bodies, beside):
            monkeypatch.setattr(module, "inputs", lambda *asked, **options: INPUTS(*sizes, dtype=torch.float32))

    replace(*SHAPE)
    return replace


@pytest.mark.parametrize(
    ("body", "arguments", "sizes"),
    [
        (bodies.test_bits_of_every_family, ("symmetric", True, 64), SHAPE),
        (bodies.test_bits_of_the_chained_launch, (False,), SHAPE),
        (bodies.test_bits_and_gradients_of_two_passes, (True, 64), SHAPE),
        pytest.param(flex.test_flex_attention, ("window, soft-cap", 16), FLEX, marks=pytest.mark.nightly),
        (flex.test_flex_attention, ("documents, ALiBi", 16), FLEX),
        (masked.test_padding, (16,), (2, *FLEX[1:])),
        (eager.test_eager_training, (True,), SHAPE),
        (beside.test_two_cooperative_launches_at_once, (), SIX_HEADS),
        (beside.test_eager_and_compiled_at_once, (), SHAPE),
    ],
)
def test_bodies(body, arguments, sizes, small):
    small(*sizes)
    body(*arguments)


def test_varlen(small, monkeypatch):
    monkeypatch.setattr(varlen, "LENGTHS", (5, 22, 13))
    small(*FLEX)
    varlen.test_varlen("window", 16)


@pytest.mark.parametrize("factor", [1, 1.01])
def test_gradients(factor, monkeypatch):
    """Wrong ones would be seen: the reference is not computed by what it judges."""
    launch_of = lambda *arguments, **options: lambda: [factor * x for x in BACKWARD_OF(*arguments, **options)()]  # noqa: E731
    monkeypatch.setattr(bodies, "backward_of", launch_of)
    with nullcontext() if factor == 1 else pytest.raises(AssertionError, match="dq"):
        bodies.test_gradients((*SHAPE, True), torch.float32)


def test_dynamic_lengths(monkeypatch):
    def inputs(batch, heads, kv_heads, length, *_):
        length = max(2, length // 64)
        return INPUTS(1, 2, 1, length, length, 16, torch.float32)

    monkeypatch.setattr(bodies, "inputs", inputs)
    bodies.test_dynamic_lengths_have_the_bits_of_static_ones("one_pass")


@pytest.mark.parametrize("kind", stock_ops.probe.KINDS)
def test_probe(kind):
    stock_ops.test_probe(stock_ops.NAME("efficient"), kind, "float32")


def test_training_through_the_memory_efficient_op(small, monkeypatch):
    """Which SDPA takes on the CPU where head dims differ alone."""
    op = torch.ops.aten._scaled_dot_product_efficient_attention
    monkeypatch.setattr(stock_ops, "only", lambda backend: nullcontext())
    monkeypatch.setattr(stock_ops, "attention", lambda backend, causal: lambda *qkv: op(*qkv, None, True, 0.0, causal)[0])
    stock_ops.test_training("efficient", SHAPE, True, torch.float32)
    with pytest.raises(AssertionError):
        stock_ops.test_training("cudnn", SHAPE, True, torch.float32)


def test_two_launches_at_once_that_fault(small, monkeypatch):
    def fault():
        raise RuntimeError("CUDA error: an illegal memory access")

    small(*SIX_HEADS)
    monkeypatch.setattr(torch.cuda, "synchronize", fault)
    with pytest.raises(pytest.fail.Exception, match=r'use `launch="chained"`.*an illegal memory access'):
        beside.test_two_cooperative_launches_at_once()


def test_bits_that_differ_are_counted():
    ticks = iter(range(100))
    steady, drifting = (lambda: [torch.ones(3)]), (lambda: [torch.ones(3) * next(ticks)])
    assert beside.at_once(steady, drifting) == [0, 2 * 3]


FINE = "[0.5, null, []]"
FAULT = '"CUDA error: an illegal memory access was encountered"'
REPORT = "it: a CTA gave up waiting to add to tile 3 of dQ in query head 2 (...): its rank is 1, and the tile had 0 additions"


@pytest.mark.parametrize(
    ("lines", "passes"),
    [
        ([FINE, f'[23.0, {FAULT}, ["{REPORT}"]]'], True),
        ([FINE, f'[61.0, {FAULT}, ["{REPORT}"]]'], False),
        ([FINE, f'[23.0, null, ["{REPORT}"]]'], False),
        ([FINE, f"[23.0, {FAULT}, []]"], False),
        ([FINE, f'[23.0, {FAULT}, ["{REPORT.replace("tile 3", "tile 0")}"]]'], False),
        ([f'[0.5, "CUDA error: misaligned address", ["{REPORT}"]]'] * 2, False),
    ],
)
def test_a_wait_without_a_partner(lines, passes, monkeypatch, tmp_path):
    """The test judges what the program says, which cannot run here: tests/expect compiles it."""
    monkeypatch.setattr(wait.subprocess, "run", lambda command, **_: SimpleNamespace(stdout="\n".join(lines), stderr=REPORT))
    with nullcontext() if passes else pytest.raises((AssertionError, ValueError)):
        wait.test_a_wait_without_a_partner_ends("triton", tmp_path)


@pytest.mark.parametrize("right", [True, False])
def test_replay_of_a_cuda_graph(right, small, monkeypatch):
    """A graph in which nothing was captured writes what the capture's outputs were, or something else."""
    outputs = []

    def replay():
        for grad, value in outputs:
            grad.copy_(value if right else value + 1)

    def launch_of(*arguments, **options):
        launch = BACKWARD_OF(*arguments, **options)

        def launched():
            grads = launch()
            outputs[:] = [(grad, grad.clone()) for grad in grads]
            return grads

        return launched

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=replay))
    monkeypatch.setattr(torch.cuda, "graph", lambda captured: nullcontext())
    monkeypatch.setattr(bodies, "backward_of", launch_of)
    with nullcontext() if right else pytest.raises(AssertionError, match="dq"):
        bodies.test_replay_of_a_cuda_graph("one_pass")


def test_a_run_without_cuda_graphs_is_seen(small, monkeypatch):
    """On the CPU Inductor records none."""
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)
    with pytest.raises(AssertionError):
        bodies.test_cuda_graphs_of_inductor("one_pass", monkeypatch)
