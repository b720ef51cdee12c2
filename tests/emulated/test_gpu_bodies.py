"""What tests/gpu does with a GPU, done here once with the emulated device and small sizes: no body fails for its own mistakes."""

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "gpu"))
import test_on_gpu as bodies
import test_side_by_side as beside
import test_wait as wait

import dash_inductor
from dash_inductor import emulation

SMS = 6


@pytest.fixture(autouse=True)
def emulated(rewriting, monkeypatch):
    monkeypatch.setattr(bodies, "DEVICE", "cpu")
    monkeypatch.setattr(beside, "DEVICE", "cpu")
    monkeypatch.setattr(bodies, "LAUNCHES", 2)
    monkeypatch.setattr(beside, "LAUNCHES", 2)
    with emulation.emulate(seed=1, sms=SMS), dash_inductor.enabled(on_unsupported="error"):
        yield


@pytest.fixture
def streams(monkeypatch):
    """One stream after the other."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in {
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda entered: nullcontext(),
        "synchronize": lambda: None,
        "get_device_properties": lambda device: SimpleNamespace(multi_processor_count=SMS),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)


def small(monkeypatch, module, *sizes):
    """Whatever sizes a test asks for, these are what it gets."""
    monkeypatch.setattr(module, "inputs", lambda *asked, **options: INPUTS(*sizes, dtype=torch.float32))


INPUTS = bodies.inputs
SHAPE = (1, 1, 1, 40, 40, 16)


def test_gradients():
    bodies.test_gradients((*SHAPE, True), torch.float32)


def test_gradients_that_are_wrong(monkeypatch):
    """They would be seen: the reference is not computed by what it judges."""
    launch = bodies.backward_of

    def off(*arguments, **options):
        return lambda: [1.01 * grad for grad in launch(*arguments, **options)()]

    monkeypatch.setattr(bodies, "backward_of", off)
    with pytest.raises(AssertionError, match="dq"):
        bodies.test_gradients((*SHAPE, True), torch.float32)


def test_bits(monkeypatch):
    small(monkeypatch, bodies, *SHAPE)
    bodies.test_bits_of_every_family("symmetric", True, 64)


def test_the_chained_launch(monkeypatch):
    small(monkeypatch, bodies, *SHAPE)
    bodies.test_bits_of_the_chained_launch(False)


def test_two_passes(monkeypatch):
    small(monkeypatch, bodies, *SHAPE)
    bodies.test_bits_and_gradients_of_two_passes(True, 64)


def test_dynamic_lengths(monkeypatch):
    monkeypatch.setattr(
        bodies, "inputs", lambda z, h, k, length, *_: INPUTS(1, 2, 1, max(2, length // 64), max(2, length // 64), 16, torch.float32)
    )
    bodies.test_dynamic_lengths_have_the_bits_of_static_ones("one_pass")


def test_two_launches_at_once(streams, monkeypatch):
    small(monkeypatch, beside, 1, SMS, SMS, 40, 40, 16)
    beside.test_two_cooperative_launches_at_once()


def test_two_launches_at_once_that_fault(streams, monkeypatch):
    def fault():
        raise RuntimeError("CUDA error: an illegal memory access")

    small(monkeypatch, beside, 1, SMS, SMS, 40, 40, 16)
    monkeypatch.setattr(torch.cuda, "synchronize", fault)
    with pytest.raises(pytest.fail.Exception, match=r'use `launch="chained"`.*an illegal memory access'):
        beside.test_two_cooperative_launches_at_once()


def test_eager_and_compiled_at_once(streams, monkeypatch):
    small(monkeypatch, beside, *SHAPE)
    beside.test_eager_and_compiled_at_once()


def test_bits_that_differ_are_counted(streams):
    ticks = iter(range(100))
    steady, drifting = (lambda: [torch.ones(3)]), (lambda: [torch.ones(3) * next(ticks)])
    assert beside.at_once(steady, drifting) == [0, 2 * 3]


@pytest.mark.parametrize(
    ("lines", "passes"),
    [
        (["[0.5, null]", '[23.0, "CUDA error: an illegal memory access was encountered"]'], True),
        (["[0.5, null]", '[61.0, "CUDA error: an illegal memory access was encountered"]'], False),
        (["[0.5, null]", "[23.0, null]"], False),
        (['[0.5, "CUDA error: misaligned address"]', '[0.5, "CUDA error: misaligned address"]'], False),
    ],
)
def test_a_wait_without_a_partner(lines, passes, monkeypatch, tmp_path):
    """The test judges what the program says, which cannot run here: tests/expect compiles it."""
    monkeypatch.setattr(wait.subprocess, "run", lambda command, **_: SimpleNamespace(stdout="\n".join(lines)))
    with nullcontext() if passes else pytest.raises(AssertionError):
        wait.test_a_wait_without_a_partner_ends("triton", tmp_path)


class Graph:
    """A CUDA graph in which nothing was captured: it writes what the capture's outputs were."""

    def __init__(self):
        self.outputs, self.right = [], True

    def replay(self):
        for grad, value in self.outputs:
            grad.copy_(value if self.right else value + 1)


@pytest.mark.parametrize("right", [True, False])
def test_replay_of_a_cuda_graph(right, streams, monkeypatch):
    small(monkeypatch, bodies, *SHAPE)
    graph = Graph()
    graph.right = right
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda captured: nullcontext())
    launch_of = bodies.backward_of

    def remembered(*arguments, **options):
        launch = launch_of(*arguments, **options)

        def launched():
            grads = launch()
            graph.outputs = [(grad, grad.clone()) for grad in grads]
            return grads

        return launched

    monkeypatch.setattr(bodies, "backward_of", remembered)
    if right:
        bodies.test_replay_of_a_cuda_graph("one_pass")
    else:
        with pytest.raises(AssertionError, match="dq"):
            bodies.test_replay_of_a_cuda_graph("one_pass")


def test_a_run_without_cuda_graphs_is_seen(monkeypatch):
    """On the CPU Inductor records none."""
    small(monkeypatch, bodies, *SHAPE)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)
    with pytest.raises(AssertionError):
        bodies.test_cuda_graphs_of_inductor("one_pass", monkeypatch)
