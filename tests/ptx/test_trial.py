"""The trial of a function of the scores: what it launches on a GPU is executed here, and held against what it expects."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

from benchmarks.machine_code.flex import flex_backward
from benchmarks.machine_code.generate import generate
from dash_inductor import enabled
from dash_inductor.codegen.flex import FlexAttention
from dash_inductor.codegen.mode import deterministic
from dash_inductor.codegen.mods import SCORE_MODS
from dash_inductor.config import Config
from dash_inductor.first_use.kind import Kind
from dash_inductor.hooks.install import installed
from dash_inductor.lowering.gluon_functions import in_trial
from dash_inductor.reproduce import score_source, trial

from .cases import _tables
from .launch import Session, call

GLUON: dict[str, Any] = {"kernel": "gluon", "template": "one_pass"}
CPU = torch.device("cpu")


def mixed(score: Any, b: Any, h: Any, m: Any, n: Any, slopes: Any) -> Any:
    """Scaled by a value of the head and one of the key, behind a soft-cap."""
    with TransformGetItemToIndex():
        return 5 * torch.tanh(score * slopes[h] / 5) + slopes[n % 2] * torch.sigmoid(score)


@pytest.fixture
def kind_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Kind]:
    """The kind of a FlexAttention of head dim 64, by the Gluon kernel."""
    monkeypatch.setitem(SCORE_MODS, "mixed", mixed)

    def kind(score_mod: str, mask_mod: str) -> Kind:
        attention = FlexAttention(8192, 16, 16, 64, batch=8, mask_mod=mask_mod, score_mod=score_mod)
        with enabled(**GLUON):
            (decision,) = flex_backward("h100", attention).decisions
        (text,) = decision.kinds
        return Kind.of_text(text)

    return kind


@pytest.mark.every_case
@pytest.mark.parametrize("score_mod", [*SCORE_MODS, "mixed"])
def test_the_source_computes_the_function(score_mod: str, kind_of: Callable[..., Kind]) -> None:
    """In float64, for each head; tanh is that of the kernel."""
    function = kind_of(score_mod, "causal").function
    if score_mod == "none":
        assert function is None
        return
    assert function is not None
    captures = score_source.captured(function, 4, 40, CPU)
    read, positions = score_source.reading(captures, function, 40), torch.arange(40)
    pre_mod = torch.randn(40, 40, dtype=torch.float64)
    for head in range(4):
        found = score_source.scores(function, read, pre_mod, head, positions[:, None], positions)
        slopes = captures[0].double() if captures else None
        right = SCORE_MODS[score_mod](pre_mod, 0, torch.tensor(head), positions[:, None], positions, slopes)
        assert (found - right).abs().max() < 1e-6


def test_what_nobody_knows_the_values_of_is_not_used(kind_of: Callable[..., Kind]) -> None:
    """So that the Triton kernel is, whoever tries it. Of a function that has no numbers the bits alone are known."""
    kind = kind_of("alibi", "causal")
    assert kind.function is not None
    strange = replace(kind, function=replace(kind.function, source=kind.function.source.replace("tl.load(", "tl.unheard_of(")))
    found = trial.tried(strange, "cpu", Config(emulate=True))
    assert found.fit is False and "has no attribute 'unheard_of'" in found.said
    nans, numbers = (torch.full((2,), math.nan),) * 3, (torch.ones(2),) * 3
    assert trial.verdict_on([nans, nans], nans, 1e-2).fit and not trial.verdict_on([numbers, nans], nans, 1e-2).fit


@pytest.mark.every_case
@pytest.mark.parametrize(("score_mod", "mask_mod"), [("mixed", "none"), ("mixed", "causal"), ("alibi", "documents")])
def test_it_is_right(score_mod: str, mask_mod: str, kind_of: Callable[..., Kind], monkeypatch: pytest.MonkeyPatch) -> None:
    """And a kernel with another function is not."""
    monkeypatch.setattr(trial, "_sms", lambda device: 1)
    monkeypatch.setattr(trial, "CHAINS_PER_SM", 1)
    monkeypatch.setattr(trial, "TILES", 2)
    kind = kind_of(score_mod, mask_mod)
    assert kind.function is not None
    inputs, expected = trial.attention(kind, CPU)
    assert trial.verdict_on([launched(kind, inputs)], expected, trial.ALLOWED["bf16"]).fit
    wrong = replace(kind.function, source=kind.function.source.replace("scores = tmp", "scores = 1.2 * tmp"))
    assert not trial.verdict_on([launched(replace(kind, function=wrong), inputs)], expected, trial.ALLOWED["bf16"]).fit


def launched(kind: Kind, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv of what the trial compiles."""

    def fakes() -> list[torch.Tensor]:
        return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") for x in inputs]

    token, constants = in_trial.set(kind.function), dict[str, torch.Tensor]()
    try:
        with _tables(constants), trial.as_tried(kind), installed(), deterministic(), enabled(**GLUON):
            generated = generate(trial.backward_of(kind, inputs), fakes, "h100")
    finally:
        in_trial.reset(token)
    assert [decision.kernel for decision in generated.decisions] == ["gluon"]
    session = Session("h100", check=False)
    with session.running():
        placed = [session.memory.put(x, f"input {n}") for n, x in enumerate(inputs)]
        tables = {name: session.memory.put(table, name) for name, table in constants.items()}
        return tuple(x.clone() for x in call(generated.source, placed, tables))
