"""Emulation itself: interleaving, deadlocks, residency, the interpreter's repairs, Inductor's kernels. Needs TRITON_INTERPRET=1."""

import copy
import functools
import importlib.util
import os
import subprocess
import sys
import textwrap
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch._inductor.compile_fx
import torch.nn.functional as F
import triton
import triton.language as tl
from attention import FP32_ERROR, attention, error, gradients
from processes import script
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor import utils as inductor_utils
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch.nn.attention.flex_attention import flex_attention
from triton.language.extra import libdevice
from triton.runtime import interpreter

import dash_inductor
from dash_inductor import emulation
from dash_inductor.emulation import emulate
from dash_inductor.emulation.deadlock import DeadlockError

ROOT = Path(__file__).resolve().parents[2]
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def fresh():
    emulation.clear_launches()
    yield
    assert not emulation.active()


# Programs that add to one sum in the order of their ranks; program i has rank n - 1 - i, so that each waits for later ones.


@triton.jit
def add_in_order(TOTAL, SEMAPHORE, TICKET, n, TICKETED: tl.constexpr, RELEASE_FIRST: tl.constexpr):
    rank = n - 1 - tl.program_id(0)
    if TICKETED:
        rank = tl.atomic_add(TICKET, 1)
    while tl.atomic_cas(SEMAPHORE, rank, rank, sem="acquire") != rank:
        pass
    total = tl.load(TOTAL)
    if RELEASE_FIRST:
        tl.atomic_add(SEMAPHORE, 1, sem="release")
        tl.store(TOTAL, total * 1.25 + rank)
    else:
        tl.store(TOTAL, total * 1.25 + rank)
        tl.atomic_add(SEMAPHORE, 1, sem="release")


IN_ORDER = functools.reduce(lambda total, rank: total * 1.25 + rank, range(6), 1.0)  # exact in fp32


def zeros(n):
    return torch.zeros(n, dtype=torch.int32)


def run_add_in_order(n=6, ticketed=False, release_first=False):
    total = torch.ones(1)
    add_in_order[(n,)](total, zeros(1), zeros(1), n, ticketed, release_first)
    return total.item()


def test_every_interleaving_gives_the_same_bits():
    """Waits are counted apart from those satisfied at once."""
    for seed in range(20):
        with emulate(seed=seed):
            assert run_add_in_order() == IN_ORDER
    launches = emulation.launches()
    for launch in launches:
        assert (launch.kernel, launch.programs, launch.waits + launch.satisfied) == ("add_in_order", 6, 6)
        assert sum(a != b for a, b in pairwise(launch.schedule)) > 6
    assert len({launch.schedule for launch in launches}) == len(launches) == 20
    waits = [launch.waits for launch in launches]
    assert max(waits) == 5  # rank 0 never waits
    assert min(waits) < 5


def test_a_store_after_its_release_is_found():
    """A turn is given away after an atomic too: a release that comes too early must not hide behind its store."""
    results = set()
    for seed in range(10):
        with emulate(seed=seed):
            results.add(run_add_in_order(release_first=True))
    assert len(results) > 1


def test_one_seed_gives_one_sequence_of_interleavings():
    def schedules(seed):
        emulation.clear_launches()
        with emulate(seed=seed):
            run_add_in_order()
            run_add_in_order()
        return [launch.schedule for launch in emulation.launches()]

    assert schedules(7) == schedules(7)
    assert schedules(7)[0] != schedules(7)[1]
    assert schedules(7) != schedules(8)


@triton.jit
def wait_then_release(SEMAPHORES, WAITS, WANTED, RELEASES):
    i = tl.program_id(0)
    semaphore, wanted = SEMAPHORES + tl.load(WAITS + i), tl.load(WANTED + i)
    while tl.atomic_cas(semaphore, wanted, wanted, sem="acquire") != wanted:
        pass
    tl.atomic_add(SEMAPHORES + tl.load(RELEASES + i), 1, sem="release")


