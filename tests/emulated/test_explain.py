"""What explain says is what a training step does, on the emulated device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import pytest
import torch
from torch._inductor import config as inductor_config

import dash_inductor
from dash_inductor import emulation, explain
from dash_inductor.cli.gpt import GPT

BATCH = (torch.zeros(2, 128, dtype=torch.long), torch.ones(2, 128, dtype=torch.long))


def texts(decisions: Iterable[dash_inductor.Decision], **without: str) -> list[str]:
    """Of decisions, in an order that is none of theirs, without the graphs that hold them. without: other fields, replaced."""
    return sorted(repr(dataclasses.replace(decision, graph=None, **without)) for decision in decisions)


def path_of(decision: dash_inductor.Decision) -> str:
    """That of its module, with the dot that stands before a part of it."""
    return f".{decision.module}" if decision.module else ""


def test_a_small_gpt(rewriting):
    with emulation.emulate():
        model = GPT(128, 32, 2, 2)
        dash_inductor.clear_decisions()
        report = explain(model, *BATCH)
        assert dash_inductor.decisions() == [] and not emulation.launches()
        torch.compile(model, dynamic=False)(*BATCH).backward()
    assert report.device == "emulated" and report.all_rewritten and [row.module for row in report] == ["blocks.0", "blocks.1"]
    assert texts(row.decision for row in report) == texts(dash_inductor.decisions())
    assert emulation.launches()


def test_no_device_while_triton_interprets(rewriting):
    with emulation.emulate(), pytest.raises(ValueError, match="leave out device="):
        explain(GPT(128, 32, 2, 2), *BATCH, device="h100")


MODELS = [
    ("Llama", "padded"),
    *(
        ("GPT-2", "dropout as configured"),
        ("T5", "plain"),
        ("T5", "checkpointing"),
        ("Gemma 2", "plain"),
        ("DeepSeek-V3", "plain"),
        ("Qwen3", "packed"),
    ),
    *(("ModernBERT", "padded"), ("Whisper", "plain"), ("gpt-oss", "plain"), ("CLIP", "padded"), ("Mistral", "padded")),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "case"), MODELS)
def test_models_of_transformers(name, case):
    """All that is decided, with schedules, bytes, lines and modules, whose paths a training has from where a graph begins."""
    pytest.importorskip("transformers")
    from benchmarks.models import measure
    from benchmarks.models.families import DROPOUT, FAMILIES

    with measure._set_up(), inductor_config.patch(fallback_random=case == DROPOUT), emulation.emulate():
        model, batch = measure.model_of(FAMILIES[name], case), FAMILIES[name].batch(case)
        report = explain(model, **batch)
        assert dash_inductor.decisions() == []
        model.compile(dynamic=False)
        measure.gradients_of(model, batch)
        decided = dash_inductor.decisions()
    rows = [row.decision for row in report]
    assert decided and texts(rows, module="") == texts(decided, module="")
    explained, trained = (sorted((*texts([each], module=""), path_of(each)[::-1]) for each in of) for of in (rows, decided))
    assert all(whole.startswith(path) for (_, whole), (_, path) in zip(explained, trained, strict=True))
