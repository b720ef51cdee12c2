"""Models of transformers train by `attn_implementation="flash_attention_2"`: a stand-in has the package's functions on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from typing import Any

import pytest

pytest.importorskip("transformers")

import flash_attn_stand_in
import torch
import transformers
from attention import FP32_ERROR
from torch._dynamo import config as dynamo_config
from transformers import modeling_flash_attention_utils as of_transformers

from benchmarks.models.families import DECODER, LAYERS
from benchmarks.models.measure import gradients_of, gradients_written_out
from dash_inductor import clear_decisions, decisions, emulation

pytestmark = pytest.mark.usefixtures("rewriting", "package")

DENSE, PACKED = (f"flash_attn._flash_attn_{kind}backward.default" for kind in ("", "varlen_"))
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    "Gemma2": {"sliding_window": 24, "attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 1},
}
DOCUMENTS = [30, 40]


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """transformers finds the package, and imports the stand-in's functions by its names."""
    module, padding = (module_from_spec(ModuleSpec(name, None)) for name in ("flash_attn", "flash_attn.bert_padding"))
    module.__dict__.update({name: getattr(flash_attn_stand_in, name) for name in ("flash_attn_func", "flash_attn_varlen_func")})
    module.flash_attn_with_kvcache = None  # type: ignore[attr-defined]  # of inference
    padding.pad_input, padding.unpad_input = of_transformers._pad_input, of_transformers._unpad_input  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setitem(sys.modules, "flash_attn.bert_padding", padding)
    monkeypatch.setattr(of_transformers, "is_flash_attn_2_available", lambda **_: True)
    monkeypatch.setattr(of_transformers, "_loaded_implementation", None)
    of_transformers.lazy_import_flash_attention("flash_attention_2")
    yield
    of_transformers._loaded_implementation = None


def model_of(name: str) -> Any:
    """A small one. The implementation is set behind the back of transformers, which asks for a GPU."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**DECODER, **MODELS[name])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    model.config._attn_implementation = "flash_attention_2"
    return model


def batch_of(packed: bool) -> dict[str, Any]:
    """Two sequences, or several in a row without padding, told apart by their positions."""
    tokens = torch.randint(DECODER["vocab_size"], (1 if packed else 2, sum(DOCUMENTS)), generator=torch.Generator().manual_seed(0))
    positions = {"position_ids": torch.cat([torch.arange(length) for length in DOCUMENTS])[None]} if packed else {}
    return {"input_ids": tokens, "labels": tokens, "use_cache": False, **positions}


@pytest.mark.parametrize("name", ["Llama", *(pytest.param(name, marks=pytest.mark.nightly) for name in list(MODELS)[1:])])
@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_training(name: str, packed: bool) -> None:
    """Every attention is rewritten; gradients are right, and the same in other interleavings."""
    clear_decisions()
    model, batch, found = model_of(name), batch_of(packed), []
    with dynamo_config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(model)
        for seed in range(2):
            with emulation.emulate(seed=seed):
                found.append(gradients_of(compiled, batch))
    assert {(decision.op, decision.reason) for decision in decisions()} == {(PACKED if packed else DENSE, None)}
    assert len(decisions()) == (1 if packed and name == "Llama" else LAYERS)  # after a break of the graph layers share the rest
    expected = gradients_written_out(model, batch, torch.float64)
    stock = gradients_written_out(model, batch, torch.float32)
    for (key, actual), again in zip(found[0].items(), found[1].values(), strict=True):
        key = key.removeprefix("_orig_mod.")
        assert torch.equal(actual, again)
        largest = expected[key].abs().max()
        errors = [float((x.double() - expected[key]).abs().max() / largest) for x in (actual, stock[key])]
        assert errors[0] <= max(2 * errors[1], FP32_ERROR), key