@pytest.mark.parametrize(
    ("waits", "wanted", "releases", "lines"),
    [
        (
            [0, 1, 2],
            [1, 1, 1],
            [1, 2, 0],
            ["3 of 3 programs wait", *(f"  program {n} waits for semaphore +{n}: it is 0, wanted 1" for n in range(3))],
        ),
        ([0, 0], [0, 2], [0, 0], ["1 of 2 programs wait", "  program 1 waits for semaphore +0: it is 1, wanted 2"]),
    ],
    ids=["a ring", "nobody has rank 1"],
)
def test_deadlocks(waits, wanted, releases, lines):
    table = (torch.tensor(column, dtype=torch.int32) for column in (waits, wanted, releases))
    with emulate(seed=1), pytest.raises(DeadlockError) as error:
        wait_then_release[(len(waits),)](zeros(3), *table)
    assert str(error.value) == "deadlock in wait_then_release: " + "\n".join(lines)
    with emulate(seed=1):  # the next launch is not disturbed
        assert run_add_in_order() == IN_ORDER


@pytest.mark.parametrize("seed", range(5))
def test_one_resident_program_cannot_wait_for_one_that_has_not_started(seed):
    with emulate(seed=seed, resident=1):
        with pytest.raises(DeadlockError) as error:
            run_add_in_order()
        assert run_add_in_order(ticketed=True) == IN_ORDER
    assert "not started (resident=1)" in str(error.value)


def test_more_resident_programs_than_one_interleave():
    for resident in (2, 3):
        with emulate(seed=resident, resident=resident):
            run_add_in_order(n=12, ticketed=True)
        schedule = emulation.launches()[-1].schedule
        alive = most = 0
        for at, program in enumerate(schedule):
            alive += program not in schedule[:at]
            most = max(most, alive)
            alive -= program not in schedule[at + 1 :]
        assert most == resident


@triton.jit
def atomic_read(SEEN, VALUE):
    tl.store(SEEN + tl.program_id(0), tl.atomic_cas(VALUE, 0, 0))


def test_an_atomic_read_by_compare_and_swap_does_not_block():
    seen = zeros(3)
    with emulate():
        atomic_read[(3,)](seen, torch.full((1,), 5, dtype=torch.int32))
    assert seen.tolist() == [5, 5, 5]


# What the interpreter gets wrong or has not at all.


@triton.jit
def reduce_rows(X, OUT, INDEX, N: tl.constexpr, NAME: tl.constexpr):
    row = tl.arange(0, 4)
    column = tl.broadcast_to(tl.arange(0, N)[None, :], (4, N))
    x = tl.load(X + row[:, None] * N + column)
    if NAME == "welford":
        mean, m2, weight = triton_helpers.welford(x, x * 0, x * 0 + 1, 1)
        tl.store(OUT + row, mean + m2 + weight)
    elif NAME == "max_with_index" or NAME == "min_with_index":
        value, index = getattr(triton_helpers, NAME)(x, column, 1)
        tl.store(OUT + row, value)
        tl.store(INDEX + row, index)
    else:
        tl.store(OUT + row, getattr(triton_helpers, NAME)(x > 0 if NAME == "any" else x, 1).to(tl.float32))


@pytest.mark.parametrize("name", ["max2", "min2", "prod", "any", "welford", "max_with_index", "min_with_index"])
def test_fast_reductions_equal_the_stock_ones(name):
    n = 8
    x = torch.randint(-3, 4, (4, n), generator=torch.Generator().manual_seed(0)).float()  # many ties
    x[1, 2] = x[1, 5] = NAN
    x[2, 3], x[2, 4] = INF, -INF
    x[3] = -1.0

    def run():
        out, index = torch.zeros(4, n), zeros(4)
        reduce_rows[(1,)](x, out, index, n, name)
        return out, index

    stock = run()
    with emulate():
        fast = run()
    rtol = 1e-6 if name == "welford" else 0  # another order of the same sum
    torch.testing.assert_close(fast, stock, rtol=rtol, atol=0, equal_nan=True)
    if name in ("max2", "min2"):
        assert fast[0].view(-1)[1].isnan()
    if name.endswith("with_index"):
        assert fast[1][1] == 2


@triton.jit
def larger_with_index(A, B, OUT, INDEX):
    i = tl.arange(0, 4)
    value, index = triton_helpers.maximum_with_index(tl.load(A + i), i, tl.load(B + i), i + 10)
    tl.store(OUT + i, value)
    tl.store(INDEX + i, index)


def test_not_of_a_block_is_elementwise():
    """`maximum_with_index` says `not b_isnan`, which Python makes one bool of."""
    out, index = torch.zeros(4), zeros(4)
    with emulate():
        larger_with_index[(1,)](torch.tensor([NAN, 1.0, NAN, 3.0]), torch.tensor([0.0, NAN, NAN, 4.0]), out, index)
    assert index.tolist() == [0, 11, 2, 13]
    assert out[:3].isnan().all()
    assert out[3] == 4


