"""Models of transformers train through FlexAttention: every attention rewritten, gradients right, the same bits again."""

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from attention import FP32_ERROR
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from benchmarks.models.families import DECODER, LAYERS
from benchmarks.models.measure import as_on_a_gpu, gradients_of, gradients_written_out
from dash_inductor import decisions, emulation

pytestmark = pytest.mark.usefixtures("rewriting", "asked_for_logsumexp")

WINDOW = 24
DOCUMENTS = [50, 84]  # together more than one block of a BlockMask
MODELS = {
    "Llama": {},
    "Mistral": {"sliding_window": WINDOW},
    "Gemma2": {"sliding_window": WINDOW, "attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 1},
    "GptOss": {"sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 2},
}
MASK_KERNELS = 3  # that make rows and ranks of one BlockMask


@pytest.fixture
def asked_for_logsumexp():
    with as_on_a_gpu():
        yield


@pytest.fixture
def mask_kernels(monkeypatch):
    """The kernels launched that make rows and ranks of a BlockMask."""
    launched = []
    stock = CachingAutotuner.run

    def run(self, *args, **kwargs):
        if "arg_MATRIX" in self.fn.arg_names:
            launched.append(self)
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(CachingAutotuner, "run", run)
    return launched


def model_of(name):
    """A small one that attends by FlexAttention."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**DECODER, **MODELS[name])
    implementations = {"attn_implementation": "flex_attention", "experts_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_config(config, **implementations).train()


def batch_of(packed):
    """Arguments of a step: one sequence, or several in a row, told apart by their positions."""
    tokens = torch.randint(DECODER["vocab_size"], (1, sum(DOCUMENTS)), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    return {**batch, "position_ids": torch.cat([torch.arange(length) for length in DOCUMENTS])[None]} if packed else batch


@pytest.mark.parametrize(
    ("name", "packed", "whole", "masks"),
    [
        pytest.param("Llama", True, True, 1, marks=pytest.mark.nightly),
        ("Mistral", False, False, 1),
        ("GptOss", True, False, 2),  # its sinks need the logsumexp's gradient
        pytest.param("Gemma2", True, False, 2, marks=pytest.mark.nightly),
        pytest.param("Gemma2", False, True, 2, marks=pytest.mark.nightly),
        pytest.param("Llama", False, False, 1, marks=pytest.mark.nightly),
        pytest.param("Mistral", True, False, 1, marks=pytest.mark.nightly),
    ],
)
def test_training(mask_kernels, name, packed, whole, masks):
    """Compiled as a whole, or only FlexAttention by itself, which transformers does where the model is eager."""
    model, batch = model_of(name), batch_of(packed)
    expected = gradients_written_out(model, batch, torch.float64)
    assert {gradient.dtype for gradient in expected.values()} == {torch.float64}
    if whole:
        model.compile(dynamic=False)
    before = len(decisions())
    with emulation.emulate(seed=0):
        actual = gradients_of(model, batch)
    with emulation.emulate(seed=1, resident=2):
        again = gradients_of(model, batch)

    assert [decision for decision in decisions()[before:] if not decision.rewritten] == []
    assert len(emulation.launches()) == 2 * LAYERS
    assert len(mask_kernels) == 2 * MASK_KERNELS * (masks if whole else LAYERS)
    for parameter, reference in expected.items():
        error = (actual[parameter] - reference).abs().max() / reference.abs().max()
        assert error < FP32_ERROR, f"{parameter}: error {error:.2e}"
    assert [parameter for parameter in expected if not torch.equal(actual[parameter], again[parameter])] == []
