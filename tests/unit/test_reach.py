"""The measurement of models of many libraries: what is counted, what a row says, and the pages' parts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import flex_attention, varlen

from benchmarks.reach import measure, page, report
from benchmarks.reach.calls import Calls, counted
from benchmarks.reach.model import Call, Model

pytestmark = pytest.mark.nightly


class Attends(nn.Module):
    """Calls a function of query, key and value, [B, H, S, D], of which the query requires a gradient."""

    def __init__(self, attend: Callable[..., Any]) -> None:
        super().__init__()
        self.attend, self.project = attend, nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Any:
        return self.attend(self.project(x), x, x)


def calls_of(attend: Callable[..., Any], device: str = "meta", shape: tuple[int, ...] = (2, 2, 8, 16)) -> Calls:
    with torch.device(device):
        return counted(Call(Attends(attend), (torch.randn(shape),)))


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT, -1) @ v


@pytest.mark.parametrize(
    "attend",
    [
        F.scaled_dot_product_attention,
        lambda q, k, v: flex_attention.flex_attention(q, k, v, return_lse=True)[0],
        lambda q, k, v: varlen.varlen_attn(q[0, 0], k[0, 0], v[0, 0], None, None, 8, 8),
    ],
)
def test_calls_of_torch(attend: Callable[..., Any]) -> None:
    calls = calls_of(attend)
    assert (calls.of_torch, calls.count) == (1, 1)


def test_attention_by_hand_is_told_by_its_line() -> None:
    calls = calls_of(by_hand)
    (line,) = calls.written_out
    assert line == f"test_reach.py:{by_hand.__code__.co_firstlineno + 1}" and calls.count == 1


def model(make: Callable[[str], Call], library: str = "torch.nn", name: str = "tiny") -> Model:
    return Model(library, name, make)


def fails(case: str) -> Call:
    raise ValueError("no such size\nand more")


def hangs(case: str) -> Call:
    time.sleep(60)
    raise AssertionError


def dies(case: str) -> Call:
    os._exit(3)


@pytest.mark.parametrize(
    ("make", "limit", "failure"),
    [(fails, 60, "ValueError: no such size"), (hangs, 0.2, "took longer than 0.2 s"), (dies, 60, "its process ended with 3")],
)
def test_a_case_that_fails_is_a_row(make: Callable[[str], Call], limit: float, failure: str) -> None:
    row = measure.measured(model(make), "plain", limit)
    assert (row["failure"], report.key_of(row)) == (failure, ("torch.nn", "tiny", "plain"))


FIGURES = {"declined": 0, "not_seen": 0, "left_to_stock": 0, "third_party": 0, "reasons": {}, "remedies": {}, "written_out": {}}
WHOLE = {"library": "transformers", "model": "A [sdpa]", "case": "plain", "calls": 2, "rewritten": 2, **FIGURES}
REASONS = {"dropout_p=0.1: its bits; and more": 1, "it is no call of attention (2)": 2}
IN_PART = {
    **{**WHOLE, "model": "A [eager]", "better": "A [sdpa]", "calls": 5, "rewritten": 1, "declined": 3, "not_seen": 1},
    **{"reasons": REASONS, "remedies": {"dropout_p=0.1: its bits; and more": "set it to 0", "it is no call of attention (2)": ""}},
    "written_out": {"model.py:12": 2},
}
FAILED = {"library": "timm", "model": "B", "case": "plain", "failure": "not installed", "version": None}
ROWS = [{"better": "", "version": "5.0", "stopped": None, **row} for row in (WHOLE, IN_PART, FAILED)]


@pytest.fixture
def rows(tmp_path: Any) -> list[dict[str, Any]]:
    """Rows as the CSV has them."""
    file = tmp_path / "rows.csv"
    report.keep(ROWS, file)
    return report.read(file)


def test_the_csv_has_all_that_is_measured(rows: list[dict[str, Any]]) -> None:
    for row, measured in zip(rows, ROWS, strict=True):
        for name, value in measured.items():
            assert row[name] == ("" if value is None else value), name


def test_the_part_of_models(rows: list[dict[str, Any]]) -> None:
    text = page.of_models(rows, "torch 2.13.0")
    assert "| A [eager], plain | 1 of 5 | A [sdpa] | 2 of 2 |" in text
    assert "| B | plain: not installed |  |" in text


def test_the_part_of_recipes(rows: list[dict[str, Any]]) -> None:
    lines = page.of_recipes(rows, "torch 2.13.0").splitlines()
    assert lines[-3:] == [
        "| A [sdpa] | 2 | 2 |  |",
        "| A [eager] | 5 | 1 | 1: dropout_p=0.1: its bits; and more. Remedy: set it to 0; 2: it is no call of attention (2). "
        "Remedy: none; 1 not seen |",
        "| B |  |  | not installed |",
    ]
