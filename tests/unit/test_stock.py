"""What is told of stock backwards."""

from __future__ import annotations

import pytest

from dash_inductor.decision import Decision, stock_is_deterministic, stock_workspace_bytes
from dash_inductor.op import FLEX_BACKWARD
from dash_inductor.rewrite.math_path import OP as MATH_PATH
from dash_inductor.rewrite.stock_ops import CUDNN, EFFICIENT, FLASH, FLASH_CPU, VARLEN


def declined(op: object, device: str = "h100", stock_differs: bool = False, **others: object) -> Decision:
    given = {"batch": 1, "heads": 16, "kv_heads": 16, "q_len": 8000, "kv_len": 8000, "head_dim": 72, "mask": "full"} | others
    return Decision(str(op), device, "bf16", reason="", stock_differs=stock_differs, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("decision", "expected"),
    [
        (declined(FLASH), (True, False)),
        (declined(EFFICIENT), (True, False)),
        (declined(VARLEN), (True, False)),
        (declined(VARLEN, stock_differs=True), (False, False)),
        (declined(FLASH, left_to="FA4"), (True, True)),
        (declined(CUDNN), (False, False)),
        (declined(FLEX_BACKWARD), (True, True)),
        (declined(FLEX_BACKWARD, stock_differs=True), (False, False)),
        (declined(FLEX_BACKWARD, chosen_by_timing="forward"), (False, False)),
        (declined(FLASH_CPU, "cpu"), (True, True)),
        (declined(MATH_PATH), (None, None)),
    ],
    ids=lambda x: f"{x.op} {x.stock_differs}" if isinstance(x, Decision) else "",
)
def test_which_is_deterministic(decision, expected):
    """In strict mode, and under warn_only."""
    assert tuple(stock_is_deterministic(decision, warn_only=warn_only) for warn_only in (False, True)) == expected


def test_what_flash_attention_allocates():
    """dq in fp32 for each split, rounded up to 128 rows and 32 columns; a row each of fp32; in GQA a dk and dv per query head."""
    dq = 9 * 16 * 8064 * 96 * 4
    assert stock_workspace_bytes(declined(FLASH), sms=132) == dq + 16 * 8064 * 4
    assert stock_workspace_bytes(declined(FLASH, kv_heads=2), sms=132) == dq + 16 * 8064 * 4 + 2 * 16 * 8000 * 72 * 2


@pytest.mark.parametrize(
    "decision",
    [
        declined(CUDNN),
        declined(FLASH, q_len="s0"),
        declined(FLASH, mask="varlen"),
        declined(MATH_PATH),
        declined(FLASH, left_to="FA4"),
    ],
)
def test_what_is_not_known(decision):
    assert stock_workspace_bytes(decision, sms=132) is None
