"""Models whose attention has sinks, is without padding, or packed: the same bits of gradients in another process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attention import FP32_ERROR

pytest.importorskip("transformers")

import model_steps_worker as worker
from processes import script


@pytest.mark.nightly
def test_equal_bits_in_two_processes(tmp_path: Path) -> None:
    found: list[dict[str, Any]] = []
    for seed in (0, 1):
        file = tmp_path / f"{seed}.pt"
        script([worker.__file__, str(file)], tmp_path, seed)
        found.append(torch.load(file, weights_only=False))
    for name in worker.MODELS:
        one, other = (each[name] for each in found)
        assert one["decisions"] and [decision.reason for decision in one["decisions"] if not decision.rewritten] == [], name
        assert one["error"] < FP32_ERROR, name
        assert one["gradients"].keys() == other["gradients"].keys()
        differing = [parameter for parameter, x in one["gradients"].items() if not torch.equal(x, other["gradients"][parameter])]
        assert differing == [], name
