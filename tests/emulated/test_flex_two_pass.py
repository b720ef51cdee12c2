"""Two passes under block masks, mask functions and score functions: right against float64, and without a wait."""

from dataclasses import replace

import pytest
import torch
from attention import error, rewritten
from flex import (
    INTERLEAVINGS,
    Attention,
    ahead,
    alibi,
    backward_of,
    causal,
    documents,
    not_finite_where_hidden,
    softcap,
    window,
    window_by_head,
    with_blind_rows,
)
from tensors import BF16
from test_flex import CASES, ERRORS, NIGHTLY

from dash_inductor import decisions, emulation, enabled

pytestmark = pytest.mark.usefixtures("rewriting")

BLOCK = (32, 64)  # which tiles of two passes divide
# Head dims that one pass does not take.
LARGE = {
    "Gemma 3's window, GQA, ragged": Attention(window, None, 75, heads=4, kv_heads=2, head_dim=256),
    "Gemma 2's soft-cap, bf16": Attention(causal, softcap, 64, heads=1, head_dim=256, dtype=BF16),
    "MLA, causal documents, ragged": Attention(documents(37, 50, 5, 8), None, 100, heads=1, head_dim=192, value_dim=128),
    "MLA, NaN where hidden, rows that see nothing": Attention(
        with_blind_rows, not_finite_where_hidden, 75, kv_heads=1, head_dim=192, value_dim=128
    ),
    "mask by head and batch, GQA": Attention(
        window_by_head, alibi(4), 64, batch=2, heads=4, kv_heads=1, head_dim=136, mask_sizes=(2, 4)
    ),
    "values that are larger, cross": Attention(ahead, None, 70, 130, heads=1, head_dim=64, value_dim=160),
    "no mask, soft-cap, cross": Attention(None, softcap, 70, 100, head_dim=160),
}
SMALL = {name: replace(case, block=BLOCK) if case.block == 32 else case for name, case in (CASES | NIGHTLY).items()}
CHOSEN = ("mask by head and batch, bias, GQA", "captures by b, h, m, n", "causal, NaN where hidden, ragged")


@pytest.mark.parametrize(
    "attention",
    [
        *(pytest.param(attention, id=name) for name, attention in LARGE.items()),
        *(pytest.param(case, id=name, marks=[] if name in CHOSEN else pytest.mark.nightly) for name, case in SMALL.items()),
    ],
)
def test_gradients_are_right_and_nobody_waits(attention: Attention) -> None:
    attention, tensors = replace(attention, block=BLOCK if attention.block == 32 else attention.block), attention.tensors()
    forced = {} if max(attention.head_dim, attention.value_dim or 0) > 128 else {"template": "two_pass"}
    with enabled(**forced):
        gradients = backward_of(attention.function(), tensors)
        first, *others = [gradients(*interleaving) for interleaving in INTERLEAVINGS]
    (decision,) = decisions()[-rewritten() :]
    assert (decision.template, decision.launch) == ("two_pass", "plain")
    assert decision.mask == ("full" if attention.mask is None else "block_mask")
    errors = [error(a, e) for a, e in zip(first, attention.reference(tensors), strict=True)]
    assert max(errors) < ERRORS[attention.dtype], errors
    assert all(torch.equal(a, e) for other in others for a, e in zip(other, first, strict=True))
    assert emulation.launches() == []
