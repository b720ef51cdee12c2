"""varlen_attn on a real GPU: right gradients, and the same bits launch after launch."""

import inspect
from itertools import accumulate

import pytest
import test_flex_on_gpu as flex
import test_on_gpu as on_gpu
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

import dash_inductor

LENGTHS = (700, 33, 250, 1, 1000)
WINDOWS = {"full": (-1, -1), "causal": (-1, 0), "window": (200, 0)}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", WINDOWS)
def test_varlen(kind, head_dim):
    """Of sequences packed into [T, H, D]."""
    total, (left, right) = sum(LENGTHS), WINDOWS[kind]
    knows_gqa = "enable_gqa" in inspect.signature(varlen_attn).parameters  # from torch 2.13 on
    heads, gqa = (flex.HEADS, {"enable_gqa": True}) if knows_gqa else (flex.KV_HEADS, {})
    leaves, grad_out = on_gpu.inputs(1, heads, flex.KV_HEADS, total, total, head_dim)
    offsets = torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32, device=on_gpu.DEVICE)
    ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).to(on_gpu.DEVICE)

    def attend(*tensors):
        packed = [x[0].transpose(0, 1) for x in tensors]
        longest = max(LENGTHS)
        out = varlen_attn(*packed, offsets, offsets, longest, longest, window_size=WINDOWS[kind], **gqa)
        return out.transpose(0, 1)[None]

    def visible(b, h, m, n):
        seen = ids[m] == ids[n]
        seen = seen & (n >= m - left) if left >= 0 else seen
        return seen & (n <= m + right) if right >= 0 else seen

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), dash_inductor.enabled(guarantee="device"):  # few chains stay with stock under run
        function = torch.compile(attend, fullgraph=True, dynamic=False)
        on_gpu.assert_same_bits(lambda: on_gpu.gradients(function, leaves, grad_out))
        actual = on_gpu.gradients(function, leaves, grad_out)
    assert dash_inductor.decisions()[-1].mask == "varlen"
    assert torch._dynamo.utils.counters["inductor"]["dash_rewritten"] == 1
    for name, grad, exact in zip(on_gpu.GRADIENTS, actual, flex.reference(leaves, grad_out, visible, None), strict=True):
        assert ((grad.double() - exact).abs().max() / exact.abs().max()).item() < flex.ERRORS[grad.dtype], name
