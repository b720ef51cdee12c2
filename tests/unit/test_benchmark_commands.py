"""The commands of benchmarks that compute on a CPU."""

import statistics

import pandas
import pytest

from benchmarks.block_masks import __main__ as block_masks

pytestmark = pytest.mark.nightly


def test_block_masks(tmp_path, capsys, monkeypatch):
    """A third of the file, with more chains than CTAs; a summary of it."""
    header, *lines = (block_masks.RESULTS / "block_masks.csv").read_text().splitlines()
    points = list(block_masks.points())
    kept = [(point, line) for point, line in zip(points, lines, strict=True) if point[0] == 16]
    monkeypatch.setattr(block_masks, "points", lambda: [point for point, _ in kept])
    monkeypatch.setattr(block_masks, "RESULTS", tmp_path)
    assert block_masks.main([]) == 0
    assert (tmp_path / "block_masks.csv").read_text().splitlines() == [header, *(line for _, line in kept)]
    rows = pandas.read_csv(tmp_path / "block_masks.csv").query("hop_percent == 75")
    over = list(rows["ascending_up"] / rows["bound"])
    assert len(over) == 14 and f"{statistics.fmean(over):.2f}, {max(over):.2f}" in capsys.readouterr().out
