"""Gradients of rewritten attention against float64 autograd, with all uninitialised memory full of NaN."""

import pytest
import torch
import torch.nn.functional as F
from attention import OP, assert_as_good_as_stock, attention, check_gradients, compiled, error, gradients, in_eighths, normal, qkv
from torch.utils.checkpoint import checkpoint

from dash_inductor.emulation import emulate

pytestmark = pytest.mark.usefixtures("rewriting")

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("dtype", "causal", "batch", "heads", "q_len", "kv_len", "head_dim"),
    [
        (FP32, False, 2, 2, 64, 64, 16),
        (FP32, True, 1, 2, 100, 100, 24),
        (FP32, False, 1, 1, 53, 130, 40),
        (FP32, False, 1, 1, 130, 53, 64),
        (FP32, True, 1, 1, 130, 130, 96),
        (FP32, True, 1, 1, 64, 64, 128),
        (FP32, True, 1, 1, 53, 53, 19),
        (BF16, True, 1, 2, 130, 130, 64),
        (BF16, False, 1, 1, 100, 53, 24),
        (BF16, True, 1, 1, 53, 53, 128),
        (FP16, False, 1, 1, 53, 100, 96),
        (FP16, True, 2, 1, 100, 100, 16),
        (FP16, False, 1, 1, 64, 64, 128),
        (FP32, False, 2, 3, 1, 1, 16),
        (BF16, True, 2, 3, 1, 1, 16),
        (FP32, False, 1, 2, 1, 70, 16),
        (FP32, False, 1, 2, 70, 1, 16),
    ],
)
def test_shapes(dtype, causal, batch, heads, q_len, kv_len, head_dim):
    *inputs, grad_out = qkv(batch, heads, q_len, kv_len, head_dim, dtype=dtype)
    check_gradients(attention(causal=causal), inputs, grad_out, seed=q_len)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_grouped_query_attention(dtype):
    *inputs, grad_out = qkv(1, 6, 70, 70, 16, kv_heads=2, dtype=dtype)
    check_gradients(attention(causal=True, gqa=True), inputs, grad_out)