@triton.jit
def call_libdevice(X, Y, OUT, N: tl.constexpr, NAME: tl.constexpr, TAKES: tl.constexpr):
    i = tl.arange(0, N)
    of = {"x": tl.load(X + i), "y": tl.load(Y + i)}
    tl.store(OUT + i, getattr(libdevice, NAME)(*[of[name] for name in TAKES]).to(tl.float32))


LIBDEVICE = {"erf": "x", "tanh": "x", "isnan": "x", "rsqrt": "y", "log1p": "y", "lgamma": "y", "pow": "yx"}


@pytest.mark.parametrize(("name", "takes"), LIBDEVICE.items())
def test_libdevice(name, takes):
    x = torch.linspace(-4, 4, 4096)
    y = x.abs() + 0.1
    x[7] = NAN
    wide = {"x": x.double(), "y": y.double()}
    expected = getattr(torch, name)(*(wide[argument] for argument in takes))
    out = torch.empty_like(x)
    with emulate():
        call_libdevice[(1,)](x, y, out, 4096, name, takes)
    torch.testing.assert_close(out, expected.float(), rtol=1e-6, atol=1e-6, equal_nan=True)


def test_libdevice_functions_without_a_counterpart_say_so():
    x = torch.zeros(16)
    with emulate(), pytest.raises(Exception, match=r"libdevice\.byte_perm is not emulated"):
        call_libdevice[(1,)](x, x, x, 16, "byte_perm", "xyy")


