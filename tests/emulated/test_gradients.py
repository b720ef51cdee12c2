"""Gradients of rewritten attention against float64 autograd, with all uninitialised memory full of NaN."""

import pytest
import torch
import torch.nn.functional as F
from attention import FP32_ERROR, assert_right, assert_two_passes, attention, backward, check_gradients, compiled, error, gradients
from tensors import BF16, CAUSAL, FP16, FP32, FULL, columns, in_eighths, normal, qkv
from torch.utils.checkpoint import checkpoint

from dash_inductor import decisions, enabled
from dash_inductor.emulation import emulate

pytestmark = pytest.mark.usefixtures("rewriting")


SHAPES = [
    # template, dtype, causal, and batch, heads, kv heads, S_q, S_k, D of each case
    ("auto", FP32, False, (2, 2, 2, 64, 64, 16), (1, 1, 1, 53, 130, 40), (1, 1, 1, 130, 53, 64), (1, 1, 1, 1, 40, 256)),
    ("auto", FP32, False, (2, 3, 3, 1, 1, 16), (1, 2, 2, 1, 70, 16), (1, 2, 2, 70, 1, 16)),
    ("auto", FP32, True, (1, 2, 2, 100, 100, 24), (1, 1, 1, 130, 130, 96), (1, 1, 1, 64, 64, 128), (1, 1, 1, 53, 53, 19)),
    ("auto", FP32, True, (1, 6, 2, 70, 70, 16), (1, 1, 1, 70, 70, 192), (1, 2, 2, 53, 53, 8)),
    ("auto", BF16, False, (1, 1, 1, 100, 53, 24), (1, 1, 1, 33, 64, 192)),
    ("auto", BF16, True, (1, 2, 2, 130, 130, 64), (1, 1, 1, 53, 53, 128), (2, 3, 3, 1, 1, 16)),
    ("auto", BF16, True, (1, 6, 2, 70, 70, 16), (1, 1, 1, 64, 64, 256)),
    ("auto", FP16, False, (1, 1, 1, 53, 100, 96), (1, 1, 1, 64, 64, 128)),
    ("auto", FP16, True, (2, 1, 1, 100, 100, 16)),
    ("two_pass", FP32, False, (2, 2, 2, 64, 64, 16), (1, 1, 1, 53, 130, 40), (1, 1, 1, 130, 53, 64), (1, 2, 2, 70, 1, 16)),
    ("two_pass", FP32, True, (1, 2, 2, 130, 130, 24), (2, 3, 3, 1, 1, 16)),
    ("two_pass", BF16, False, (1, 2, 2, 1, 70, 16), (1, 1, 1, 40, 70, 1)),
    ("two_pass", BF16, True, (1, 1, 1, 70, 70, 96)),
    ("two_pass", FP16, True, (1, 1, 1, 64, 64, 128)),
]


