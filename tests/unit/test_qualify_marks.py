"""The clocks of chains: what the kernel notes, read back; the copy of the kernel that notes it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attention_results import empty_operands

from dash_inductor.codegen.fake_gpu import fake_gpu
from dash_inductor.lowering.launch import gluon
from dash_inductor.qualify import marks, schedules

PLACE = schedules.Timed("as committed", 128, "full", "shift", 4, 8)


def test_marks_are_read_chain_by_chain() -> None:
    """ns count from the first chain of all, cycles from each chain's own begin; what no chain wrote is none."""
    memory = torch.zeros(2, marks.MOST_CHAINS, len(marks.PLACES), 2, dtype=torch.int64)
    memory[1, 0] = torch.tensor([[1000, 7], [1100, 207], [1500, 1007], [1600, 1207]])
    memory[1, 1] = torch.tensor([[1650, 1300], [1700, 1400], [2100, 2300], [2400, 2800]])
    memory[0, 0] = torch.tensor([[1010, 99], [1130, 339], [1530, 1139], [1610, 1299]])
    found = list(marks.marks_of(memory.flatten(), PLACE))
    assert [(mark.cta, mark.chain) for mark in found] == [(0, 0), (1, 0), (1, 1)]
    assert (found[1].begin_ns, found[1].first_s_ns, found[1].last_step_ns, found[1].end_ns) == (0, 100, 500, 600)
    assert (found[0].begin_ns, found[2].end_ns) == (10, 1400)
    assert (found[0].first_s_cycles, found[0].last_step_cycles, found[0].end_cycles) == (240, 1040, 1200)
    assert marks.spent(found) == {
        "until the first S": 100,
        "steps": 400,
        "dK and dV": 100,
        "until the CTA's next chain": 50,
    }


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_copy_notes_four_times_and_is_the_kernel_else(head_dim: int, tmp_path: Path) -> None:
    """The kernel itself reads no clock, and stores no pairs of 64 bits."""
    kernel = marks.marked(tmp_path / "marked")
    kernel.MEMORY[:] = [torch.empty(1, dtype=torch.int32, device="meta")]
    with fake_gpu("h200"):
        ptx = gluon.launch_of(kernel, empty_operands("meta", 2, head_dim)).compile().asm["ptx"]
    assert ptx.count("%globaltimer") == ptx.count("%clock64") == ptx.count("st.global.v2.b64") == len(marks.PLACES)


def test_a_kernel_that_is_not_as_the_edits_have_it_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks, "EDITS", {"walk.py": [("nothing has this", "")]})
    with pytest.raises(ValueError, match=r"walk\.py has 0 times, not once: nothing has this"):
        marks.marked(tmp_path / "marked")
