"""What the tests of the kernel share: gradients and their errors, compilation, launches, broken kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tensors import FULL, TILE
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from dash_inductor import Decision, decisions, emulation, op
from dash_inductor.lowering import kernels
from dash_inductor.schedule import Geometry, Plan, place_heads
from dash_inductor.templates import source
from dash_inductor.templates.tiles import two_pass_tile

assert op.MASKS  # the op is registered
OP = torch.ops.dash.sdpa_backward
GRADIENTS = ["dq", "dk", "dv"]
GARBAGE = 0x5A5A5A5A
FP32_ERROR = 2**-18  # 32 units in the last place: P has the errors of its scores, and sums round; tf32 is 100 times as far off
WAIT = 'wait(SEMAPHORES, pending, rank, NQ, {{failed_wait("high")}}, {{failed_wait("low")}}, INTERPRET)'
PARTS = {  # the files of kernels that are made of several
    "ONE_PASS": kernels.ONE_PASS_PARTS,
    "TWO_PASS": ("two_pass", "functions"),
    "BLOCK_MASK_ONE_PASS": kernels.BLOCK_MASK_ONE_PASS_PARTS,
}
TWO_PASS_TILE = two_pass_tile("emulated", "fp32", 16)


def poison_uninitialised_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What generated code allocates is full of NaN, or of garbage where it holds integers, until it writes there itself."""
    stock = torch._C._dynamo.guards._empty_strided_cpu

    def empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        memory = stock(size, stride, dtype)
        if dtype.is_floating_point:
            return memory.fill_(float("nan"))
        return memory.fill_(GARBAGE if dtype in (torch.int32, torch.int64) else 1)

    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cpu", empty_strided)


def backward(mask: str = FULL, **kwargs: Any) -> Callable[..., tuple[Tensor, ...]]:
    """The op as a function of its tensors."""
    return lambda *args: OP(*args, mask=mask, **kwargs)


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
    text = source(*PARTS.get(template, (template.lower(),)))
    for before, after in changes.items():
        assert text.count(before) == times, before
        text, times = text.replace(before, after), 1
    monkeypatch.setattr(kernels, template, kernels.KernelTemplate(f"dash_mutant_{template}_{name}".lower(), kernels.programs, text))


def compiled(function: Callable[..., Any], *, dynamic: bool | None = False) -> Callable[..., Any]:
    """`function` compiled afresh, in one graph."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, dynamic=dynamic)


def gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor], grad_out: Tensor | None = None) -> tuple[Tensor, ...]:
    """Gradients of `function` with respect to all inputs; grad_out None: of the sum of what it returns."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    return torch.autograd.grad(out.sum() if grad_out is None else out, leaves, grad_out)


def in_interleavings(
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    grad_out: Tensor | None = None,
    interleavings: Sequence[tuple[int, int | None]] = ((0, None), (1, None), (2, None)),
    *,
    dynamic: bool = False,
) -> tuple[Tensor, ...]:
    """Gradients of `function`, compiled: of the same bits under emulations of each seed and number of resident CTAs."""
    run, found = compiled(function, dynamic=dynamic), []
    for seed, resident in interleavings:
        with emulation.emulate(seed, resident=resident):
            found.append(gradients(run, inputs, grad_out))
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other, strict=True))
    return found[0]


class SeenError(Exception):
    """Ends a compilation whose joint graph has been seen."""


def error(actual: Tensor, reference: Tensor, least: float = 1.0) -> float:
    """max|x - ref| / max(max|ref|, least), in float64; infinity where that is NaN, which `max` of several would lose."""
    assert actual.shape == reference.shape
    found = (actual.double() - reference.double()).abs().max() / max(reference.abs().max().item(), least)
    return found.nan_to_num(math.inf).item()


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
def tables_used(*, alone: bool = False) -> Iterator[list[list[int]]]:
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
