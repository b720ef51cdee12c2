"""Kinds of kernels that count as having run on a GPU's model: no more than results in the repository have."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dash_inductor.first_use import verdict
from dash_inductor.first_use.kind import Kind

ROOT = Path(__file__).parents[2]
RAN = json.loads((ROOT / "dash_inductor/first_use" / verdict.RAN).read_text())
RESULTS = ROOT / "benchmarks/results/h200"
# Of the cases in triton/kernels.jsonl, as the commit in its README has them: template, mask, dtype, head dim.
CASES = {
    **{f"one pass, {mask}, d = {d}": ("one_pass", mask, "bf16", d) for mask in ("full", "causal") for d in (64, 128)},
    "one pass, fp16": ("one_pass", "causal", "fp16", 128),
    "flex_attention, one pass": ("one_pass", "block_mask", "bf16", 128),
    "two passes, full, d = 64": ("two_pass", "full", "bf16", 64),
    "two passes, kv heads shared, ragged": ("two_pass", "causal", "bf16", 128),
    "two passes, d = 256": ("two_pass", "causal", "bf16", 256),
}


def test_each_has_run() -> None:
    """Triton's with right gradients and equal bits of 20 launches; Gluon's, as the kernel is, with those of 1,000."""
    right = [json.loads(line) for line in (RESULTS / "triton/kernels.jsonl").read_text().splitlines()]
    ran = {CASES[each["case"]] for each in right if each["status"] == "ok" and each["launches"] == 20 and each["case"] in CASES}
    expected = {f"{template} in triton, {mask} mask, {dtype}, head dim {d}" for template, mask, dtype, d in ran}
    with (RESULTS / "gluon/gluon_bits.csv").open() as file:
        bits = [
            row for row in csv.DictReader(file) if row["variant"] == "as committed" and row["equal"] == row["launches"] == "1000"
        ]
    expected |= {f"one_pass in gluon, {row['mask']} mask, bf16, head dim {row['head_dim']}" for row in bits}
    assert set(RAN) == {"NVIDIA H200"} and set(RAN["NVIDIA H200"]) == expected and len(expected) == 13
    with (RESULTS / "gpu_tests.csv").open() as file:
        passed = {row["test"] for row in csv.DictReader(file) if row["call"] == "4" and row["outcome"] == "passed"}
    gradients = {tuple(found.groups()) for test in passed if (found := re.search(r", (64|128|256), (True|False)\)-bf16", test))}
    assert gradients == {(d, causal) for d in ("64", "128") for causal in ("True", "False")}


@pytest.mark.parametrize("name", RAN["NVIDIA H200"])
def test_a_kind_is_found_by_its_fields(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On that model alone, and with no more than they say."""
    template, kernel, mask, dtype, d = re.fullmatch(r"(\w+) in (\w+), (\w+) mask, (\w+), head dim (\d+)", name).groups()  # type: ignore[union-attr]
    kind = Kind(template, kernel, "grouped", 90, dtype, int(d), int(d), mask, 64, 128)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    assert verdict.has_run(kind, "cuda:0") and not verdict.has_run(kind, "cpu")
    others = {"dtype": "fp32", "head_dim": 96, "value_dim": 96, "dropout": "flash", "long_schedule": "shift"}
    assert not any(verdict.has_run(replace(kind, **{field: value}), "cuda:0") for field, value in others.items())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H100 80GB HBM3")
    assert not verdict.has_run(kind, "cuda:0")
