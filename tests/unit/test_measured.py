"""The replay held against an H200: 18 main kernels, and two loops place by place."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from benchmarks.kept import rows_of
from benchmarks.machine_code import measured, others
from benchmarks.machine_code.__main__ import main
from benchmarks.machine_code.replay import Constants

pytestmark = pytest.mark.nightly

# The constants that it had before it was held against loops that a GPU ran; what it had no word for costs nothing.
BEFORE = {"cta_fence": 12, "async_fence": 20, "mbarrier": 25, "barrier": 20, "mufu_latency": 22, "matmul_latency": 28}
BEFORE |= {"addition_bandwidth": 32, "matmul_dispatch": 1, "jump": 1, "least_share": 1}
OFF = 7  # percent
AHEAD = 10  # percent of a step


def errors(constants: Constants) -> dict[str, float]:
    return {row["kernel"]: row["error %"] for row in measured.compared(constants)[1]}


def test_each_kernel_at_one_clock():
    clock, rows = measured.compared()
    assert len(rows) == 18
    assert {row["kernel"]: row["error %"] for row in rows if abs(row["error %"]) > OFF} == {}
    assert 1.71 < clock < 1.98  # GHz, as they were read while kernels ran


def test_those_further_apart_than_that_are_in_the_right_order():
    """5 percent and more, of the same attention."""
    _, rows = measured.compared()
    pairs = [pair for pair in combinations(rows, 2) if len({row["kernel"].rpartition(", ")[2] for row in pair}) == 1]
    apart = [sorted(pair, key=lambda row: row["measured ms"]) for pair in pairs]
    apart = [(fast, slow) for fast, slow in apart if slow["measured ms"] > 1.05 * fast["measured ms"]]
    assert len(apart) > 20
    wrong = [(fast["kernel"], slow["kernel"]) for fast, slow in apart if fast["predicted ms"] >= slow["predicted ms"]]
    assert wrong == []


def test_the_constants_before_were_wrong():
    """Of the Triton kernel above all, whose additions took the way of plain stores."""
    before = errors(Constants().set_from(BEFORE))
    assert max(map(abs, before.values())) > 20
    assert [name for name, error in before.items() if error < -20 and name.startswith("Triton")]


@pytest.mark.parametrize("head_dim", [64, 128])
def test_profiled_loops(head_dim):
    """Against the elapsed cycles, and the sum of the time before each instruction."""
    cycles, worst, _ = measured.furthest_off(head_dim)
    assert cycles == pytest.approx(measured.elapsed_cycles(head_dim), rel=OFF / 100)
    assert abs(worst) < AHEAD
    old, further, _ = measured.furthest_off(head_dim, Constants().set_from(BEFORE))
    assert abs(further) > AHEAD or old != pytest.approx(measured.elapsed_cycles(head_dim), rel=OFF / 100)


def test_the_loops_are_those_that_were_profiled():
    for head_dim in (64, 128):
        loop = measured.main_loops()[f"Gluon d{head_dim} full"]
        samples = [row for row in rows_of(measured.H200 / "gluon" / "loop_samples.csv") if row["head_dim"] == str(head_dim)]
        sampled = [row["instruction"].removeprefix("@P0 ").removeprefix("@!P0 ").split() for row in samples]
        kept = [[operation.opcode, *operation.operands.replace(".reuse", "").split()] for operation in loop]
        wrong = [(theirs, ours) for theirs, ours in zip(sampled, kept, strict=False) if theirs != ours and ours[0] != "BRA"]
        assert wrong == []


def test_the_command(capsys):
    assert main(["measured"]) == 0
    printed = capsys.readouterr().out
    assert "FlashAttention 4, deterministic, d128 causal" in printed and "Gluon d64 full" in printed


def test_loops_of_others_are_those_that_were_timed(monkeypatch, capsys):
    """Other versions' would stand beside times that are not theirs."""
    assert {row["package"] for row in rows_of(measured.LOOPS)} == {
        *map(others.text_of, (others.FLEX_ATTENTION, others.FLASH_ATTENTION_4))
    }
    monkeypatch.setattr(others, "version", lambda name: "2.11.1")
    with pytest.raises(SystemExit, match="2"):
        main(["measured", "--others"])
    assert "nothing that was timed is installed: torch 2.11.0, triton 3.6.0, or flash-attn-4 4.0.0b36" in capsys.readouterr().err


def test_the_page_has_these_figures():
    """A table of docs/measurements.md: measured, and in brackets predicted."""
    page = (Path(__file__).parents[2] / "docs" / "measurements.md").read_text()
    _, rows = measured.compared()
    figures = {row["kernel"]: f"{row['measured ms']:.2f} ({row['predicted ms']:.2f})" for row in rows}
    lines = {
        "ours, Gluon, its best schedule": "Gluon",
        "FlashAttention 4, deterministic": "FlashAttention 4, deterministic",
        "FlashAttention 4": "FlashAttention 4",
        "ours, Triton, one pass": "Triton",
        "FlexAttention, about": "FlexAttention",
    }
    for line, name in lines.items():
        cells = [figures.get(f"{name}, d{head_dim} {mask}", "") for head_dim in (128, 64) for mask in measured.MASKS]
        assert f"| {line} | {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |") in page
