"""What the tests of the kernel share: inputs, layouts, gradients and their errors, compilation, launches, broken kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from dash_inductor import Decision, decisions, emulation, op
from dash_inductor.lowering import kernels
from dash_inductor.schedule import Geometry, Plan, place_heads
from dash_inductor.templates import source
from dash_inductor.templates.tiles import tile, two_pass_tile

assert op.MASKS  # the op is registered
OP = torch.ops.dash.sdpa_backward
FULL, CAUSAL = "full", "causal"
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
GRADIENTS = ["dq", "dk", "dv"]
GARBAGE = 0x5A5A5A5A
FP32_ERROR = 1e-6
TILE, TWO_PASS_TILE = tile("emulated", "fp32", 16), two_pass_tile("emulated", "fp32", 16)


def poison_uninitialised_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What generated code allocates is full of NaN, or of garbage where it holds integers, until it writes there itself."""
    stock = torch._C._dynamo.guards._empty_strided_cpu

    def empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        memory = stock(size, stride, dtype)
        if dtype.is_floating_point:
            return memory.fill_(float("nan"))
        return memory.fill_(GARBAGE if dtype in (torch.int32, torch.int64) else 1)

    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cpu", empty_strided)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """N(0, 1), the same values in every dtype but for rounding."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    head_dim: int,
    *,
    kv_heads: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """query, key, value and grad_out of one attention."""
    kv_heads = kv_heads or heads
    shapes = [(heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len), (heads, q_len)]
    return [normal(batch, *shape, head_dim, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]


def permuted(tensors: Sequence[Tensor]) -> list[Tensor]:
    """[B, S, H, D] in memory, lse [B, S, H]."""
    return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]


def columns(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The last stride is not 1."""
    return [x.mT.contiguous().mT for x in tensors]


def expanded(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Stride 0 over batch elements, and over heads of grad_out."""
    grad_out, *others = (x[:1].expand(3, *x.shape[1:]) for x in tensors)
    return [grad_out[:, :1].expand(grad_out.shape), *others]


def padded(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Rows of an odd pitch that start at an odd element."""
    return [F.pad(x, (1, 4))[..., 1:-4] for x in tensors]


def backward(mask: str = FULL, **kwargs: Any) -> Callable[..., tuple[Tensor, ...]]:
    """The op as a function of its tensors."""
    return lambda *args: OP(*args, mask=mask, **kwargs)


def arguments(
    batch: int, heads: int, q_len: int, kv_len: int, head_dim: int = 16, kv_heads: int | None = None, dtype: torch.dtype = FP32
) -> list[Tensor]:
    """Inputs of the op, N(0, 1) but for a large lse, so that P is small."""
    kv_heads = kv_heads or heads
    shapes = [(heads, q_len), (heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len), (heads, q_len)]
    tensors = [normal(batch, *shape, head_dim, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]
    return [*tensors, normal(batch, heads, q_len, seed=5) + 5]


def differing(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> list[str]:
    """Which of dq, dk, dv differ in a bit."""
    return [name for name, a, e in zip(GRADIENTS, actual, expected, strict=True) if not torch.equal(a, e)]


def differing_when_compiled(function: Callable[..., Any], args: Sequence[Tensor], *, dynamic: bool = False) -> list[str]:
    """Which gradients of the op's `function` differ in a bit from its specification, under the emulation in force."""
    return differing(compiled(function, dynamic=dynamic)(*args), function(*args))


def last_plan(mask: str, heads: int, q_len: int, kv_len: int) -> tuple[Decision, Plan]:
    """The last decision, and its plan for so many kv heads, batch included."""
    decision = decisions()[-1]
    two_passes = decision.family == "two_pass"
    blocks = TWO_PASS_TILE if two_passes else TILE
    geometry = Geometry(q_len, kv_len, blocks.block_m, blocks.block_n, mask)
    family, roles, heads_in_flight = (
        ("ascending", 1, 1) if two_passes else (decision.family, decision.roles, decision.heads_in_flight)
    )
    return decision, place_heads(family, geometry, roles, heads=heads, heads_in_flight=heads_in_flight)


def assert_two_passes() -> None:
    """The last attention took them, and no kernel with atomics ran."""
    decision = decisions()[-1]
    assert (decision.family, decision.launch, emulation.launches()) == ("two_pass", "plain", [])


def mutate(monkeypatch: pytest.MonkeyPatch, template: str, name: str, changes: dict[str, str], *, times: int = 1) -> None:
    """Puts a kernel in the place of `template` in whose source the keys of `changes`, first of all found `times`, are replaced."""
    text = source(*kernels.ONE_PASS_PARTS) if template == "ONE_PASS" else source("two_pass", "functions")
    for before, after in changes.items():
        assert text.count(before) == times, before
        text, times = text.replace(before, after), 1
    monkeypatch.setattr(kernels, template, kernels.Template(f"dash_mutant_{template}_{name}".lower(), kernels.programs, text))


def compiled(function: Callable[..., Any], *, dynamic: bool | None = False) -> Callable[..., Any]:
    """`function` compiled afresh, in one graph."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, dynamic=dynamic)


def gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor], grad_out: Tensor | None = None) -> tuple[Tensor, ...]:
    """Gradients of `function` with respect to all inputs; grad_out None: of the sum of what it returns."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    return torch.autograd.grad(out.sum() if grad_out is None else out, leaves, grad_out)


def in_eighths(x: Tensor) -> Tensor:
    """x rounded so that sums of products of two such tensors are exact in fp32, and the same on every CPU."""
    return (x * 8).round() / 8


def error(actual: Tensor, reference: Tensor) -> float:
    """max|x - ref| / max(max|ref|, 1), in float64."""
    assert actual.shape == reference.shape
    return ((actual.double() - reference.double()).abs().max() / max(reference.abs().max().item(), 1.0)).item()


def rewritten() -> int:
    """How many attentions were rewritten since the test began."""
    return counters["inductor"]["dash_rewritten"]


def assert_right(
    actual: Sequence[Tensor], function: Callable[..., Tensor], inputs: Sequence[Tensor], grad_out: Tensor | None = None
) -> None:
    """Against float64, at most twice the error of the stock gradients of `function`, or what fp32 always has."""
    stock = gradients(function, inputs, grad_out)
    wide = function.double() if isinstance(function, torch.nn.Module) else function
    reference = gradients(wide, [x.double() for x in inputs], None if grad_out is None else grad_out.double())
    for i, (a, s, r) in enumerate(zip(actual, stock, reference, strict=True)):
        allowed = max(2 * error(s, r), FP32_ERROR)
        assert error(a, r) <= allowed, f"gradient {i}: error {error(a, r):.2e}, allowed {allowed:.2e}"


def check_gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], grad_out: Tensor | None = None, *, seed: int = 0, attentions: int = 1
) -> None:
    """Compiles `function` under emulation, rewritten, and asserts that its gradients are right."""
    with emulation.emulate(seed=seed):
        actual = gradients(compiled(function), inputs, grad_out)
    assert rewritten() == attentions
    assert_right(actual, function, inputs, grad_out)


