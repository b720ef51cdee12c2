"""Attentions whose backward compiled autograd compiles, in a graph of its own: the same gradients as without it, and decided on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tensors import normal
from test_written import B, H, S, documents, given_float, mask_mod, packed, score_mod, sdpa
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.torch_version import TorchVersion

from dash_inductor import Decision, clear_decisions, decisions, emulation

pytestmark = pytest.mark.usefixtures("rewriting")

IDS = torch.arange(B * S).view(B, S) // 7
OFFSETS = torch.tensor([0, 11, B * S], dtype=torch.int32)


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No pattern of Inductor's."""
    return torch.einsum("bhmn,bhnd->bhmd", (torch.einsum("bhmd,bhnd->bhmn", q, k) * 0.3).tanh().softmax(-1), v)


def bias() -> Tensor:
    return normal(S, S, seed=3)


# By name: an attention, what it reads beside query, key and value, and whether that has a gradient.
CASES: dict[str, tuple[Callable[..., Tensor], Callable[[], Tensor] | None, bool]] = {
    "documents": (documents, lambda: IDS, False),
    "full": (sdpa, None, False),
    "causal": (lambda q, k, v: sdpa(q, k, v, is_causal=True), None, False),
    "bool mask": (lambda q, k, v, mask: sdpa(q, k, v, mask), lambda: bias() < 1, False),
    "float mask": (given_float, bias, False),
    "learnt mask": (given_float, bias, True),
    "dropout": (lambda q, k, v: sdpa(q, k, v, dropout_p=0.3), None, False),
    "packed": (packed, lambda: OFFSETS, False),
    "FlexAttention": (lambda q, k, v: mask_mod(q, k, v, torch.zeros(B, S, dtype=torch.int64)), None, False),
    "a block mask": (mask_mod, lambda: IDS, False),
    "declined": (lambda q, k, v: sdpa(q, k, v, scale=-0.3), None, False),
    "by hand": (by_hand, None, False),
    "a captured gradient": (score_mod, bias, True),
}


FLEX = mask_mod, CASES["FlexAttention"][0], score_mod


def train(name: str, *, by_compiled_autograd: bool, backend: str) -> tuple[list[Tensor], Decision]:
    """All gradients, and what was decided last."""
    attend, other, trains = CASES[name]
    torch._dynamo.reset()
    clear_decisions()
    leaves = [normal(B, H, S, 16, seed=seed).requires_grad_() for seed in range(3)]
    leaves += [] if other is None else [other().requires_grad_(trains)]
    torch.manual_seed(5)
    late = attend in FLEX and TorchVersion(torch.__version__) < (2, 13)  # whose Dynamo traces no FlexAttention while it is on
    with dynamo_config.patch(compiled_autograd=by_compiled_autograd and not late):
        out = torch.compile(attend, backend=backend)(*leaves)

    def backward() -> None:
        out.square().sum().backward()

    with dynamo_config.patch(compiled_autograd=by_compiled_autograd):
        (torch.compile(backward, backend=backend) if by_compiled_autograd else backward)()
    return [x.grad for x in leaves if x.requires_grad], decisions()[-1]


def same_with_compiled_autograd(name: str, backend: str = "inductor") -> None:
    with emulation.emulate():
        expected, decided = train(name, by_compiled_autograd=False, backend=backend)
        actual, again = train(name, by_compiled_autograd=True, backend=backend)
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))
    elsewhere = {"graph": None, "source": None, "module": "", "joint": ""}
    assert replace(again, **elsewhere) == replace(decided, **elsewhere)
    assert again.rewritten == (name not in ("declined", "by hand"))


@pytest.mark.parametrize("name", CASES)
def test_the_same_gradients(name):
    same_with_compiled_autograd(name)


@pytest.mark.parametrize("name", [*CASES][::4])
def test_the_same_gradients_by_the_backend(name):
    same_with_compiled_autograd(name, "dash")


def test_a_cache_without_compiled_autograd():
    """Out of which torch cannot read a backward that it is to trace again."""
    with functorch_config.patch(enable_autograd_cache=True), inductor_config.patch(fx_graph_cache=True):
        same_with_compiled_autograd("documents")