@triton.jit
def round_to_bf16(X, OUT, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(OUT + i, tl.load(X + i).to(tl.bfloat16))


def test_bf16_is_rounded_to_nearest_even():
    random = torch.randn(4082, generator=torch.Generator().manual_seed(0))
    ties = (torch.arange(8, dtype=torch.int32) * 0x8000 + 0x3F808000).view(torch.float32)
    x = torch.cat([random, ties, torch.tensor([INF, -INF, NAN, 0.0, 1e-40, 3.4e38])])
    out = torch.empty(4096, dtype=torch.bfloat16)
    with emulate():
        round_to_bf16[(1,)](x, out, 4096)
    torch.testing.assert_close(out, x.to(torch.bfloat16), rtol=0, atol=0, equal_nan=True)


@triton.jit
def multiply(A, B, OUT, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    tl.store(OUT + at, tl.dot(tl.load(A + at), tl.load(B + at)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dot_of_half_precision(dtype):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-9, 10, (32, 32), generator=generator).to(dtype) for _ in range(2))
    out = torch.empty(32, 32)
    with emulate():
        multiply[(1,)](a, b, out, 32)
    assert torch.equal(out, a.float() @ b.float())


# What Inductor generates.


class Network(torch.nn.Module):
    """LayerNorm, GELU, softmax, cross entropy, max: one of each kind of kernel."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(48)
        self.up = torch.nn.Linear(48, 96)
        self.down = torch.nn.Linear(96, 40)

    def forward(self, x, target):
        x = F.gelu(self.up(self.norm(x)))
        x = self.down(torch.softmax(x, -1) * x)
        return F.cross_entropy(x.float(), target) + x.float().amax(-1).mean()


def loss_and_gradients(module, function, x, target):
    module.zero_grad()
    x = x.clone().requires_grad_()
    loss = function(x, target)
    loss.backward()
    return [loss.detach(), x.grad, *(parameter.grad.clone() for parameter in module.parameters())]


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.nightly), torch.bfloat16])
def test_a_compiled_training_step_agrees_with_eager(dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Network().to(dtype)
    wide = copy.deepcopy(module).double()
    compiled = torch.compile(module)
    graphs = []
    for rows in (33, 20, 47):  # the second one makes the graph dynamic
        x, target = torch.randn(rows, 48, dtype=dtype), torch.randint(0, 40, (rows,))
        reference = loss_and_gradients(wide, wide, x.double(), target)
        eager = loss_and_gradients(module, module, x, target)
        with emulate(seed=rows):
            actual = loss_and_gradients(module, compiled, x, target)
            graphs.append(counters["stats"]["unique_graphs"])
        for a, e, r in zip(actual, eager, reference, strict=True):
            assert error(a, r) <= 2 * error(e, r) + (FP32_ERROR if dtype == torch.float32 else 2**-9)
        with emulate(seed=rows + 1):
            again = loss_and_gradients(module, compiled, x, target)
        assert all(map(torch.equal, actual, again))
        assert counters["stats"]["unique_graphs"] == graphs[-1]
    assert graphs[0] < graphs[1] == graphs[2]


def test_a_tensor_without_dims_is_read_from_memory():
    """Where a template loads it, as one of a GPU: Inductor gives kernels the value of one of the CPU."""
    query, cap = torch.randn(1, 1, 20, 16, generator=torch.Generator().manual_seed(0)), torch.tensor(0.5)

    def attend(q):
        return flex_attention(q, q, q, score_mod=lambda score, b, h, m, n: cap * torch.tanh(score / cap))

    with emulate():
        actual = torch.compile(attend, fullgraph=True)(query)
    wide = query.double()
    scores = 0.5 * torch.tanh(wide @ wide.mT / 4 / 0.5)
    assert error(actual, scores.softmax(-1) @ wide) < FP32_ERROR


def test_inductor_sees_the_emulated_sms_and_no_block_is_above_4096():
    blocks = []

    class Stop(Exception):
        pass

    def autotuner(fn, *, configs, **kwargs):
        blocks.extend(config.kwargs["XBLOCK"] for config in configs)
        raise Stop

    def kernel(XBLOCK):
        pass

    kernel.fn = kernel
    for kind, hint in (("POINTWISE", 1 << 20), ("POINTWISE", 512), ("PERSISTENT_REDUCTION", 256)):
        config = triton.Config({"XBLOCK": 8}, num_warps=1)
        size_hints = {"x": hint, **({"r0_": 64} if "REDUCTION" in kind else {})}
        heuristic = getattr(triton_heuristics.HeuristicType, kind)
        with emulate(sms=11), pytest.raises(Stop):
            assert inductor_utils.get_num_sms() == 11
            triton_heuristics.cached_autotune(
                size_hints, [config], {"signature": {}, "device": None}, heuristic, caching_autotuner_cls=autotuner
            )(kernel)
    assert blocks == [4096, 512, 64]


# Coming and going.


def state():
    """Everything that emulation patches."""
    owners = (
        interpreter, interpreter.InterpreterBuilder, interpreter.GridExecutor, interpreter.InterpretedFunction,
        interpreter.ReduceOps, interpreter.FunctionRewriter, libdevice, triton_helpers,
        triton_heuristics, inductor_utils, sys.modules["torch._inductor.compile_fx"], GraphLowering,
    )  # fmt: skip
    builder = interpreter.interpreter_builder
    settings = (inductor_config.cpu_backend, inductor_config.compile_threads, triton.runtime.driver._active, builder.options)
    return [dict(vars(owner)) for owner in owners], settings


def test_all_patches_are_undone():
    before = state()
    with emulate():
        inside = state()
        with emulate(seed=5):
            pass
        assert state() == inside  # the inner one neither adds nor takes away
    assert state() == before != inside
    with pytest.raises(ZeroDivisionError), emulate():
        raise ZeroDivisionError
    assert state() == before


def test_emulations_nest():
    assert emulation.settings() is None
    with emulate(seed=1) as outer:
        assert emulation.settings() == outer == emulation.Emulation(seed=1)
        with emulate(seed=2, sms=3, resident=4):
            assert emulation.settings() == emulation.Emulation(2, 3, 4)
        assert emulation.settings() == outer
        assert emulation.active()


@pytest.mark.parametrize("own", [False, True], ids=["run one function", "compile their own"])
def test_three_threads(own, deterministic):
    """Forward and backward, at the same time: they take turns, and each gets what one alone gets."""
    *inputs, grad_out = (torch.linspace(-1, 1, 2 * 40 * 16).reshape(1, 2, 40, 16) for _ in range(4))
    attend = attention(causal=True)
    barrier = threading.Barrier(3)

    def work(_):
        function = torch.compile(lambda *qkv: attend(*qkv)) if own else compiled
        barrier.wait()
        return [gradients(function, inputs, grad_out) for _ in range(2)]

    with emulate(), dash_inductor.enabled(), ThreadPoolExecutor(3) as pool:
        compiled = torch.compile(attend)
        alone = gradients(compiled, inputs, grad_out)
        for results in pool.map(work, range(3)):
            assert all(torch.equal(*pair) for result in results for pair in zip(result, alone, strict=True))
    assert len(emulation.launches()) == 7
    torch.testing.assert_close(alone, gradients(attend, inputs, grad_out))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"sms": 0}, "at least one"),
        ({"resident": 0}, "at least one"),
        ({"seed": -1}, "seed=-1 is negative"),
        ({"seed": 1.5}, "seed=1.5 is not a whole number"),
        ({"sms": "6"}, "sms='6' is not a whole number"),
        ({"resident": True}, "resident=True is not a whole number"),
    ],
)
def test_a_device_that_cannot_be_is_refused(bad, message):
    with pytest.raises(ValueError, match=message), emulate(**bad):
        pass
    assert not emulation.active()


def run_script(script, **environment):
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("TRITON_", "DASH_"))}
    variables.update(PYTHONPATH=str(ROOT), **environment)
    command = [sys.executable, "-c", textwrap.dedent(script)]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)


EMULATE = "from dash_inductor.emulation import emulate\nwith emulate(): pass"
TOO_LATE = """
    import os, triton
    os.environ["TRITON_INTERPRET"] = "1"
    from dash_inductor.emulation import prepare_environment
    prepare_environment()
"""


@pytest.mark.parametrize(
    ("script", "environment", "message"),
    [
        (EMULATE, {}, "set TRITON_INTERPRET=1 before anything imports triton"),
        (EMULATE, {"TRITON_INTERPRET": "true"}, "TRITON_INTERPRET='true' must be '1'"),
        (
            TOO_LATE,
            {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            "triton was imported before TRITON_INTERPRET=1 was set: set it when Python starts",
        ),
    ],
    ids=["unset", "true", "too late"],
)
def test_without_the_interpreter_one_clear_error(script, environment, message):
    done = run_script(script, **environment)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(f"off in this process: {message}")


def test_prepare_environment_is_enough_for_an_unchanged_script(tmp_path):
    script = """
        import sys
        import torch
        from dash_inductor import emulation
        emulation.prepare_environment(seed=3, sms=5)
        assert "triton" not in sys.modules and "torch._inductor" not in sys.modules
        assert not emulation.active()
        x = torch.randn(100, 32)
        y = torch.compile(lambda x: torch.softmax(x, -1))(x)
        assert emulation.settings() == emulation.Emulation(seed=3, sms=5)
        assert "triton.runtime.interpreter" in sys.modules
        torch.testing.assert_close(y, torch.softmax(x, -1))
    """
    done = run_script(script, TORCH_DEVICE_BACKEND_AUTOLOAD="0", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_a_block_is_inside_the_environments_emulation(tmp_path):
    """Which begins when Inductor is imported, perhaps by the block itself."""
    code = "from dash_inductor import emulation\nwith emulation.emulate(sms=16): print(emulation.settings().sms)"
    assert script(["-c", f"import torch\n{code}\nprint(emulation.settings().sms)"], tmp_path, seed=1).split() == ["16", "6"]


def test_dynamo_leaves_the_interpreter_alone():
    """Outside of a graph, as under compiled autograd, it compiles the functions that it comes to."""

    @torch.compile(backend="eager")
    def broken(x: torch.Tensor, out: torch.Tensor) -> None:
        torch._dynamo.graph_break()
        round_to_bf16[(1,)](x, out, 16)

    x = torch.arange(16.0)
    with emulate():
        torch._dynamo.reset()
        broken(x, out := torch.empty(16, dtype=torch.bfloat16))
    assert torch.equal(out, x.bfloat16())


def test_an_error_says_where_it_is(tmp_path):
    """Of two functions of one text, which are compiled once."""
    text = "@triton.jit\ndef broken(X):\n    tl.store(X, 1)\n    1 / 0\n"
    for name, above in (("first", ""), ("second", "\n\n")):
        file = tmp_path / f"{name}.py"
        file.write_text("import triton\nimport triton.language as tl\n" + above + text)
        spec = importlib.util.spec_from_file_location(name, file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        with emulate(), pytest.raises(interpreter.InterpreterError) as caught:
            module.broken[(1,)](torch.zeros(1))
        place = traceback.extract_tb(caught.value.__cause__.__traceback__)[-1]
        assert (place.filename, place.line) == (str(file), "1 / 0")