def attention(*, causal: bool = False, scale: float | None = None, gqa: bool = False) -> Callable[..., Tensor]:
    """scaled_dot_product_attention of query, key, value."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale, enable_gqa=gqa)

    return attend


@contextmanager
def captured_tables(*, alone: bool = False) -> Iterator[list[list[int]]]:
    """The schedule table of each launch of the main kernel inside; alone: nothing is launched but what writes tables."""
    tables: list[list[int]] = []
    stock = CachingAutotuner.run

    def run(self: CachingAutotuner, *args: Any, **kwargs: Any) -> Any:
        names = self.fn.arg_names
        if "arg_TABLE" in names:
            tables.append(args[names.index("arg_TABLE")].tolist())
        return None if alone and "arg_UNREAD" not in names else stock(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CachingAutotuner, "run", run)
        yield tables


def exact(
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    head_dim: int,
    *,
    kv_heads: int | None = None,
    dtype: torch.dtype = torch.float32,
    exponent: int = 12,
    seed: int = 0,
    blocks: tuple[int, int] = (TILE.block_m, TILE.block_n),
) -> list[Tensor]:
    """Inputs of the op for which only the sums over tiles round, tiles being `blocks`, by default the emulated device's.

    query lives in the first half of the head dim and key in the second, and lse = 0: so P = 1. All others are small
    integers, so that |dS| <= 256. Then keys are scaled up and down by a power of two in turn from one KV tile to the next,
    and grad_out (with it rows of dS) from one Q tile to the next: the order of the sums decides the bits of dq, dk and dv.
    """
    generator = torch.Generator().manual_seed(seed)
    kv_heads, half = kv_heads or heads, head_dim // 2
    largest = 2 if head_dim <= 32 else 1  # |grad_out . value| and |grad_out . out| are at most 128

    def integers(n: int, length: int, most: int) -> Tensor:
        return torch.randint(-most, most + 1, (batch, n, length, head_dim), generator=generator).float()

    def powers(length: int, block: int) -> Tensor:
        odd = torch.arange(length) // block % 2
        return 2.0 ** (exponent * (1 - 2 * odd))[:, None]

    query, key = integers(heads, q_len, 3), integers(kv_heads, kv_len, 3)
    query[..., half:] = 0
    key[..., :half] = 0
    key *= powers(kv_len, blocks[1])
    value, out = integers(kv_heads, kv_len, largest), integers(heads, q_len, largest)
    grad_out = integers(heads, q_len, largest) * powers(q_len, blocks[0])
    lse = torch.zeros(batch, heads, q_len)
    return [*(x.to(dtype) for x in (grad_out, query, key, value, out)), lse]
