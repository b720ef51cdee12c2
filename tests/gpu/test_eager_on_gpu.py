"""Eager training on a real GPU: the registry's implementation against stock, launch after launch."""

import pytest
import test_on_gpu as on_gpu
import torch
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, restore_flash_attention_impl, sdpa_kernel

import dash_inductor
from dash_inductor.hooks import install


@pytest.mark.parametrize("causal", [False, True])
def test_eager_training(causal):
    """Right gradients, the same bits every time, and stock's bits again when it is over."""
    install.offer_eager()
    leaves, grad_out = on_gpu.inputs(2, 8, 2, 1000, 1000, 128)

    def launch():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return on_gpu.gradients(on_gpu.attention(causal), leaves, grad_out)

    stock = launch()
    activate_flash_attention_impl("DASH")
    try:
        on_gpu.assert_same_bits(launch)
        actual = launch()
    finally:
        restore_flash_attention_impl()
    assert torch._dynamo.utils.counters["inductor"]["dash_rewritten"] == 1
    assert [x.stride() for x in actual] == [x.stride() for x in stock]
    assert dash_inductor.decisions()[-1].rewritten
    on_gpu.assert_equal(launch(), stock)
    on_gpu.assert_as_good_as_stock(causal, leaves, grad_out, actual)
