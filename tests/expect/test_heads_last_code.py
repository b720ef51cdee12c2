"""The ops below SDPA's on an H100 that is not there: dense tensors [B, S, H, D] are rewritten as SDPA's are, on views."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
from stock_ops import causal, dense_efficient, dense_flash, efficient, flash, jagged, tensors
from torch import Tensor

import dash_inductor
from benchmarks.machine_code.generate import Generated, generate
from dash_inductor.codegen.mode import deterministic

EFFICIENT, FLASH = (f"aten._{name}_attention_backward.default" for name in ("efficient", "flash"))
UNEQUAL = {"q_len": 64, "kv_len": 65}


def code(attention: Any, **sizes: Any) -> Generated:
    with deterministic(), dash_inductor.enabled():
        return generate(attention, partial(tensors, **sizes), "h100")


@pytest.mark.parametrize(
    ("attention", "sizes", "mask", "reason"),
    [
        (dense_efficient, UNEQUAL, "full", None),
        (partial(dense_efficient, mask_type=1), UNEQUAL, "block_mask", None),
        (partial(dense_efficient, mask_type=2), {}, "causal", None),
        (partial(dense_efficient, mask_type=2), UNEQUAL, "causal", "a causal mask that is aligned to the last query and key"),
        (dense_flash, UNEQUAL, "full", None),
        (partial(dense_flash, is_causal=True), {"head_dim": 192}, "causal", None),
        (partial(dense_flash, window_size_left=-1, window_size_right=-1), {}, "full", None),
        (partial(dense_flash, window_size_left=8, window_size_right=0), {}, "full", "a window of the op below SDPA's"),
        (jagged, {}, "varlen", "jagged tensors are not rewritten"),
    ],
)
def test_what_becomes_of_it(attention: Any, sizes: dict[str, int], mask: str, reason: str | None) -> None:
    generated = code(attention, **sizes)
    (decision,) = generated.decisions
    op = EFFICIENT if "efficient" in str(attention) else FLASH
    assert (decision.op, decision.mask, decision.rewritten) == (op, mask, reason is None)
    assert (reason or "") in (decision.reason or "") and bool(decision.remedy) == bool(reason)
    lengths = "64x65" if sizes is UNEQUAL else "64"
    assert decision.shape == f"B=1 H=2 S={lengths} D={sizes.get('head_dim', 64)} bf16"
    assert generated.source.count(f"torch.ops.{op}(") == (0 if decision.rewritten else 1)


@pytest.mark.parametrize(
    ("dense", "of_sdpa"),
    [(dense_efficient, efficient), (partial(dense_flash, is_causal=True), causal), (dense_flash, flash)],
)
def test_the_kernels_are_those_of_sdpa(dense: Any, of_sdpa: Any) -> None:
    """Both take the same tensors; gradients are written [B, S, H, D] where they lie, without a copy."""

    def last(*inputs: Tensor) -> list[Tensor]:
        return [x.permute(0, 2, 1, 3) for x in of_sdpa(*inputs)]

    found, expected = (list(map(_plain, code(attention, q_len=256, kv_len=256).kernels.values())) for attention in (dense, last))
    assert found == expected and len(found) == 2  # two passes


def _plain(kernel: str) -> str:
    """Without what names the kernel, and its inputs."""
    return re.sub(r"[0-9a-f]{64}|c[a-z0-9]{51}|arg\d+_1", "", kernel)
