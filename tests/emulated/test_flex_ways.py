"""FlexAttention beside its scores: gradients of the logsumexp, shared keys, what the graph proves of a mask, the guarantees."""

from dataclasses import replace

import pytest
import torch
from attention import FP32_ERROR, compiled, differing, error, gradients, in_interleavings, rewritten
from flex import (
    Attention,
    alibi,
    backward_of,
    causal,
    documents,
    documents_per_batch,
    everything,
    in_bits,
    softcap,
    wide_scores,
    window,
    window_by_head,
)
from tensors import BF16, FP32, normal
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention, noop_mask

from dash_inductor import decisions, enabled
from dash_inductor.emulation import emulate

pytestmark = pytest.mark.usefixtures("rewriting")

ERRORS = {FP32: FP32_ERROR, BF16: 2e-2}


@pytest.mark.parametrize(
    ("attention", "keywords", "alone"),
    [
        (Attention(causal, None, 75), {"return_lse": True}, True),
        (Attention(causal, softcap, 75, heads=4, kv_heads=2), {"return_aux": AuxRequest(lse=True)}, False),
        (Attention(None, alibi(2), 40, 70, batch=2), {"return_aux": AuxRequest(lse=True)}, False),
        (Attention(None, alibi(2), 40, 70, batch=2), {"return_aux": AuxRequest(lse=True)}, True),
    ],
)
def test_the_gradient_of_the_logsumexp(attention, keywords, alone):
    """Beside that of the output, and with an output that nobody uses."""
    *inputs, grad_out = attention.tensors()
    weights, attend = normal(*grad_out.shape[:3], seed=7), attention.function(**keywords)

    def loss(out, lse):
        return (lse * weights).sum() + (0 if alone else (out * grad_out).sum())

    def function(*tensors):
        out, second = attend(*tensors)
        return loss(out, getattr(second, "lse", second))

    def reference(*tensors):
        scores, values = wide_scores(*tensors, attention.mask, attention.mod)
        return loss(scores.softmax(-1) @ values, scores.logsumexp(-1)) + 0 * values.sum()

    with emulate():
        actual = gradients(compiled(function), inputs)
    expected = gradients(reference, [x.double() for x in inputs])
    assert rewritten() == 1
    assert max(error(a, e) for a, e in zip(actual, expected, strict=True)) < ERRORS[FP32]


@pytest.mark.parametrize(
    "attention",
    [Attention(causal, None, 75, heads=4, kv_heads=2), Attention(window, softcap, 100, batch=2)],
    ids=["causal", "window"],
)
def test_the_gradient_of_a_sink(attention):
    """A score that each head has beside those of its keys, and no value with it, as gpt-oss has: through the logsumexp."""
    *inputs, grad_out = attention.tensors()
    inputs.append(normal(attention.heads, seed=7))
    attend = attention.function(return_aux=AuxRequest(lse=True))

    def function(query, key, value, sink):
        out, aux = attend(query, key, value)
        return out * torch.sigmoid(aux.lse - sink[:, None])[..., None]

    def reference(query, key, value, sink):
        scores, values = wide_scores(query, key, value, attention.mask, attention.mod)
        beside = sink[:, None, None].expand(*scores.shape[:3], 1)
        return torch.cat([scores, beside], -1).softmax(-1)[..., :-1] @ values

    actual = in_interleavings(function, inputs, grad_out)
    expected = gradients(reference, [x.double() for x in inputs], grad_out.double())
    assert rewritten() == 1
    assert max(error(a, e) for a, e in zip(actual, expected, strict=True)) < ERRORS[FP32]


OF_TWO = documents_per_batch([40, 24], [20, 44])


