"""Triton's kernels on a real GPU: right gradients, and the same bits launch after launch, also beside another busy process."""

import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F

import dash_inductor

DEVICE = "cuda"
ONE_PASS = {"template": "one_pass"}  # small shapes would take two, which have tests of their own
LAUNCHES = 100
GRADIENTS = ("dq", "dk", "dv")
FULL_FAMILIES = ("ascending", "descending", "shift", "shift_round_robin", "auto")
CAUSAL_FAMILIES = ("ascending", "descending", "symmetric", "symmetric_round_robin", "auto")
HOG = """
import torch
x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
print("busy", flush=True)
while True:
    x = torch.nn.functional.normalize(x @ x)
"""


@pytest.fixture(autouse=True)
def by_triton(rewriting: None) -> Iterator[None]:
    with dash_inductor.enabled(kernel="triton"):
        yield


def inputs(batch, heads, kv_heads, q_len, kv_len, head_dim, dtype=torch.bfloat16):
    """query, key, value, grad_out as [B, H, S, D] views of [B, S, H, D], N(0, 1)."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(length, n):
        return torch.randn(batch, length, n, head_dim, generator=generator, device=DEVICE, dtype=dtype).transpose(1, 2)

    query, key, value = normal(q_len, heads), normal(kv_len, kv_heads), normal(kv_len, kv_heads)
    return [x.requires_grad_() for x in (query, key, value)], normal(q_len, heads)


def attention(causal):
    def attend(query, key, value):
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)

    return attend


def gradients(function, leaves, grad_out):
    return torch.autograd.grad(function(*leaves), leaves, grad_out)


def backward_of(causal, leaves, grad_out, *, dynamic=False):
    """A function of nothing that runs the compiled attention forward and backward; checks that the kernel is ours."""
    function = torch.compile(attention(causal), fullgraph=True, dynamic=dynamic)

    def launch():
        return gradients(function, leaves, grad_out)

    launch()
    assert torch._dynamo.utils.counters["inductor"]["dash_rewritten"] == 1
    return launch


def error(actual, reference):
    """Infinity where there is a NaN, which `max` of several would lose."""
    found = (actual.double() - reference).abs().max() / max(reference.abs().max().item(), 1.0)
    return found.nan_to_num(math.inf).item()


def assert_as_good_as_stock(causal, leaves, grad_out, actual):
    """At most twice the error of the stock backward, both against float64."""
    stock = gradients(attention(causal), leaves, grad_out)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        reference = gradients(attention(causal), wide, grad_out.double())
    for name, a, s, r in zip(GRADIENTS, actual, stock, reference, strict=True):
        assert error(a, r) <= max(2 * error(s, r), 1e-3), name


@contextmanager
def busy_gpu() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", HOG], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "busy\n"
            yield
        finally:
            process.kill()


def assert_equal(actual, expected, where=""):
    """To the bit."""
    for name, grad, right in zip(GRADIENTS, actual, expected, strict=True):
        assert torch.equal(grad, right), f"{name}{where} differs in {(grad != right).sum().item()} elements"


def assert_same_bits(launch, launches=None):
    first = launch()
    for n in range(1, launches or LAUNCHES):
        assert_equal(launch(), first, f" of launch {n}")


SHAPES = [
    # batch, heads, kv heads, S_q, S_k, head dim, causal
    *((2, 4, 4, 512, 512, head_dim, causal) for head_dim in (64, 128) for causal in (False, True)),
    (1, 8, 2, 1000, 1000, 128, True),
    (1, 8, 1, 333, 333, 64, True),
    (1, 4, 4, 1, 777, 64, False),
    (1, 4, 2, 130, 300, 128, False),
    (2, 2, 2, 1, 1, 64, True),
    *((1, 2, 2, 400, 400, head_dim, head_dim != 32) for head_dim in (16, 32, 96, 40)),
    (1, 4, 2, 777, 777, 192, True),
    (1, 2, 2, 300, 500, 256, False),
    (1, 2, 2, 512, 512, 256, True),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients(shape, dtype):
    *sizes, causal = shape
    leaves, grad_out = inputs(*sizes, dtype=dtype)
    with dash_inductor.enabled(**ONE_PASS if sizes[-1] <= 128 else {}):
        actual = backward_of(causal, leaves, grad_out)()
    assert_as_good_as_stock(causal, leaves, grad_out, actual)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("schedule", "causal"),
    [*((family, False) for family in FULL_FAMILIES), *((family, True) for family in CAUSAL_FAMILIES)],
)
def test_bits_of_every_family(schedule, causal, head_dim):
    leaves, grad_out = inputs(2, 8, 8, 2048, 2048, head_dim)
    with dash_inductor.enabled(schedule=schedule, **ONE_PASS):
        assert_same_bits(backward_of(causal, leaves, grad_out))


@pytest.mark.parametrize("causal", [False, True])
def test_bits_of_the_chained_launch(causal):
    leaves, grad_out = inputs(4, 16, 16, 2048, 2048, 128)
    with dash_inductor.enabled(launch="chained", **ONE_PASS):
        assert_same_bits(backward_of(causal, leaves, grad_out))


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_bits_and_gradients_of_two_passes(causal, head_dim):
    leaves, grad_out = inputs(2, 8, 2, 1000, 1000, head_dim)
    with dash_inductor.enabled(template="two_pass"):
        launch = backward_of(causal, leaves, grad_out)
        assert_same_bits(launch)
        actual = launch()
    assert dash_inductor.decisions()[-1].family == "two_pass"
    assert_as_good_as_stock(causal, leaves, grad_out, actual)


@pytest.mark.parametrize("causal", [False, True])
def test_bits_beside_a_process_that_keeps_the_gpu_busy(causal):
    leaves, grad_out = inputs(2, 8, 8, 4096, 4096, 128)
    with dash_inductor.enabled(**ONE_PASS):
        launch = backward_of(causal, leaves, grad_out)
        expected = launch()
        with busy_gpu():
            assert_same_bits(launch)
            assert_equal(launch(), expected)


@pytest.mark.parametrize("per_sm", [1, 2, 4])
def test_bits_with_many_heads(per_sm):
    heads = per_sm * torch.cuda.get_device_properties(0).multi_processor_count
    leaves, grad_out = inputs(1, heads, heads, 512, 512, 64)
    with dash_inductor.enabled(**ONE_PASS):
        assert_same_bits(backward_of(True, leaves, grad_out))


@pytest.mark.parametrize("template", ["one_pass", "two_pass"])
@pytest.mark.parametrize("length", [8192, 32768])
def test_bits_with_long_sequences(length, template):
    leaves, grad_out = inputs(1, 8, 2, length, length, 128)
    with dash_inductor.enabled(template=template):
        assert_same_bits(backward_of(True, leaves, grad_out), launches=20)


@pytest.mark.parametrize("template", ["one_pass", "auto"])
def test_dynamic_lengths_have_the_bits_of_static_ones(template):
    """Of 8 query heads on 4 kv heads an H100 takes the shorter ones in two passes, the longest in one."""
    lengths = (640, 1000, 128, 8192, 2048)
    static, families = {}, set()
    with dash_inductor.enabled(template=template):
        for length in lengths:
            torch._dynamo.reset()
            leaves, grad_out = inputs(1, 8, 4, length, length, 64)
            static[length] = gradients(torch.compile(attention(True), dynamic=False), leaves, grad_out)
            families.add(dash_inductor.decisions()[-1].family)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        function = torch.compile(attention(True), dynamic=True)
        for length in lengths:
            leaves, grad_out = inputs(1, 8, 4, length, length, 64)
            assert_equal(gradients(function, leaves, grad_out), static[length])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    if template == "one_pass":
        assert "two_pass" not in families
    elif torch.cuda.get_device_capability() == (9, 0):
        assert "two_pass" in families and len(families) > 1


@pytest.mark.parametrize("template", ["one_pass", "two_pass"])
def test_replay_of_a_cuda_graph(template):
    """A graph that holds forward and backward: what it is to write is full of NaN before each replay."""
    leaves, grad_out = inputs(2, 4, 4, 1024, 1024, 64)
    with dash_inductor.enabled(template=template):
        launch = backward_of(True, leaves, grad_out)
    expected = launch()
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        launch()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = launch()
    for _ in range(LAUNCHES):
        for grad in grads:
            grad.fill_(torch.nan)
        graph.replay()
        assert_equal(grads, expected)


@pytest.mark.parametrize("template", ["one_pass", "two_pass"])
def test_cuda_graphs_of_inductor(template, monkeypatch):
    """Forward and backward are replayed: of five runs one warms up and one records."""
    leaves, grad_out = inputs(2, 4, 4, 1024, 1024, 64)
    replays, replay = [], torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (replays.append(graph), replay(graph))[1])
    results = []
    with dash_inductor.enabled(template=template):
        function = torch.compile(attention(True), mode="reduce-overhead")
        for _ in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            results.append([grad.clone() for grad in gradients(function, leaves, grad_out)])
    counters = torch._dynamo.utils.counters["inductor"]
    assert counters["dash_rewritten"] == 1 and counters["cudagraph_skips"] == 0
    assert len({id(graph) for graph in replays}) == 2 and len(replays) >= 2 * 3
    for result in results[1:]:
        assert_equal(result, results[0])
