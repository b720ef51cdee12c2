"""The emulated half of `python -m benchmarks.harm`: an attention rewritten rightly passes; one rewritten wrongly differs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

import dash_inductor
from benchmarks.harm.case import Case
from benchmarks.harm.compare import DIFFERS, REWRITTEN, verdicts
from benchmarks.harm.measure import outcomes
from benchmarks.harm.settings import SETTINGS
from dash_inductor.hooks import install
from dash_inductor.hooks.joint_pass import PASS


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


CASE = Case("causal", lambda: (causal, tuple(torch.randn(1, 2, 20, 16, requires_grad=True) for _ in range(3))))


@pytest.fixture(autouse=True)
def switched_off(deterministic: None) -> Iterator[None]:
    was_enabled = install.is_enabled()
    dash_inductor.disable()
    with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        yield
    if was_enabled:
        install.want()


def emulated(*, installed: bool) -> list[dict[str, Any]]:
    with dash_inductor.enabled() if installed else contextlib.nullcontext():
        return list(outcomes([CASE], SETTINGS[f"emulated, {'with' if installed else 'without'}"]))


def test_rewritten_rightly_and_wrongly(monkeypatch):
    without = emulated(installed=False)
    assert verdicts(without, emulated(installed=True)) == {"causal": REWRITTEN}
    stock = PASS.apply

    def apply(gm: Any) -> int:
        count = stock(gm)
        graph = gm if isinstance(gm, fx.Graph) else gm.graph
        for node in graph.find_nodes(op="call_function", target=torch.ops.dash.sdpa_backward.default):
            node.update_arg(0, node.args[1])
        return count

    monkeypatch.setattr(PASS, "apply", apply)
    assert verdicts(without, emulated(installed=True)) == {"causal": DIFFERS}
