"""The trial of a function of the scores: what it launches on a GPU is executed here, and held against what it expects."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

from benchmarks.machine_code.flex import flex_backward
from benchmarks.machine_code.generate import generate
from dash_inductor import enabled
from dash_inductor.codegen.flex import OPTIONS, FlexAttention
from dash_inductor.codegen.mode import deterministic
from dash_inductor.codegen.mods import SCORE_MODS
from dash_inductor.config import Config
from dash_inductor.first_use.kind import Kind
from dash_inductor.hooks.install import installed
from dash_inductor.lowering import listed
from dash_inductor.lowering.gluon_functions import in_trial
from dash_inductor.reference import LOG2E
from dash_inductor.reproduce import score_source, trial

from .cases import _tables
from .graphs import as_if_asked
from .launch import Session, call

GLUON: dict[str, Any] = {"kernel": "gluon", "template": "one_pass"}
CPU = torch.device("cpu")
# (generator, mask, parts of chains)
DROPPING: list[tuple[str, str, dict[str, Any]]] = [
    ("flash", "causal", {}),
    ("efficient", "full", {}),
    ("efficient", "block_mask", {}),
    ("efficient", "block_mask", {"sets": True}),
    ("efficient", "block_mask", {"bands": True, "sets": True}),
]


def mixed(score: Any, b: Any, h: Any, m: Any, n: Any, slopes: Any) -> Any:
    """Scaled by a value of the head and one of the key, behind a soft-cap."""
    with TransformGetItemToIndex():
        return 5 * torch.tanh(score * slopes[h] / 5) + slopes[n % 2] * torch.sigmoid(score)


@pytest.fixture
def kind_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Kind]:
    """The kind of a FlexAttention of head dim 64, by the Gluon kernel."""
    monkeypatch.setitem(SCORE_MODS, "mixed", mixed)

    def kind(score_mod: str, mask_mod: str, trained: bool = False) -> Kind:
        batch = 1 if trained else 8
        attention = FlexAttention(4096, 16, 16, 64, batch=batch, mask_mod=mask_mod, score_mod=score_mod, trained=trained)
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
@pytest.mark.parametrize(
    ("score_mod", "mask_mod", "sliced", "trained"),
    [
        ("mixed", "none", False, False),
        ("mixed", "causal", False, False),
        ("alibi", "documents", False, False),
        ("alibi", "documents", True, False),
        ("alibi", "causal", False, True),
    ],
)
def test_it_is_right(
    score_mod: str, mask_mod: str, sliced: bool, trained: bool, kind_of: Callable[..., Kind], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a kernel with another function is not. trained: it stores what elements add to a gradient, which nobody reads."""
    monkeypatch.setattr(trial, "_sms", lambda device: 1)
    monkeypatch.setattr(trial, "CHAINS_PER_SM", 1)
    monkeypatch.setattr(trial, "TILES", 2)
    kind = replace(kind_of(score_mod, mask_mod, trained), sliced=sliced)
    assert kind.function is not None and kind.function.values == ("torch.float32",) * trained
    inputs, expected = trial.attention(kind, CPU)
    assert trial.verdict_on([launched(kind, inputs)], expected, trial.ALLOWED["bf16"]).fit
    wrong = replace(kind.function, source=kind.function.source.replace("scores = tmp", "scores = 1.2 * tmp"))
    assert wrong != kind.function
    assert not trial.verdict_on([launched(replace(kind, function=wrong), inputs)], expected, trial.ALLOWED["bf16"]).fit


