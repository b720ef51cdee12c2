"""The stock ops of a GPU whose forwards nobody promises anything of: as the probe wants them, and trained through, rewritten."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
import test_on_gpu as on_gpu
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import dash_inductor
from dash_inductor.devices import target
from dash_inductor.rewrite import probe

BACKENDS = {"efficient": SDPBackend.EFFICIENT_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
NAME = "aten._scaled_dot_product_{}_attention_backward.default".format


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", probe.KINDS)
@pytest.mark.parametrize("op", probe.FORWARDS)
def test_probe(op, kind, dtype):
    assert target.is_there(torch.device(on_gpu.DEVICE))
    assert probe._probed(op, kind, dtype, on_gpu.DEVICE) is None


def only(backend: str) -> AbstractContextManager[None]:
    """SDPA takes this op alone."""
    return sdpa_kernel(BACKENDS[backend])


def attention(backend: str, causal: bool) -> Any:
    return lambda query, key, value: F.scaled_dot_product_attention(query, key, value, is_causal=causal)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    ("shape", "causal"),
    [
        ((2, 4, 4, 512, 512, 64), True),
        ((1, 4, 4, 1000, 1000, 128), True),
        ((1, 4, 4, 130, 300, 64), False),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_training(backend, shape, causal, dtype):
    """The same bits launch after launch, and as good as stock; strict mode leaves cuDNN out."""
    leaves, grad_out = on_gpu.inputs(*shape, dtype=dtype)
    torch.use_deterministic_algorithms(True, warn_only=True)
    with only(backend):
        function = torch.compile(attention(backend, causal), fullgraph=True, dynamic=False)
        on_gpu.assert_same_bits(lambda: on_gpu.gradients(function, leaves, grad_out), launches=10)
    entry = dash_inductor.decisions()[-1]
    assert (entry.op, entry.rewritten) == (NAME(backend), True)
    on_gpu.assert_as_good_as_stock(causal, leaves, grad_out, on_gpu.gradients(function, leaves, grad_out))
