"""The commands of benchmarks that compute on a CPU."""

import itertools
import statistics
from importlib.util import find_spec

import pandas
import pytest

from benchmarks.block_masks import __main__ as block_masks
from benchmarks.schedules import report as schedules
from benchmarks.schedules.__main__ import main

pytestmark = pytest.mark.nightly


def test_schedules(tmp_path, capsys):
    """A few lines of the file, and a summary of them."""
    assert main(["grid", "--every", "440"]) == 0
    shown = capsys.readouterr().out
    rows = [schedules.row(point) for point in itertools.islice(schedules.points(), 0, None, 440)]
    schedules.write(schedules.table_of(rows), tmp_path / "schedules.csv")
    header, *lines = (schedules.RESULTS / "schedules.csv").read_text().splitlines()
    assert (tmp_path / "schedules.csv").read_text().splitlines() == [header, *lines[::440]]
    *groups, overall = schedules.summary(schedules.table_of(rows))
    assert sum(int(group["shapes"]) for group in groups) == int(overall["shapes"]) == len(rows) == 6
    assert overall["chosen"] == f"{statistics.fmean(row.chosen / row.bound for row in rows):.3f}" and overall["chosen"] in shown
    assert overall["paper's best"] == f"{statistics.fmean(row.paper / row.bound for row in rows):.3f}"
    assert overall["at most"] == f"{max(row.chosen / row.bound for row in rows):.2f}" and overall["paper faster"] == "0"
    assert overall["with the margin"].endswith(f", {max(row.cautious / row.paper for row in rows):.3f} of the paper's at most")


def test_block_masks(tmp_path, capsys, monkeypatch):
    """A third of the file, with more chains than CTAs; a picture and a summary of it."""
    header, *lines = (block_masks.RESULTS / "block_masks.csv").read_text().splitlines()
    points = list(block_masks.points())
    kept = [(point, line) for point, line in zip(points, lines, strict=True) if point[0] == 16]
    monkeypatch.setattr(block_masks, "points", lambda: [point for point, _ in kept])
    monkeypatch.setattr(block_masks, "RESULTS", tmp_path)
    assert block_masks.main([]) == 0
    assert (tmp_path / "block_masks.csv").read_text().splitlines() == [header, *(line for _, line in kept)]
    assert (tmp_path / "block_masks.png").exists() == (find_spec("matplotlib") is not None)
    rows = pandas.read_csv(tmp_path / "block_masks.csv").query("hop_percent == 75")
    over = list(rows["ascending_up"] / rows["bound"])
    assert len(over) == 14 and f"{statistics.fmean(over):.2f}, {max(over):.2f}" in capsys.readouterr().out
