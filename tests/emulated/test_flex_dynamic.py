"""FlexAttention of lengths known only at run time: one graph for all, right, and with the bits of a graph of each length alone."""

import pytest
from attention import FP32_ERROR, compiled, differing, error, gradients, rewritten
from flex import Attention, causal, documents, ids_of, softcap, window
from tensors import qkv
from torch._dynamo import config as dynamo_config
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from dash_inductor import decisions
from dash_inductor.emulation import emulate

pytestmark = pytest.mark.usefixtures("rewriting")


def block_mask(mask, query, key):
    return create_block_mask(mask, None, None, query.shape[2], key.shape[2], device="cpu", BLOCK_SIZE=32)


def without_a_mask(query, key, value, ids):
    return flex_attention(query, key, value, score_mod=softcap)


def causal_made_in_the_graph(query, key, value, ids):
    return flex_attention(query, key, value, block_mask=block_mask(causal, query, key))


def documents_made_in_the_graph(query, key, value, ids):
    mask = block_mask(lambda b, h, m, n: (m >= n) & (ids[m] == ids[n]), query, key)
    return flex_attention(query, key, value, block_mask=mask, score_mod=softcap)


def made_outside(query, key, value, mask):
    return flex_attention(query, key, value, block_mask=mask)


def step(function, tensors, other):
    *inputs, grad_out = tensors
    return gradients(lambda *leaves: function(*leaves, other), inputs, grad_out)


def document_lengths(length):
    return length // 3, length - length // 3


def of_documents(*lengths):
    return Attention(documents(*document_lengths(lengths[0])), softcap, *lengths)


def of_a_window(*lengths):
    return Attention(window, None, *lengths)


def of_the_causal_mask(*lengths):
    return Attention(causal, None, *lengths)


def of_no_mask(*lengths):
    return Attention(None, softcap, *lengths)


EQUAL, DIFFERENT = [(50, 50), (64, 64), (75, 75)], [(70, 130), (101, 70), (75, 100)]


@pytest.mark.parametrize(
    ("function", "lengths", "attention", "mask", "dynamic"),
    [
        (without_a_mask, EQUAL, of_no_mask, "full", True),
        pytest.param(causal_made_in_the_graph, EQUAL, of_the_causal_mask, "block_mask", True, marks=pytest.mark.nightly),
        (documents_made_in_the_graph, EQUAL, of_documents, "block_mask", True),
        pytest.param(documents_made_in_the_graph, EQUAL, of_documents, "block_mask", None, marks=pytest.mark.nightly),
        pytest.param(made_outside, DIFFERENT, of_a_window, "block_mask", True, marks=pytest.mark.nightly),
        (made_outside, DIFFERENT, of_a_window, "block_mask", None),
    ],
)
def test_three_lengths_through_one_graph(function, lengths, attention, mask, dynamic):
    """Where dynamic shapes are automatic, the second length recompiles and no other."""
    in_one_graph = compiled(function, dynamic=dynamic)
    for index, (q_len, kv_len) in enumerate(lengths):
        given, tensors = attention(q_len, kv_len), qkv(1, 2, q_len, kv_len, 16)
        other = given.block_mask() if function is made_outside else ids_of(*document_lengths(q_len))
        with dynamo_config.patch(error_on_recompile=index > (dynamic is None)), emulate(index):
            actual = step(in_one_graph, tensors, other)
        assert max(error(a, e) for a, e in zip(actual, given.reference(tensors), strict=True)) < FP32_ERROR
    assert rewritten() == 1 + (dynamic is None)
    decision = decisions()[-1]
    assert decision.mask == mask and not isinstance(decision.q_len, int)
    if dynamic and function is documents_made_in_the_graph:
        with emulate(5):
            alone = step(compiled(function, dynamic=False), tensors, other)
        assert differing(actual, alone) == []
