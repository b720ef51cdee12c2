"""FlexAttention's backward: right against float64, and the same bits in every interleaving."""

import pytest
import torch
from attention import FP32_ERROR, error, rewritten
from flex import (
    INTERLEAVINGS,
    Attention,
    ahead,
    alibi,
    backward_of,
    bias_by_distance,
    captures,
    causal,
    documents,
    documents_per_batch,
    neighbourhood,
    not_finite_where_hidden,
    pictures,
    prefix,
    softcap,
    two_sided,
    window,
    window_by_head,
    with_blind_rows,
)
from tensors import BF16, FP16, FP32

from dash_inductor import decisions, emulation, enabled

pytestmark = pytest.mark.usefixtures("rewriting")

ERRORS = {FP32: FP32_ERROR, BF16: 2e-2, FP16: 3e-3}
TWO_DOCUMENTS = documents_per_batch([60, 36], [20, 32, 44])
# Those that attention-gym names bear its names.
CASES = {
    "causal, NaN where hidden, ragged": Attention(causal, not_finite_where_hidden, 75),
    "causal, D=128": Attention(causal, softcap, 64, heads=1, head_dim=128),
    "sliding window, soft-cap, GQA, ragged, bf16": Attention(window, softcap, 75, heads=4, kv_heads=2, dtype=BF16),
    "mask by head and batch, bias, GQA": Attention(
        window_by_head, bias_by_distance(64), 64, batch=2, heads=4, kv_heads=1, mask_sizes=(2, 4)
    ),
    "rows that see nothing, ALiBi, ragged": Attention(with_blind_rows, alibi(2), 75, kv_heads=1),
    "D=40, values of 24, soft-cap, GQA, ragged": Attention(causal, softcap, 75, heads=4, kv_heads=2, head_dim=40, value_dim=24),
    "captures by b, h, m, n": Attention(causal, captures(2, 4, 64), 64, batch=2, heads=4, kv_heads=2),
}
NIGHTLY = {
    "NATTEN": Attention(neighbourhood, None, 144, heads=1),
    "no mask, soft-cap, ragged, cross": Attention(None, softcap, 70, 100, head_dim=24),
    "document per batch, ALiBi, GQA": Attention(TWO_DOCUMENTS, alibi(2), 96, batch=2, kv_heads=1, mask_sizes=(2, None)),
    "two-sided window, bias, cross": Attention(two_sided, bias_by_distance(160), 90, 130, heads=1),
    "no mask, ALiBi, GQA, bf16": Attention(None, alibi(4), 64, heads=4, kv_heads=2, dtype=BF16),
    "causal, soft-cap": Attention(causal, softcap, 128, heads=1, block=(64, 64), head_dim=64),
    "causal, ALiBi, ragged": Attention(causal, alibi(2), 101),
    "sliding window, ALiBi": Attention(window, alibi(2), 128, block=(32, 64)),
    "document, ALiBi, bf16": Attention(documents(37, 91), alibi(2), 128, kv_heads=1, head_dim=64, dtype=BF16, block=(64, 64)),
    "prefix-LM, soft-cap, GQA, ragged": Attention(prefix, softcap, 75, heads=4, kv_heads=2),
    "mask by head, GQA, ragged": Attention(window_by_head, None, 75, heads=4, kv_heads=2, mask_sizes=(None, 4)),
    "mask by every second head": Attention(window, None, 64, heads=4, kv_heads=2, mask_sizes=(None, 2)),
    "cross, soft-cap, GQA": Attention(ahead, softcap, 100, 60, heads=4, kv_heads=2, block=(32, 64)),
    "transfusion, soft-cap, GQA, ragged": Attention(pictures((5, 50)), softcap, 75, heads=4, kv_heads=2),
    "no mask": Attention(),
    "no mask, bias, more queries": Attention(None, bias_by_distance(128), 100, 40),
    "causal": Attention(causal, None, 128, block=(32, 64)),
    "causal, bias, GQA": Attention(causal, bias_by_distance(96), 96, heads=3, kv_heads=1),
    "causal, D=128, bf16, ragged": Attention(causal, None, 70, heads=1, head_dim=128, dtype=BF16),
    "causal, blocks of 128": Attention(causal, softcap, 160, heads=1, block=128),
    "causal, fp16": Attention(causal, alibi(2), 96, dtype=FP16, head_dim=64),
    "causal, D=24, scale": Attention(causal, None, 80, head_dim=24, scale=0.5),
    "sliding window": Attention(window, None, 160, heads=1),
    "sliding window, NaN where hidden": Attention(window, not_finite_where_hidden, 75),
    "two-sided window": Attention(two_sided, None, 128, heads=1),
    "two-sided window, soft-cap, D=24": Attention(two_sided, softcap, 70, head_dim=24, block=(64, 64)),
    "document": Attention(documents(37, 60, 5, 26), None, 128),
    "document, soft-cap, ragged": Attention(documents(37, 50, 5, 8), softcap, 100),
    "document per batch": Attention(TWO_DOCUMENTS, None, 96, batch=2, heads=1, mask_sizes=(2, None)),
    "prefix-LM": Attention(prefix, None, 128, heads=1),
    "mask by head": Attention(window_by_head, None, 96, heads=3, mask_sizes=(None, 3)),
    "NATTEN, bias, batch": Attention(neighbourhood, bias_by_distance(72), 72, batch=2, heads=1),
    "cross": Attention(ahead, None, 70, 130, batch=2, heads=1),
    "rows that see nothing": Attention(with_blind_rows, None, 96),
    "rows that see nothing, bf16": Attention(with_blind_rows, softcap, 64, dtype=BF16),
    "window, D=128, values of 64, bf16": Attention(window, softcap, 100, heads=1, head_dim=128, value_dim=64, dtype=BF16),
    "prefix-LM, D=64, values of 128": Attention(prefix, None, 75, heads=1, head_dim=64, value_dim=128),
    "no mask, D=24, values of 40, soft-cap, cross": Attention(None, softcap, 70, 100, head_dim=24, value_dim=40),
    "transfusion": Attention(pictures((20, 60), (80, 110)), None, 128, heads=1),
}


@pytest.mark.parametrize(
    "attention",
    [
        *(pytest.param(attention, id=name) for name, attention in CASES.items()),
        *(pytest.param(attention, id=name, marks=pytest.mark.nightly) for name, attention in NIGHTLY.items()),
    ],
)
def test_gradients_are_right_and_have_the_same_bits_in_other_interleavings(attention):
    """Without a mask every chain has a ticket of its own only in a chained launch; else all CTAs of a group must be resident."""
    tensors = attention.tensors()
    with enabled(launch="chained" if attention.mask is None else "grouped"):
        gradients = backward_of(attention.function(), tensors)
        first, *others = [gradients(*interleaving) for interleaving in INTERLEAVINGS]
    assert rewritten() == 1
    assert decisions()[-1].mask == ("full" if attention.mask is None else "block_mask")
    errors = [error(a, e) for a, e in zip(first, attention.reference(tensors), strict=True)]
    assert max(errors) < ERRORS[attention.dtype], errors
    assert all(torch.equal(a, e) for other in others for a, e in zip(other, first, strict=True))
    assert len(emulation.launches()) == len(INTERLEAVINGS) and emulation.launches()[0].satisfied > 0
