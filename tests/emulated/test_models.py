"""Transformers' models, compiled as a whole at toy size: what benchmarks/results/models says of each row."""

import pytest

pytest.importorskip("transformers")

from benchmarks.models.families import CHECKPOINTING, DROPOUT, FAMILIES, PACKED
from benchmarks.models.measure import measure

ERROR = 3  # times that of the worst gradient in fp32 with attention written out, or, where that is what it is held against, times
ROUNDING = 1e-6
SHARED = {("T5", CHECKPOINTING): 2}  # calls of a decoder layer that runs the graph of another, with its decisions
WITH_DROPOUT = ("GPT-2", "BERT", "T5", "BART")  # by their configurations
QUICK = ("Qwen3", PACKED)
ROWS = [(name, case) for name, family in FAMILIES.items() for case in family.cases]


@pytest.mark.parametrize(("name", "case"), [pytest.param(*row, marks=[pytest.mark.nightly] * (row != QUICK)) for row in ROWS])
def test_row(name, case):
    row = measure(name, case)
    if "left_out" in row:
        assert case == DROPOUT and name not in WITH_DROPOUT
        return
    assert "failure" not in row, row["failure"]
    assert row["decisions"] + SHARED.get((name, case), 0) == row["calls"] > 0
    assert not row["declined"]
    assert row["error"] < ERROR * (row["eager_error"] or ROUNDING), f"{row['worst']}: error {row['error']:.2e}"
    assert row["different_bits"] == []