@pytest.mark.parametrize(
    "attention",
    [
        Attention(causal, None, 64, batch=2, mask_sizes=(2, None)),
        Attention(OF_TWO, alibi(4), 64, batch=2, heads=4, kv_heads=2, mask_sizes=(2, None)),
        pytest.param(
            Attention(window_by_head, softcap, 50, batch=3, heads=4, kv_heads=2, mask_sizes=(3, 4), dtype=BF16),
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["causal", "documents per batch, ALiBi, GQA", "mask by head and batch, soft-cap, GQA, bf16"],
)
def test_keys_that_the_whole_batch_shares(attention):
    """Their gradients are sums over the batch, with the same bits in every interleaving."""
    query, key, value, grad_out = attention.tensors()
    tensors = [query, key[:1], value[:1], grad_out]
    run = backward_of(attention.function(), tensors)
    first, *others = [run(seed) for seed in range(3)]
    assert rewritten() == 1
    errors = [error(a, e) for a, e in zip(first, attention.reference(tensors), strict=True)]
    assert max(errors) < ERRORS[attention.dtype], errors
    assert [differing(other, first) for other in others] == [[], []]


LENGTH = 96
ROWS, KEYS = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)


def made_of(mask, mask_mod=None):
    """Makes a BlockMask of the lists of a mask, with another mask_mod where one is given."""

    def make():
        made = create_block_mask(mask, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=32)
        return made if mask_mod is None else replaced(made, mask_mod)

    return make


def in_part(mask, mask_mod):
    """The same, of lists that have no full blocks."""

    def make():
        rows, keys = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
        seen = mask(0, 0, rows, keys).expand(LENGTH, LENGTH).reshape(1, 1, 3, 32, 3, 32).any(5).any(3).to(torch.int32)
        num, indices = seen.sum(-1, dtype=torch.int32), seen.argsort(descending=True, stable=True).to(torch.int32)
        return BlockMask.from_kv_blocks(num, indices, BLOCK_SIZE=32, mask_mod=mask_mod, seq_lengths=(LENGTH, LENGTH))

    return make


def replaced(made, mask_mod):
    names = (f"{full}{kind}_{what}" for kind in ("kv", "q") for full in ("", "full_") for what in ("num_blocks", "indices"))
    return BlockMask(made.seq_lengths, *(getattr(made, name) for name in names), made.BLOCK_SIZE, mask_mod)


def without_the_corner(b, h, m, n):
    return (m // 32 < 2) | (n // 32 > 0)


CAUSAL, CORNER = ROWS >= KEYS, without_the_corner(0, 0, ROWS, KEYS)
OUTSIDE, OUTSIDE_WITHOUT = made_of(causal)(), in_part(without_the_corner, causal)()
PROOFS = {
    "made outside, without the corner": (lambda: OUTSIDE_WITHOUT, "block_mask", CAUSAL & CORNER),
    "made in the graph": (made_of(causal), "causal", CAUSAL),
    "without the corner": (in_part(without_the_corner, causal), "block_mask", CAUSAL & CORNER),
    "all blocks full": (made_of(everything, causal), "block_mask", CAUSAL | True),
    "a full mask": (made_of(noop_mask), "full", CAUSAL | True),
}
NIGHTLY_PROOFS = {
    "all blocks partial": (in_part(everything, causal), "causal", CAUSAL),
    "a window": (made_of(window), "block_mask", CAUSAL & (ROWS - KEYS < 40)),
    "made outside": (lambda: OUTSIDE, "block_mask", CAUSAL),
    "a full mask_mod of causal blocks": (made_of(causal, everything), "block_mask", ROWS // 32 >= KEYS // 32),
    "no mask": (lambda: None, "full", CAUSAL | True),
}


@pytest.mark.parametrize(
    ("block_mask", "kind", "seen"),
    [
        *(pytest.param(*case, id=name) for name, case in PROOFS.items()),
        *(pytest.param(*case, id=name, marks=pytest.mark.nightly) for name, case in NIGHTLY_PROOFS.items()),
    ],
)
def test_what_the_graph_proves_of_a_mask(block_mask, kind, seen):
    """mask_mod alone proves nothing; what is not proven is made of the lists, and right either way."""
    attention = Attention(None, softcap, LENGTH)
    tensors = attention.tensors()

    def attend(query, key, value):
        return flex_attention(query, key, value, score_mod=softcap, block_mask=block_mask())

    actual = backward_of(attend, tensors)(1)
    assert (rewritten(), decisions()[-1].mask) == (1, kind)
    errors = [error(a, e) for a, e in zip(actual, attention.reference(tensors, listed=seen), strict=True)]
    assert max(errors) < ERRORS[FP32], errors


def test_a_mask_mod_of_integers():
    """Whatever is not 0 is visible, as in stock's kernel; on an edge, where the mask meets other conditions, too."""
    attention = Attention(causal, None, 75)
    tensors = attention.tensors()
    actual = backward_of(attention.function(replaced(attention.block_mask(), in_bits)), tensors)(1)
    assert (rewritten(), decisions()[-1].mask) == (1, "block_mask")
    errors = [error(a, e) for a, e in zip(actual, attention.reference(tensors), strict=True)]
    assert max(errors) < ERRORS[FP32], errors


GUARANTEED = {
    "no mask": Attention(None, softcap, 128, batch=2),  # under `run` its family depends on the number of SMs
    "mask by head, GQA": Attention(window_by_head, None, 75, batch=2, heads=4, kv_heads=2, mask_sizes=(None, 4)),
    "documents": Attention(documents(30, 45), alibi(2), 75, batch=2),
}
*OTHERS, QUICK = GUARANTEED


@pytest.mark.parametrize("guarantee", [pytest.param("device", marks=pytest.mark.nightly), "batch"])
@pytest.mark.parametrize("name", [*(pytest.param(name, marks=pytest.mark.nightly) for name in OTHERS), QUICK])
def test_guarantees(name, guarantee):
    """On a device of another number of SMs; the first batch element alone."""
    attention = GUARANTEED[name]
    tensors = attention.tensors()
    alone, of_one = replace(attention, batch=1), [x[:1] for x in tensors]
    with enabled(guarantee=guarantee):
        expected = backward_of(attention.function(), tensors)()
        on_more = backward_of(attention.function(), tensors, sms=13)(1)
        by_itself = backward_of(alone.function(), of_one)(2)
    assert rewritten() == 3 and {d.guarantee for d in decisions()[-3:]} == {guarantee}
    assert differing(on_more, expected) == []
    assert differing(by_itself, [x[:1] for x in expected]) == []
