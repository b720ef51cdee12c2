"""The Gluon kernel where queries are cut into segments, with dK and dV of their own, and where keys are cut into slices, or heads
into turns, each with a launch and bits of its own: executed, and in bits what is not cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _cp_custom_ops  # noqa: F401 (registers its ops)
from torch.testing._internal.distributed.fake_pg import FakeStore

from dash_inductor.codegen.flex import FlexAttention
from dash_inductor.problem import most_bits, most_dropout_bits

from . import cases
from .cases import Case, Prepared, same_bits
from .test_execute import BY_GLUON, right_in_one_order

SEGMENTS = 3
IN_SEGMENTS: dict[str, Any] = {"gathered": True, "settings": {"segment": 128}}
WHOLE: dict[str, Any] = {"settings": BY_GLUON | {"guarantee": "batch"}}  # chains too
CUT = {
    "64": Case("h100", 384, 384, kv_heads=1, mask_mod="documents"),
    "96": Case("h100", 384, 384, heads=1, head_dim=96, mask_mod="window", score_mod="alibi", batch=2),
    "128": Case("h100", 384, 384, heads=1, head_dim=128, mask_mod="causal", dtype="fp16"),
    "256": Case("h100", 384, 384, heads=1, head_dim=256, mask_mod="documents"),
}
SLICED = {
    "segments": replace(CUT["64"], **IN_SEGMENTS),
    "ragged": Case("h100", 300, 300, heads=1, head_dim=128, mask_mod="documents", **WHOLE),
    "varlen of lengths that are symbols": Case("h100", 300, 300, mask="causal", attention="varlen", dynamic=True, **WHOLE),
    "masks of heads": Case("h100", 200, 300, heads=4, kv_heads=2, attention="head-mask", **WHOLE),
    "256": Case("h100", 300, 300, heads=1, head_dim=256, mask_mod="causal", score_mod="alibi", **WHOLE),
}
IN_ORDER: dict[str, Any] = {"dropout": 0.3, "settings": BY_GLUON | {"schedule": "descending"}}
TURNS = {
    "kv heads": (4, Case("h100", 200, 260, batch=2, heads=4, kv_heads=2, head_dim=128, dtype="fp16", **IN_ORDER)),
    "batch elements": (2, Case("h100", 261, 261, batch=4, heads=1, mask="causal", attention="efficient", **IN_ORDER)),
    "chained": (2, Case("h100", 200, 200, batch=2, head_dim=256, **IN_ORDER | {"settings": BY_GLUON | {"launch": "chained"}})),
    "one mask": (3, Case("h100", 300, 300, heads=3, attention="masked", dropout=0.3, settings=BY_GLUON)),
}


def marked(names: Any, quick: str) -> list[Any]:
    return [pytest.param(x, marks=pytest.mark.quick if x == quick else pytest.mark.nightly) for x in names]


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", marked(CUT, "64"))
def test_segments_are_those_of_each_by_itself(name: str) -> None:
    """The other segments' gradients of the output are zeros, which change no sum."""
    whole, cut = (Prepared(replace(CUT[name], **options)) for options in (WHOLE, IN_SEGMENTS))
    (decision,) = cut.generated.decisions
    assert (decision.kernel, decision.segments) == ("gluon", SEGMENTS)
    right_in_one_order(cut)
    for segment in range(SEGMENTS):
        one, other = (gradients_of(case, segment) for case in (whole, cut))
        assert all(one[name].any() and torch.equal(one[name], other[name]) for name in ("dq", "dk", "dv"))


def gradients_of(case: Prepared, segment: int) -> dict[str, Tensor]:
    grad_out = case.inputs["grad_out"]
    kept, rows = torch.zeros_like(grad_out), slice(segment * 128, (segment + 1) * 128)
    kept[:, :, rows] = grad_out[:, :, rows]
    case.inputs["grad_out"] = kept
    gradients = case.run(seed=segment, check=False).gradients
    case.inputs["grad_out"] = grad_out
    return gradients


@pytest.mark.parametrize(
    ("mask", "kernel"),
    [
        ("full", "triton"),
        pytest.param("full", "gluon", marks=pytest.mark.nightly),
        pytest.param("causal", "triton", marks=pytest.mark.nightly),
    ],
)
def test_sdpa_in_segments(mask: str, kernel: str) -> None:
    """A mask in blocks that hides nothing, and one of which the graph has no tensor."""
    made = Prepared(Case("h100", 256, 256, heads=1, mask=mask, gathered=True, settings={"segment": 128, "kernel": kernel}))
    (decision,) = made.generated.decisions
    assert (decision.kernel, decision.segments, decision.mask) == (kernel, 2, "block_mask")
    right_in_one_order(made)


@pytest.mark.nightly
def test_masks_of_heads_in_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Query heads that share keys and have masks of their own add up dK and dV in memory: of each segment apart."""
    case = Case("h100", 384, 384, heads=4, kv_heads=2, mask_mod="documents", **IN_SEGMENTS)
    lists = cases._block_lists
    monkeypatch.setattr(cases, "FlexAttention", partial(FlexAttention, mask_heads=4))
    monkeypatch.setattr(cases, "_block_lists", lambda *of: tuple(x.expand(1, 4, *x.shape[2:]).contiguous() for x in lists(*of)))
    made = Prepared(case)
    assert "sdpa_backward_gluon" in made.generated.source
    right_in_one_order(made)


def launches(case: Prepared) -> int:
    return case.generated.source.count("sdpa_backward_gluon.default(")


@pytest.mark.parametrize("name", marked(SLICED, "ragged"))
def test_slices_have_the_bits_of_one_launch(name: str) -> None:
    """Each launch adds to the dQ of those of later keys."""
    case = SLICED[name]
    whole = Prepared(case)
    token = most_bits.set(256 * 256)
    try:
        sliced = Prepared(case)
    finally:
        most_bits.reset(token)
    assert launches(whole) == 1 and launches(sliced) > 1
    right_in_one_order(sliced)
    assert same_bits([made.run(check=False) for made in (whole, sliced)])


@pytest.mark.parametrize("name", marked(TURNS, "kv heads"))
def test_turns_have_the_bits_of_one_launch(name: str) -> None:
    count, case = TURNS[name]
    whole = Prepared(case)
    of_head = 128**2 * -(-case.q_len // 128) * -(-case.kv_len // 128)
    token = most_dropout_bits.set(case.batch * case.heads // count * of_head)
    try:
        in_turns = Prepared(case)
    finally:
        most_dropout_bits.reset(token)
    assert [launches(made) for made in (whole, in_turns)] == [1, count]
    assert [made.generated.decisions[0].turns for made in (whole, in_turns)] == [None, count]
    right_in_one_order(in_turns)
    assert same_bits([made.run(check=False) for made in (whole, in_turns)])