@pytest.mark.every_case
@pytest.mark.parametrize(("generator", "mask", "parts"), DROPPING)
def test_dropout_is_right(generator: str, mask: str, parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """And one of other bits is not."""
    few = {"_sms": lambda device: 1, "CHAINS_PER_SM": 1, "TILES": 2, "LEAST_STEPS": 1}
    for name, value in few.items():
        monkeypatch.setattr(trial, name, value)
    monkeypatch.setattr(listed, "LEAST_STEPS", 1)
    launch, block = ("chained", 128) if mask == "block_mask" else ("grouped", None)
    kind = Kind("one_pass", "gluon", launch, 90, "bf16", 128, 128, mask, 64, 128, block, dropout=generator, **parts)
    inputs, expected = trial.attention(kind, CPU)
    with as_if_asked():
        assert trial.verdict_on([launched(kind, inputs)], expected, trial.ALLOWED["bf16"]).fit
        seed = 6  # among the inputs: of one generator with the offset
        inputs[seed] = (inputs[seed].view(torch.int64) + 1).view(inputs[seed].dtype)
        assert not trial.verdict_on([launched(kind, inputs)], expected, trial.ALLOWED["bf16"]).fit


def test_a_size_beside_what_the_mask_captures(kind_of: Callable[..., Kind], monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands behind the tensors of the function of the scores."""
    monkeypatch.setattr(trial, "_sms", lambda device: 1)
    monkeypatch.setattr(trial, "CHAINS_PER_SM", 1)
    monkeypatch.setattr(trial, "TILES", 2)
    kind = kind_of("alibi", "documents")
    assert kind.function is not None and len(kind.function.captures) == 1
    source = re.sub(r"scores = (tmp\d+)", r"scores = \1 + captures[1] / 1024", kind.function.source)
    kind = replace(kind, function=replace(kind.function, source=source, sizes=1))
    inputs, expected = trial.attention(kind, CPU)
    assert trial.verdict_on([launched(kind, inputs)], expected, trial.ALLOWED["bf16"]).fit


def test_sizes_that_are_symbols() -> None:
    """One kernel, for two lengths: a table by distance, and numbers, at places that depend on the length."""

    def function(score: Any, b: Any, h: Any, m: Any, n: Any, table: Any, size: Any, shift: Any) -> Any:
        with TransformGetItemToIndex():
            return (score + table[h, m - n + size]) * (1 + shift[(m - n + size) % 2])

    def derivative(score: Any, b: Any, h: Any, m: Any, n: Any, grad: Any, table: Any, size: Any, shift: Any) -> Any:
        with TransformGetItemToIndex():
            return [grad * (1 + shift[(m - n + size) % 2]), *[None] * 7]

    def backward(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value, grad_out, out, logsumexp, table, shift = tensors
        mask = FlexAttention(query.shape[2], 2, 2, 64, mask_mod="none").mask([])
        *gradients, _ = torch.ops.higher_order.flex_attention_backward(
            *(query, key, value, out, logsumexp, grad_out, None, function, derivative, mask.as_tuple()),
            *(0.125, OPTIONS, (table, query.shape[2], shift), (shift,)),
        )
        return tuple(gradients)

    def given(length: int) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]:
        make = torch.Generator().manual_seed(0)
        query, key, value, grad_out = (torch.randn(1, length, 2, 64, generator=make).bfloat16().transpose(1, 2) for _ in range(4))
        table, shift = torch.randn(2, 512, generator=make), torch.tensor([0.25, -0.5])
        leaves = [x.double().requires_grad_() for x in (query, key, value)]
        distance = torch.arange(length)[:, None] - torch.arange(length) + length
        scores = (leaves[0] @ leaves[1].mT / 8 + table.double()[:, distance]) * (1 + shift.double()[distance % 2])
        out, logsumexp = scores.softmax(-1) @ leaves[2], scores.logsumexp(-1)
        stored = out.detach().bfloat16(), (logsumexp * LOG2E).float().detach()
        return [query, key, value, grad_out, *stored, table, shift], torch.autograd.grad(out, leaves, grad_out.double())

    with installed(), deterministic(), enabled(**GLUON):
        generated = generate(backward, lambda: fakes(given(200)[0]), "h100", dynamic_dims=(2,))
    assert [decision.kernel for decision in generated.decisions] == ["gluon"]
    for length in (200, 130):
        inputs, expected = given(length)
        assert trial.verdict_on([executed(generated.source, inputs, {})], expected, trial.ALLOWED["bf16"]).fit


def fakes(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") for x in inputs]


def launched(kind: Kind, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv of what the trial compiles."""
    token, constants = in_trial.set(kind.function), dict[str, torch.Tensor]()
    try:
        with _tables(constants), trial.as_tried(kind), installed(), deterministic(), enabled(**GLUON):
            generated = generate(trial.backward_of(kind, inputs), lambda: fakes(inputs), "h100")
    finally:
        in_trial.reset(token)
    (found,) = [Kind.of_text(text) for decision in generated.decisions for text in decision.kinds]
    assert replace(found, function=kind.function) == kind
    assert kind.function is None or (found.function and found.function.source == kind.function.source)
    return executed(generated.source, inputs, constants)


def executed(source: str, inputs: list[torch.Tensor], constants: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    session = Session("h100", check=False)
    with session.running():
        placed = [session.memory.put(x, f"input {n}") for n, x in enumerate(inputs)]
        tables = {name: session.memory.put(table, name) for name, table in constants.items()}
        return tuple(x.clone() for x in call(source, placed, tables))
