"""A training step of each of MODELS: `model_steps_worker.py FILE`, which gets what became of its attentions, and its gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

import dash_inductor
from benchmarks.models.families import FAMILIES, ONES, PACKED, PLAIN, Batch
from benchmarks.models.measure import as_on_a_gpu, errors_of, gradients_written_out, model_of

Loss = Callable[[Any, Batch], torch.Tensor]


def of_labels(model: Any, batch: Batch) -> torch.Tensor:
    """The model's own."""
    return model(**batch).loss


def of_advantages(model: Any, batch: Batch) -> torch.Tensor:
    """GRPO's: ratios of probabilities, clipped, times how much better than its group each document of a pack is."""
    tokens = batch["input_ids"]
    given = {name: x for name, x in batch.items() if name != "labels"}
    found = model(**given).logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    document = (batch["position_ids"] == 0).cumsum(-1)[:, 1:]
    advantage = torch.where(document == 1, 0.5, -1.0).to(found.dtype)
    ratio = (found - found.detach()).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()


MODELS: dict[str, tuple[str, str, Loss]] = {
    "gpt-oss": ("gpt-oss", PLAIN, of_labels),
    "BERT without padding": ("BERT", ONES, of_labels),
    "Llama, packed": ("Llama", PACKED, of_labels),
    "a step of GRPO": ("Llama", PACKED, of_advantages),
}


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


def step(family: str, case: str, loss: Loss) -> dict[str, Any]:
    torch._dynamo.reset()
    dash_inductor.clear_decisions()
    model, batch = model_of(FAMILIES[family], case), FAMILIES[family].batch(case)
    expected = gradients_written_out(model, batch, torch.float64) if loss is of_labels else {}
    model.compile(dynamic=False)
    found = gradients(model, loss(model, batch))
    return {"gradients": found, "decisions": dash_inductor.decisions(), "error": max(errors_of(found, expected), default=0.0)}


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    dash_inductor.enable()
    with as_on_a_gpu():
        torch.save({name: step(*of) for name, of in MODELS.items()}, sys.argv[1])
