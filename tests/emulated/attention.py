"""What the tests of the kernel share: inputs, gradients and their errors, compilation, launches."""

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

from dash_inductor import emulation, op
from dash_inductor.templates.tiles import tile

assert op.MASKS  # the op is registered
OP = torch.ops.dash.sdpa_backward
GARBAGE = 0x5A5A5A5A
FP32_ERROR = 1e-6
TILE = tile("emulated", "fp32", 16)


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


def assert_as_good_as_stock(actual: Sequence[Tensor], stock: Sequence[Tensor], reference: Sequence[Tensor]) -> None:
    """At most twice the error of the stock backward in the same dtype, or what fp32 always has."""
    for i, (a, s, r) in enumerate(zip(actual, stock, reference, strict=True)):
        allowed = max(2 * error(s, r), FP32_ERROR)
        assert error(a, r) <= allowed, f"gradient {i}: error {error(a, r):.2e}, allowed {allowed:.2e}"


def check_gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], grad_out: Tensor | None = None, *, seed: int = 0, attentions: int = 1
) -> tuple[Tensor, ...]:
    """Compiles `function` under emulation and holds its gradients against float64 and against the stock backward."""
    with emulation.emulate(seed=seed):
        actual = gradients(compiled(function), inputs, grad_out)
    assert rewritten() == attentions
    stock = gradients(function, inputs, grad_out)
    wide = [x.double() for x in inputs]
    reference = gradients(function, wide, None if grad_out is None else grad_out.double())
    assert_as_good_as_stock(actual, stock, reference)
    return actual


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
