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

from benchmarks.reach import kernels, measure, page, report
from benchmarks.reach.calls import Calls, counted
from benchmarks.reach.model import Call, Model
from dash_inductor import enabled
from dash_inductor.config import TRITON, Config
from dash_inductor.devices.target import Target
from dash_inductor.problem import Problem
from dash_inductor.resolve import Resolution
from dash_inductor.templates.tiles import two_pass_tile

pytestmark = pytest.mark.nightly
SIZES = ("batch", "heads", "kv_heads", "q_len", "kv_len")


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
FIGURES |= {"kernels": {"gluon one_pass": 2}, "not_gluon": {}}
WHOLE = {"library": "transformers", "model": "A [sdpa]", "case": "plain", "calls": 2, "rewritten": 2, **FIGURES}
REASONS = {"dropout_p=0.1: its bits; and more": 1, "it is no call of attention (2)": 2}
IN_PART = {
    **{**WHOLE, "model": "A [eager]", "better": "A [sdpa]", "calls": 5, "rewritten": 1, "declined": 3, "not_seen": 1},
    **{"reasons": REASONS, "remedies": {"dropout_p=0.1: its bits; and more": "set it to 0", "it is no call of attention (2)": ""}},
    **{"written_out": {"model.py:12": 2}, "kernels": {"triton two_pass": 1}, "not_gluon": {report.BY_PRICE: 1}},
}
SHORT = {**WHOLE, "library": "timm", "model": "C", "kernels": {"triton two_pass": 2}, "not_gluon": {report.FEW_CHAINS: 2}}
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


def test_the_gluon_kernels_part(rows: list[dict[str, Any]], tmp_path: Any) -> None:
    """Of few chains it is another kernel's for that alone; a line has no kernel whose calls are another library's."""
    others = [SHORT, {**SHORT, "library": "none", "rewritten": 0, "kernels": {}, "not_gluon": {}}]
    report.keep([*rows, *({**row, "better": "", "version": "1"} for row in others)], tmp_path / "more.csv")
    lines = {line["library"]: line for line in report.by_kernel(report.read(tmp_path / "more.csv"))}
    assert [*lines] == ["transformers", "timm", "all"]
    names = ("rewritten", "gluon one pass", "triton two pass", report.MANY_CHAINS)
    assert [lines["transformers"][name] for name in names] == ["3", "2", "1", "2 (67 %)"]
    assert [lines["timm"][name] for name in names] == ["2", "0", "2", "2 (100 %)"]
    assert [lines["all"][name] for name in names] == ["5", "2", "3", "4 (80 %)"]
    assert [line["reason"] for line in report.not_gluon(rows)] == [report.BY_PRICE]


class FewAndMany(nn.Module):
    """Attention of one batch element, and of all."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 64 * 512)

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(x).unflatten(-1, (512, 64))  # [batch, 8, 512, 64]
        outs = (F.scaled_dot_product_attention(z, z, z) for z in (y[:1], y))
        return sum(out.sum() for out in outs)


@pytest.mark.parametrize(
    ("kernel", "kernels", "why"),
    [
        ("auto", {"gluon one_pass": 1, "triton two_pass": 1}, {report.FEW_CHAINS: 1}),
        ("triton", {"triton one_pass": 1, "triton two_pass": 1}, {"kernel='triton' asks for another": 2}),
    ],
)
def test_kernels_of_rewritten_calls(kernel: str, kernels: dict[str, int], why: dict[str, int]) -> None:
    def make(case: str) -> Call:
        return Call(FewAndMany(), (torch.randn(64, 8, 8),))

    asked = Model("torch.nn", "tiny", make, context=lambda: enabled(kernel=kernel))
    row = measure.measured(asked, "plain", 120)
    assert (row["kernels"], row["not_gluon"]) == (kernels, why)


UNTIMED = "gradient of a captured tensor unless kernel='gluon' asks for it: no GPU has timed both"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, report.BY_PRICE),
        ({"head_dim": 20}, "the Gluon kernel takes head dims of a multiple of 8, from 16 to 256, not 20"),
        ({"gluon_fails": "does not compile"}, "the Gluon kernel does not compile"),
        ({"trains_captures": True}, f"the Gluon kernel takes no {UNTIMED}"),
        ({"mask": "block_mask", "block_size": (64, 64)}, "BLOCK_SIZE (64, 64) is no multiple of the tile's 128 x 128"),
    ],
)
def test_why_it_is_not_the_gluon_kernel(monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], why: str) -> None:
    """The first reason that `resolve` finds; the price if there is no other."""
    monkeypatch.setattr(kernels, "kernel_for", lambda *_: TRITON)
    problem = Problem(**{"mask": "full", "head_dim": 64, "dtype": "bf16"} | dict.fromkeys(SIZES, 512) | changed)
    one = Resolution(problem, Config(), Target("h100", 90, 132), None, two_pass_tile(90, "bf16", 64))
    sizes = dict.fromkeys(SIZES, 512) | {"dtype": "bf16", "mask": problem.mask, "head_dim": 64}
    assert kernels.why_no_gluon(kernels.Resolved("op", "h100", **sizes, kernel=TRITON, resolution=one)) == why


def test_the_part_of_recipes(rows: list[dict[str, Any]]) -> None:
    lines = page.of_recipes(rows, "torch 2.13.0").splitlines()
    assert lines[-3:] == [
        "| A [sdpa] | 2 | 2 | 2 |  |",
        "| A [eager] | 5 | 1 | 0 | 1: dropout_p=0.1: its bits; and more. Remedy: set it to 0; 2: it is no call of attention (2). "
        "Remedy: none; 1 not seen |",
        "| B |  |  |  | not installed |",
    ]