@pytest.mark.parametrize(("template", "dtype", "causal", "sizes"), [(*row[:3], sizes) for row in SHAPES for sizes in row[3:]])
def test_shapes(template, dtype, causal, sizes):
    batch, heads, kv_heads, q_len, kv_len, head_dim = sizes
    *inputs, grad_out = map(in_eighths, qkv(batch, heads, q_len, kv_len, head_dim, kv_heads=kv_heads, dtype=dtype))
    with enabled(template=template):
        check_gradients(attention(causal=causal, gqa=heads != kv_heads), inputs, grad_out, seed=q_len)
    if template == "two_pass" or head_dim > 128:
        assert_two_passes()


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
    key, value = (x.repeat_interleave(heads // kv_heads, 1) for x in inputs[1:])
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(inputs[0], key, value, 0.0, causal)
    args = [grad_out, *inputs, out, lse.float()]
    with emulate():
        actual = compiled(backward(CAUSAL if causal else FULL))(*(columns(args) if transposed else args))
    assert_right(actual, attention(causal=causal, gqa=True), inputs, grad_out)


@pytest.mark.parametrize(
    ("template", "dtype", "causal", "dims"),
    [
        ("one_pass", FP32, True, (40, 24)),
        ("one_pass", BF16, False, (64, 128)),
        ("two_pass", FP32, False, (8, 40)),
        ("two_pass", BF16, True, (192, 128)),
    ],
)
def test_values_of_another_head_dim(template, dtype, causal, dims):
    """By the op, against float64 alone: the CPU's SDPA takes the math path, which is in fp32 throughout."""
    query, key, value, grad_out = qkv(2, 4, 53, 53 if causal else 70, dims[0], kv_heads=2, dtype=dtype, value_dim=dims[1])
    scores = query.double() @ key.double().repeat_interleave(2, 1).mT / dims[0] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(53, 53).triu(1).bool(), -torch.inf)
    out = scores.softmax(-1) @ value.double().repeat_interleave(2, 1)
    args = [grad_out, query, key, value, out.to(dtype), scores.logsumexp(-1).float()]
    inputs = [x.double() for x in (query, key, value)]
    expected = gradients(attention(causal=causal, gqa=True), inputs, grad_out.double())
    with enabled(template=template), emulate(seed=3):
        actual = compiled(backward(CAUSAL if causal else FULL))(*args)
    assert decisions()[-1].head_dim == f"{dims[0]}/{dims[1]}"
    assert max(error(a, e) for a, e in zip(actual, expected, strict=True)) < {FP32: FP32_ERROR, BF16: 1e-2}[dtype]


# How users lay out queries, keys and values: shapes of buffers, and attention's arguments made from them.
LAYOUTS = {
    "[B, S, H, D], as a linear layer leaves it": ([(2, 53, 2, 16)] * 3, lambda *buffers: (x.transpose(1, 2) for x in buffers)),
    "[B, S, 3, H, D], as one linear layer leaves all three": ([(2, 53, 3, 2, 16)], lambda x: x.permute(2, 0, 3, 1, 4).unbind(0)),
    "rows 21 elements apart, the first not aligned": (
        [(1, 2, 53, 21)] * 3,
        lambda x, y, z: (x[..., 3:19], y[..., 1:17], z[..., 5:]),
    ),
    "keys and values of one batch element for all": (
        [(3, 1, 40, 16), (1, 1, 40, 16), (1, 1, 40, 16)],
        lambda x, y, z: (x, y.expand(3, -1, -1, -1), z.expand(3, -1, -1, -1)),
    ),
    "one head of keys and values for all, one query for all batch elements": (
        [(1, 3, 40, 16), (2, 1, 40, 16), (2, 1, 40, 16)],
        lambda x, y, z: (x.expand(2, -1, -1, -1), y.expand(-1, 3, -1, -1), z.expand(-1, 3, -1, -1)),
    ),
    "one row of everything for the whole sequence": (
        [(2, 1, 1, 16), (2, 1, 1, 16), (2, 1, 40, 16)],
        lambda x, y, z: (x.expand(-1, -1, 40, -1), y.expand(-1, -1, 40, -1), z),
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [False, True])
def test_layouts(layout, causal):
    shapes, arguments_of = LAYOUTS[layout]

    def attend(*buffers):
        return F.scaled_dot_product_attention(*arguments_of(*buffers), is_causal=causal)

    buffers = [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    check_gradients(attend, buffers, normal(*attend(*buffers).shape, seed=9))


# What becomes of attention's output decides how its gradient is laid out.
USES = {
    "stride 0 everywhere": lambda out: out.sum(),
    "stride 0 over heads": lambda out: out.sum(1),
    "[B, S, H * D], as the next linear layer takes it": lambda out: out.transpose(1, 2).flatten(2),
    "the last stride is not 1": lambda out: out.mT,
    "rows of an odd pitch from an odd element on": lambda out: torch.cat([out[..., :3], out, out[..., :2]], -1),
}


@pytest.mark.parametrize("use", USES)
def test_layouts_of_grad_out(use):
    def attend(query, key, value):
        return USES[use](F.scaled_dot_product_attention(query, key, value, is_causal=True))

    *inputs, _ = qkv(2, 2, 53, 53, 24)
    check_gradients(attend, inputs, normal(*attend(*inputs).shape, seed=9))


def written_by_hand(query, key, value):
    """Inductor's own patterns turn it into SDPA before the pass runs."""
    return torch.softmax(query @ key.transpose(-2, -1) * 0.25, dim=-1) @ value


def checkpointed(query, key, value):
    def block(x):
        return x + F.scaled_dot_product_attention(x, key, value, is_causal=True)

    return checkpoint(block, checkpoint(block, query, use_reentrant=False), use_reentrant=False)


@pytest.mark.parametrize(
    ("attend", "attentions"), [(attention(causal=True, scale=0.2), 1), (written_by_hand, 1), (checkpointed, 2)]
)
def test_functions_of_the_user(attend, attentions):
    *inputs, grad_out = qkv(2, 2, 53, 53, 16)
    check_gradients(attend, inputs, grad_out, attentions=attentions)


@pytest.mark.parametrize(("template", "causal"), [("auto", False), ("auto", True), ("two_pass", False)])
def test_far_negative_logits(template, causal):
    """Logits of about -256: exp(-lse) overflows, and inf * 0 at the keys past the end would be NaN in dq.

    Logits this large have rounding errors of 2**-16, in whatever form they are computed; in eighths their sums have none, in
    whatever order a CPU adds them up.
    """
    query, key, value, grad_out = qkv(1, 2, 53, 53, 16)
    query, key = in_eighths(query), in_eighths(key)
    query[..., 0], key[..., 0] = 16, -16
    function = attention(causal=causal, scale=1.0)
    with enabled(template=template), emulate():
        actual = gradients(compiled(function), [query, key, value], grad_out)
    assert (decisions()[-1].family == "two_pass") == (template == "two_pass")
    reference = gradients(function, [query.double(), key.double(), value.double()], grad_out.double())
    assert max(error(a, r) for a, r in zip(actual, reference, strict=True)) < 16 * 2**-16
