"""What is kept of `gates --json`, and the tables of docs/kernel-figures.md that are made of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import loops

pytestmark = pytest.mark.nightly

TWO = [
    {"cycles": 1615.4, "tensor_cycles": 1000.0, "exposed": {"fence": 400.0, "issue": 200.4, "table entry": 15.0}},
    {"cycles": 1272.0, "tensor_cycles": 1000.0, "exposed": {"fence": 272.0}},
]


def row(template: str = "one_pass", shape: str = "full", *, replays: Any = None, **changed: Any) -> dict[str, Any]:
    """A row as `gates --json` prints it."""
    figures: dict[str, Any] = dict.fromkeys(loops.FIGURES, 10) | {"tile": "64x128x64", "stock_instructions": None}
    cell = {"template": template, "shape": shape, "head_dim": 64, "value_dim": None}
    return cell | figures | {"predicted_cycles": TWO[:1] if replays is None else replays, "gates": []} | changed


@pytest.fixture
def keep(monkeypatch, tmp_path):
    """Keeps rows of a Triton in a folder of the test's own, by the command."""
    monkeypatch.setattr(loops, "FOLDER", tmp_path / "loops")

    def write(triton: str, *rows: dict[str, Any]) -> None:
        file = tmp_path / "printed.json"
        file.write_text(json.dumps({"triton": triton, "rows": rows}))
        loops.main([str(file)])

    return write


def test_cycles_are_of_each_loop_and_causes_of_all(keep):
    keep("3.7.1", row("two_pass", replays=TWO, head_dim=192, value_dim=128))
    (kept,) = loops.results()
    assert (kept["head dim"], kept["cycles"]) == ("192/128", "1615 + 1272")
    causes = {name: kept[name] for name in (loops.TENSOR, *loops.CAUSES, loops.REST) if kept[name] != "0"}
    assert causes == {"tensor cores": "2000", "fence": "672", "issue": "200", "the rest": "15"}


def test_a_table_has_a_line_for_an_attention(keep):
    """A line has the figures of all Tritons, the oldest first, or one where they agree."""
    keep("3.7.1", row(registers=255), row(shape="causal"), row("gluon"), row(shape="flex"))
    keep("3.6.0", row(registers=250), row(shape="causal"))
    head, _, full, causal = loops.table("one pass").splitlines()
    assert head == "| head dim | attention | cycles (estimate) | instructions | local accesses | registers | shared memory |"
    assert (full, causal) == ("| 64 | full | 1615 | 10 | 10 | 250 / 255 | 10 |", "| 64 | causal | 1615 | 10 | 10 | 10 | 10 |")


def test_rows_of_other_kernels_stay(keep):
    keep("3.7.1", row(), row("gluon"), row("gluon", head_dim=192), row("gluon", head_dim=192, value_dim=128))
    keep("3.7.1", row("gluon", shape="full-dropout", registers=168), row("gluon", registers=168))
    found = [(*loops.kernel(kept), kept["registers"]) for kept in loops.results()]
    of_64 = [("one_pass", "64", "full", "10"), ("gluon", "64", "full", "168"), ("gluon", "64", "full-dropout", "168")]
    assert found == [*of_64, ("gluon", "192", "full", "10"), ("gluon", "192/128", "full", "10")]


def test_what_is_kept_has_every_loop_of_each_triton():
    """Where one is missing, a table's figures would be of other Tritons than the page says."""
    kernels: dict[str, list[tuple[str, ...]]] = {}
    for row in loops.results():
        kernels.setdefault(row["triton"], []).append(loops.kernel(row))
    assert list(kernels) == ["3.6.0", "3.7.1", "3.8.0", "3.9.0"]
    first, *others = kernels.values()
    assert others == [first] * 3
    assert len(first) == len(set(first))
    assert {shape for _, _, shape in first} == set(loops.NAMES)
