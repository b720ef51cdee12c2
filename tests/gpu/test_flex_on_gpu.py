"""FlexAttention on a real GPU: right gradients, and the same bits launch after launch."""

import pytest
import test_on_gpu as on_gpu
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

import dash_inductor

HEADS, KV_HEADS = 8, 4
WINDOW, CAP = 200, 2.0
ERRORS = {torch.bfloat16: 2e-2, torch.float32: 2e-6}  # of the largest element; fp32 where the GPU is emulated
KINDS = ("no mask, soft-cap", "causal", "window, soft-cap", "documents", "documents, ALiBi", "window by head")


def functions(kind, length):
    """mask_mod and score_mod, None where there is none."""
    ids = torch.arange(length, device=on_gpu.DEVICE) * 5 // length  # five documents
    slopes = torch.exp2(-torch.arange(1.0, HEADS + 1, device=on_gpu.DEVICE))
    masks = {
        "causal": lambda b, h, m, n: m >= n,
        "window": lambda b, h, m, n: (m >= n) & (m - n < WINDOW),
        "documents": lambda b, h, m, n: (m >= n) & (ids[m] == ids[n]),
        "window by head": lambda b, h, m, n: (m >= n) & (m - n < 32 * (h + 1)),
    }
    mods = {"soft-cap": lambda score, b, h, m, n: CAP * torch.tanh(score / CAP)}
    mods["ALiBi"] = lambda score, b, h, m, n: score + slopes[h] * (n - m)
    mask, _, mod = kind.partition(", ")
    return masks.get(mask), mods.get(mod)


def reference(leaves, grad_out, mask_mod, score_mod):
    """dq, dk, dv in float64, of scores written out."""
    query, key, value = wide = [x.detach().double().requires_grad_() for x in leaves]
    batch, heads, length, head_dim = query.shape
    key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT * head_dim**-0.5
    if score_mod is not None:
        places = (torch.arange(size, device=query.device) for size in scores.shape)
        scores = score_mod(scores, *(x.view([-1 if dim == axis else 1 for dim in range(4)]) for axis, x in enumerate(places)))
    if mask_mod is not None:
        scores = scores.where(create_mask(mask_mod, batch, heads, length, length, device=on_gpu.DEVICE), -torch.inf)
    return torch.autograd.grad(scores.softmax(-1) @ value, wide, grad_out.double())


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_flex_attention(kind, head_dim):
    """Under `device`, where few chains do not stay with stock."""
    leaves, grad_out = on_gpu.inputs(2, HEADS, KV_HEADS, 1000, 1000, head_dim)
    length = leaves[0].shape[2]
    mask_mod, score_mod = functions(kind, length)
    heads = HEADS if kind.endswith("by head") else None
    blocks = mask_mod and create_block_mask(mask_mod, None, heads, length, length, device=on_gpu.DEVICE)

    def attend(query, key, value):
        return flex_attention(query, key, value, score_mod=score_mod, block_mask=blocks, enable_gqa=True)

    with dash_inductor.enabled(guarantee="device"):
        function = torch.compile(attend, fullgraph=True, dynamic=False)
        on_gpu.assert_same_bits(lambda: on_gpu.gradients(function, leaves, grad_out))
        actual = on_gpu.gradients(function, leaves, grad_out)
    assert dash_inductor.decisions()[-1].mask == ("block_mask" if mask_mod else "full")
    assert torch._dynamo.utils.counters["inductor"]["dash_rewritten"] == 1
    for name, grad, right in zip(on_gpu.GRADIENTS, actual, reference(leaves, grad_out, mask_mod, score_mod), strict=True):
        assert ((grad.double() - right).abs().max() / right.abs().max()).item() < ERRORS[grad.dtype], name
