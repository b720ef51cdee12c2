"""dK and dV of segments of the queries by the Gluon kernel, executed: right, and in bits those of each segment by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.experimental._context_parallel import _cp_custom_ops  # noqa: F401 (registers its ops)
from torch.testing._internal.distributed.fake_pg import FakeStore

from dash_inductor.codegen.flex import FlexAttention

from . import cases
from .cases import Case, Prepared
from .test_execute import BY_GLUON, right_in_one_order

SEGMENTS = 3
CUT = {
    64: Case("h100", 384, 384, kv_heads=1, mask_mod="documents"),
    96: Case("h100", 384, 384, heads=1, head_dim=96, mask_mod="window", score_mod="alibi", batch=2),
    128: Case("h100", 384, 384, heads=1, head_dim=128, mask_mod="causal", dtype="fp16"),
    256: Case("h100", 384, 384, heads=1, head_dim=256, mask_mod="documents"),
}


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("head_dim", [pytest.param(x, marks=pytest.mark.quick if x == 64 else pytest.mark.nightly) for x in CUT])
def test_segments_are_those_of_each_by_itself(head_dim: int) -> None:
    """The other segments' gradients of the output are zeros, which change no sum."""
    whole = Prepared(replace(CUT[head_dim], settings=BY_GLUON | {"guarantee": "batch"}))  # whose chains are whole too
    cut = Prepared(replace(CUT[head_dim], **in_segments()))
    (decision,) = cut.generated.decisions
    assert (decision.kernel, decision.segments) == ("gluon", SEGMENTS)
    right_in_one_order(cut)
    for segment in range(SEGMENTS):
        results = []
        for case in (cut, whole):
            grad_out = case.inputs["grad_out"]
            kept = torch.zeros_like(grad_out)
            rows = slice(segment * 128, (segment + 1) * 128)
            kept[:, :, rows] = grad_out[:, :, rows]
            case.inputs["grad_out"] = kept
            results.append(case.run(seed=segment, check=False).gradients)
            case.inputs["grad_out"] = grad_out
        assert all(results[0][name].any() and torch.equal(results[0][name], results[1][name]) for name in ("dq", "dk", "dv"))


@pytest.mark.nightly
def test_masks_of_heads_in_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Query heads that share keys and have masks of their own add up dK and dV in memory: of each segment apart."""
    case = Case("h100", 384, 384, heads=4, kv_heads=2, mask_mod="documents", **in_segments())
    lists = cases._block_lists
    monkeypatch.setattr(cases, "FlexAttention", partial(FlexAttention, mask_heads=4))
    monkeypatch.setattr(cases, "_block_lists", lambda *of: tuple(x.expand(1, 4, *x.shape[2:]).contiguous() for x in lists(*of)))
    made = Prepared(case)
    assert "dash.sdpa_backward_gluon" in made.generated.source
    right_in_one_order(made)


def in_segments() -> dict[str, Any]:
    return {"gathered": True, "settings": {"segment": 128}}
