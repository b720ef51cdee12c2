"""What deterministic mode costs of a training step of three models on an H100, as `python -m dash_inductor cost` predicts it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
import transformers

from dash_inductor.cli.console import table
from dash_inductor.cli.gpt import GPT
from dash_inductor.qualify.training import Layer, Sizes
from dash_inductor.step_cost import BACKWARD, MATMULS, OFF, OURS, STRICT
from dash_inductor.step_cost.predicted import predicted

DEVICE = "h100"
SHORT = {"off": OFF, "strict": STRICT, "ours": OURS}
Example = tuple[torch.nn.Module, tuple[torch.Tensor, ...]]


def gpt2() -> Example:
    """GPT-2 with 124M parameters, as nanoGPT trains it: 12 sequences of 1,024 tokens."""
    tokens = torch.empty(12, 1024, dtype=torch.long, device="meta")
    with torch.device("meta"):
        return GPT(1024, width=768, heads=12, layers=12, tokens=50304).bfloat16(), (tokens, tokens)


def llama3_8b_layer() -> Example:
    """A layer of Llama 3 8B: a sequence of 8,192 tokens."""
    sdpa = functools.partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    return Layer(Sizes(), sdpa, "meta"), (torch.empty(1, 8192, 4096, device="meta", dtype=torch.bfloat16, requires_grad=True),)


def vit_large() -> Example:
    """ViT-L/16: 64 images of 224 x 224, 197 positions each."""
    config = transformers.ViTConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    with torch.device("meta"):
        return transformers.ViTModel(config).bfloat16().train(), (torch.empty(64, 3, 224, 224, dtype=torch.bfloat16),)


MODELS: dict[str, Callable[[], Example]] = {
    "GPT-2, 124M, 12 x 1,024": gpt2,
    "a layer of Llama 3 8B, 1 x 8,192": llama3_8b_layer,
    "ViT-L/16, 64 x 197": vit_large,
}


def _row(name: str, example: Callable[[], Example]) -> dict[str, str]:
    model, inputs = example()
    cost = predicted(model, inputs, {}, DEVICE)
    ms = {group.name: group.ms for group in cost.groups}
    return {
        "model": name,
        **{f"{short}, ms": _figure(ms[BACKWARD][way]) for short, way in SHORT.items()},
        "matmuls, ms": _figure(ms[MATMULS][OFF]),
        **{f"step, {short}": f"{_figure(cost.more_percent(way))} %" for short, way in SHORT.items() if way != OFF},
    }


def _figure(value: float | None) -> str:
    return "?" if value is None else f"{value:.2f}"


def main() -> None:
    """Print the table."""
    table(f"Attention's backward in a training step on {DEVICE}, predicted", [_row(*each) for each in MODELS.items()])
    print(
        "\nOff is without deterministic mode; step is how much longer attention, forward and backward, and matmuls take\n"
        "together. Prices of attention were within 7 % of an H200's times; matmuls at two thirds of the peak are a guess."
    )


if __name__ == "__main__":
    main()
