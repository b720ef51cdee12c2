"""What a warm FX graph cache may answer of a FlexAttention's backward: nothing once it would be lowered as something else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
from torch import Tensor
from torch._inductor.codecache import compiled_fx_graph_hash
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.machine_code import flex
from dash_inductor import enabled
from dash_inductor.codegen.fake_gpu import fake_gpu
from dash_inductor.codegen.flex import FlexAttention
from dash_inductor.codegen.mods import MASK_MODS
from dash_inductor.rewrite import flex as rewrite


def key(settings: dict[str, Any] | None = None, **sizes: Any) -> str:
    """Under which the backward of a FlexAttention, no mask unless `sizes` has one, is looked up."""

    def hashed(backward: Callable[..., Any], arguments: Callable[[], Sequence[Tensor]], device: str) -> str:
        with fake_gpu(device), FakeTensorMode(allow_non_fake_inputs=True):
            inputs = list(arguments())
            module = make_fx(backward)(*inputs)
            joint_graph_passes(module)
            return compiled_fx_graph_hash(module, inputs, {}, ())[0]

    all_sizes = {"length": 4096, "batch": 2, "heads": 16, "kv_heads": 16, "head_dim": 64, "mask_mod": "none"} | sizes
    with enabled(**(settings or {})), mock.patch("benchmarks.machine_code.flex.generate", hashed):
        return flex.flex_backward("h100", FlexAttention(**all_sizes))


SETTINGS: list[dict[str, Any]] = [
    {"guarantee": "device"},
    {"guarantee": "batch"},
    {"schedule": "descending"},
    {"launch": "chained"},
    {"template": "one_pass"},
    {"template": "two_pass"},
    {"sm_reserve": 1},
]


@pytest.mark.parametrize("mask_mod", ["none", "documents"])
def test_settings_that_decide_are_in_the_key(mask_mod):
    keys = [key(settings, mask_mod=mask_mod) for settings in ({}, *SETTINGS)]
    assert len(set(keys)) == len(keys)
    assert key(mask_mod=mask_mod) == key({"seed": 4}, mask_mod=mask_mod) == keys[0]


def test_a_proven_mask_is_in_the_key(monkeypatch):
    """The backward is the same graph where the joint graph does not show what its lists hold."""
    keys = set()
    for proven in ("full", "causal", None):
        monkeypatch.setattr(rewrite, "mask_of", lambda mask, mask_mod, proven=proven: proven)
        keys.add(key())
    assert len(keys) == 3


def test_functions_and_blocks_are_in_the_key():
    sizes = [{"mask_mod": mask_mod} for mask_mod in MASK_MODS]
    keys = [key(**each) for each in (*sizes, sizes[-1] | {"block": 256}, sizes[-1] | {"mask_heads": 16})]
    assert len(set(keys)) == len(keys)
