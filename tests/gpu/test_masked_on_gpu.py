"""SDPA under a mask that the graph makes, on a real GPU: right gradients, and the same bits launch after launch."""

import pytest
import test_flex_on_gpu as flex
import test_on_gpu as on_gpu
import torch
import torch.nn.functional as F

import dash_inductor


def attend(query, key, value, padding):
    """Causal and padded, kv heads repeated, as transformers does."""
    position = torch.arange(query.shape[2], device=query.device)
    seen = (position <= position[:, None]) & padding[:, None, None].bool()
    batch, kv_heads, length, head_dim = key.shape
    copies = (batch, kv_heads, query.shape[1] // kv_heads, length, head_dim)
    key, value = (x[:, :, None].expand(copies).flatten(1, 2) for x in (key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=seen)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_padding(head_dim):
    """On the left of one batch element, where rows see no key, and on the right of another."""
    leaves, grad_out = on_gpu.inputs(2, flex.HEADS, flex.KV_HEADS, 1000, 1000, head_dim)
    length = leaves[0].shape[2]
    padding = torch.ones(2, length, dtype=torch.long, device=on_gpu.DEVICE)
    padding[0, : length // 3] = 0
    padding[1, length // 2 :] = 0
    grad_out[0, :, : length // 3] = 0  # what a loss makes of padded rows, which are NaN in the reference
    function = torch.compile(attend, fullgraph=True, dynamic=False)

    def gradients():
        return torch.autograd.grad(function(*leaves, padding), leaves, grad_out)

    with dash_inductor.enabled(guarantee="device"):  # under `run` few chains may stay with stock
        on_gpu.assert_same_bits(gradients)
        actual = gradients()
    (entry,) = dash_inductor.decisions()[-1:]
    assert (entry.rewritten, entry.mask, entry.kv_heads) == (True, "block_mask", flex.KV_HEADS)
    first = padding.argmax(1)

    def seen(b, h, m, n):  # rows that see no key see themselves, with a gradient of zero
        return ((m >= n) & (padding[b, n] > 0)) | ((m == n) & (m < first[b]))

    expected = flex.reference(leaves, grad_out, seen, None)
    for name, grad, right in zip(on_gpu.GRADIENTS, actual, expected, strict=True):
        assert ((grad.double() - right).abs().max() / right.abs().max()).item() < flex.ERRORS[grad.dtype], name
