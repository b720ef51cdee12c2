"""An attention sink by SDPA and a learnt mask, for a GPU: no gradient of the whole mask, and so the Gluon kernel by default."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dash_inductor import explain

LENGTH = 4096


class Sink(nn.Module):
    """Causal, with one more key of zeros, whose score is learnt."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.sink = nn.Parameter(torch.zeros(8, 1, 1))
        self.bias = nn.Parameter(torch.zeros(8, 1, 1)) if whole else None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (F.pad(x, (0, 0, 0, 1)) for x in (key, value))
        hidden = torch.full((LENGTH, LENGTH), -math.inf, device=query.device).triu(1).expand(8, -1, -1)
        hidden = hidden if self.bias is None else hidden + self.bias
        mask = torch.cat([hidden, self.sink.expand(-1, LENGTH, 1)], -1)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask.to(query.dtype))


@pytest.mark.parametrize(("whole", "kernel"), [(False, "gluon"), (True, "triton")])
def test_who_takes_it(whole: bool, kernel: str) -> None:
    tensors = [torch.empty(8, 8, LENGTH, 64, device="meta", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    (found,) = explain(Sink(whole), *tensors, device="h100")
    assert found.rewritten and found.decision.kernel == kernel
