"""Chains under a mask cut into parts: the gradients are right, and their bits those of any interleaving."""

from __future__ import annotations

import pytest
import torch
from attention import FP32_ERROR, differing, error, rewritten
from flex import Attention, alibi, backward_of, causal, documents, everything, pictures, window, with_blind_rows

from dash_inductor.lowering import block_mask
from dash_inductor.schedule import parts

pytestmark = pytest.mark.usefixtures("rewriting")

INTERLEAVINGS = [(0, None), (1, 1), (2, 3)]


@pytest.fixture
def always_banded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few chains are, and however short."""
    monkeypatch.setattr(parts, "LEAST_BANDED", 1)
    monkeypatch.setattr(block_mask, "LEAST_STEPS", 1)


CASES = {
    "causal": Attention(causal, None, 256, heads=1),
    "in sets": Attention(causal, None, 160, heads=6, kv_heads=2),
    "a set of each head": Attention(causal, alibi(3), 100, heads=3, kv_heads=1, batch=2),
    "window": Attention(window, None, 200, heads=2),
    "everything": Attention(everything, None, 160, heads=2, kv_heads=1),
    "pictures": Attention(pictures((0, 70), (90, 130)), None, 170, heads=2),
    "documents": Attention(documents(90, 30, 50), None, 170, heads=4, kv_heads=2),
    "more keys": Attention(everything, None, 90, kv_len=200, heads=2, kv_heads=1),
    "more queries": Attention(causal, None, 230, kv_len=70, heads=2, kv_heads=1),
    "blocks of several tiles": Attention(causal, None, 250, heads=2, kv_heads=1, block=(32, 64)),
    "blind rows": Attention(with_blind_rows, None, 160, heads=2, kv_heads=1),
    "value's head dim": Attention(causal, None, 160, heads=2, kv_heads=1, head_dim=32, value_dim=16),
    "bf16": Attention(causal, None, 160, heads=2, kv_heads=1, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_right_in_any_interleaving(name: str, always_banded: None) -> None:
    attention = CASES[name]
    tensors = attention.tensors()
    gradients, expected = backward_of(attention.function(), tensors), attention.reference(tensors)
    first, *others = [gradients(*interleaving) for interleaving in INTERLEAVINGS]
    assert rewritten() == 1
    bound = FP32_ERROR if attention.dtype == torch.float32 else 2**-6
    assert max(error(a, e) for a, e in zip(first, expected, strict=True)) < bound
    assert all(differing(first, other) == [] for other in others)
