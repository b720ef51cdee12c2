"""Random FlexAttentions by the Gluon kernel, executed from PTX: right, and without a race."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

from dash_inductor.codegen.mods import MASK_MODS, SCORE_MODS
from dash_inductor.first_use.kind import Kind

from . import mutants
from .cases import Case, Prepared, unexplained

CASES = 300


def indexing(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a score, its place and slopes, which it may index."""

    def made(score: Any, *others: Any) -> Any:
        with TransformGetItemToIndex():
            return function(score, *others)

    return made


# (score, b, h, m, n, slopes of the heads) -> score: with loads that change with the head, the key, the query or both.
FUNCTIONS = {
    "by head and key": indexing(lambda s, b, h, m, n, slopes: s * slopes[h] + slopes[n % 2]),
    "by distance": indexing(lambda s, b, h, m, n, slopes: s + slopes[(m - n).abs() % 2]),
    "by query": indexing(lambda s, b, h, m, n, slopes: s * (1 + slopes[m % 2]) - 0.1 * b),
    "one of two": indexing(lambda s, b, h, m, n, slopes: torch.where(m - n < 64, 5 * torch.tanh(s / 5), s + slopes[h] * (n - m))),
    "of integers": lambda s, b, h, m, n, slopes: s + 0.01 * torch.maximum(m >> 5, n >> 5) - 0.02 * ((m + n) % 7),
    "sigmoid": lambda s, b, h, m, n, slopes: s + torch.sigmoid(s) * torch.exp(-s * s),
    "logarithm": lambda s, b, h, m, n, slopes: torch.log(s.abs() + 1) * torch.rsqrt(s * s + 1),
    "cube": lambda s, b, h, m, n, slopes: s - 0.01 * s * s * s,
    "hidden keys": lambda s, b, h, m, n, slopes: torch.where(n % 5 == 3, -float("inf"), s),
    "a constant": lambda s, b, h, m, n, slopes: 0 * s + 0.3 * (n % 3),
}

# What these add to the slopes' gradient reads the score, or is no number where a key is hidden.
TRAINED = {
    "capped bias": indexing(lambda s, b, h, m, n, slopes: 5 * torch.tanh((s + slopes[h] * (n - m)) / 5)),
    "scaled": indexing(lambda s, b, h, m, n, slopes: torch.where(n % 5 == 3, -float("inf"), s * slopes[n % 2])),
}


def random_case(seed: int) -> Case:
    """Of 128 to 384 positions."""
    draw = random.Random(seed)
    head_dim, kv_heads = draw.choice([16, 32, 40, 64, 64, 80, 96, 128, 128, 136, 192, 256]), draw.choice([1, 2])
    options: dict[str, Any] = {"dtype": draw.choice(["bf16", "fp16"]), "block": draw.choice([128, 128, 256])}
    options |= {"in_bands": draw.random() < 0.2, "mask_mod": draw.choice([*MASK_MODS]), "score_mod": draw.choice([*FUNCTIONS])}
    options |= {"batch": draw.choice([1, 1, 2]), "heads": draw.choice([2, 4]), "kv_heads": kv_heads}
    length = draw.choice([128, 200, 256, 300, 384])
    return Case("h100", length, length, head_dim=head_dim, settings={"kernel": "gluon", "template": "one_pass"}, **options)


@pytest.mark.parametrize("seed", [pytest.param(x, marks=pytest.mark.quick if x < 3 else pytest.mark.nightly) for x in range(CASES)])
def test_random_functions(seed: int, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]) -> None:
    for name, function in FUNCTIONS.items():
        monkeypatch.setitem(SCORE_MODS, name, function)
    case = Prepared(random_case(seed))
    (decision,) = case.generated.decisions
    (found,) = {kind.function for kind in map(Kind.of_text, decision.kinds)}
    assert found and repr(found.source) in case.generated.source  # as the pass found it
    result = case.run(seed)
    assert result.fault is None and unexplained(result.races) == []
    assert max(result.errors.values()) < mutants.LIMITS[case.case.dtype]
    record_property("random functions of scores in the Gluon kernel", 1)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", TRAINED)
def test_functions_whose_captures_are_trained(name: str, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCORE_MODS, name, TRAINED[name])
    settings = {"kernel": "gluon", "template": "one_pass"}
    options: dict[str, Any] = {"mask_mod": "documents", "score_mod": name, "trained": True, "settings": settings}
    case = Prepared(Case("h100", 200, 200, kv_heads=1, head_dim=head_dim, **options))
    result = case.run()
    assert result.fault is None and unexplained(result.races) == []
    assert max(result.errors.values()) < mutants.LIMITS["bf16"] and result.errors["dslopes"] < 2e-3