@pytest.mark.parametrize(
    ("dtype", "causal", "heads", "kv_heads", "q_len", "kv_len", "transposed"),
    [
        (FP32, True, 6, 2, 70, 70, False),
        (FP32, True, 2, 2, 53, 53, True),
        (BF16, False, 4, 1, 33, 100, True),
        (FP16, True, 4, 2, 64, 64, False),
    ],
)
def test_by_the_op(dtype, causal, heads, kv_heads, q_len, kv_len, transposed):
    """What the CPU's SDPA does not hand over: kv heads that are not expanded, and tensors whose last stride is not 1."""
    *inputs, grad_out = qkv(2, heads, q_len, kv_len, 16, kv_heads=kv_heads, dtype=dtype)
    mask = "causal" if causal else "full"
    key, value = (x.repeat_interleave(heads // kv_heads, 1) for x in inputs[1:])
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(inputs[0], key, value, 0.0, causal)
    args = [grad_out, *inputs, out, lse.float()]
    if transposed:
        args = [x.mT.contiguous().mT for x in args]
    with emulate():
        actual = compiled(lambda *args: OP(*args, mask=mask))(*args)
    stock = gradients(attention(causal=causal, gqa=True), inputs, grad_out)
    reference = gradients(attention(causal=causal, gqa=True), [x.double() for x in inputs], grad_out.double())
    assert_as_good_as_stock(actual, stock, reference)


# How users lay out queries, keys and values: each function makes attention's arguments from buffers of its own.


def batch_sequence_heads(x, y, z):
    """[B, S, H, D], as a linear layer leaves it."""
    return (t.transpose(1, 2) for t in (x, y, z))


def odd_rows(x, y, z):
    """Rows 21 elements apart, and a first one that is not aligned."""
    return x[..., 3:19], y[..., 1:17], z[..., 5:]


def one_batch(x, y, z):
    """keys and values of one batch element for all: stride 0."""
    return x, y.expand(x.shape[0], -1, -1, -1), z.expand(x.shape[0], -1, -1, -1)


def one_head(x, y, z):
    """One head of keys and values for all, and one query for all batch elements."""
    return x.expand(y.shape[0], -1, -1, -1), y.expand(-1, x.shape[1], -1, -1), z.expand(-1, x.shape[1], -1, -1)


def one_row(x, y, z):
    """One row of everything for the whole sequence."""
    return x.expand(-1, -1, 40, -1), y.expand(-1, -1, 40, -1), z


def packed(x):
    """[B, S, 3, H, D], as one linear layer leaves all three."""
    return x.permute(2, 0, 3, 1, 4).unbind(0)


@pytest.mark.parametrize(
    ("layout", "shapes"),
    [
        (batch_sequence_heads, [(2, 53, 2, 16)] * 3),
        (odd_rows, [(1, 2, 53, 21)] * 3),
        (one_batch, [(3, 1, 40, 16), (1, 1, 40, 16), (1, 1, 40, 16)]),
        (one_head, [(1, 3, 40, 16), (2, 1, 40, 16), (2, 1, 40, 16)]),
        (one_row, [(2, 1, 1, 16), (2, 1, 1, 16), (2, 1, 40, 16)]),
        (packed, [(2, 53, 3, 2, 16)]),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_layouts(layout, shapes, causal):
    def attend(*buffers):
        query, key, value = layout(*buffers)
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal)

    buffers = [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    check_gradients(attend, buffers, normal(*attend(*buffers).shape, seed=9))


# What becomes of attention's output decides how its gradient is laid out.


def summed(out):
    """Stride 0 everywhere."""
    return out.sum()


def summed_over_heads(out):
    """Stride 0 over heads."""
    return out.sum(1)


def heads_joined(out):
    """[B, S, H * D], as the next linear layer takes it."""
    return out.transpose(1, 2).flatten(2)


def transposed(out):
    """The last stride is not 1."""
    return out.mT


def beside_others(out):
    """Rows of an odd pitch that start at an odd element."""
    return torch.cat([out[..., :3], out, out[..., :2]], -1)


@pytest.mark.parametrize("use", [summed, summed_over_heads, heads_joined, transposed, beside_others])
def test_layouts_of_grad_out(use):
    def attend(query, key, value):
        return use(F.scaled_dot_product_attention(query, key, value, is_causal=True))

    *inputs, _ = qkv(2, 2, 53, 53, 24)
    check_gradients(attend, inputs, normal(*attend(*inputs).shape, seed=9))


def test_scale_of_the_user():
    *inputs, grad_out = qkv(1, 2, 53, 53, 16)
    check_gradients(attention(causal=True, scale=0.2), inputs, grad_out)


def test_activation_checkpointing():
    def twice(query, key, value):
        def block(x):
            return x + F.scaled_dot_product_attention(x, key, value, is_causal=True)

        return checkpoint(block, checkpoint(block, query, use_reentrant=False), use_reentrant=False)

    *inputs, grad_out = qkv(1, 2, 53, 53, 16)
    check_gradients(twice, inputs, grad_out, attentions=2)


def test_attention_written_by_hand():
    """Inductor's own patterns turn it into SDPA before the pass runs."""

    def attend(query, key, value):
        return torch.softmax(query @ key.transpose(-2, -1) * 0.25, dim=-1) @ value

    *inputs, grad_out = qkv(2, 2, 53, 53, 16)
    check_gradients(attend, inputs, grad_out)


@pytest.mark.parametrize("causal", [False, True])
def test_far_negative_logits(causal):
    """Logits of about -256: exp(-lse) overflows, and inf * 0 at the keys past the end would be NaN in dq.

    Logits this large have rounding errors of 2**-16, in whatever form they are computed; in eighths their sums have none, in
    whatever order a CPU adds them up.
    """
    query, key, value, grad_out = qkv(1, 2, 53, 53, 16)
    query, key = in_eighths(query), in_eighths(key)
    query[..., 0], key[..., 0] = 16, -16
    function = attention(causal=causal, scale=1.0)
    with emulate():
        actual = gradients(compiled(function), [query, key, value], grad_out)
    reference = gradients(function, [query.double(), key.double(), value.double()], grad_out.double())
    assert max(error(a, r) for a, r in zip(actual, reference, strict=True)) < 16 * 2**-16
