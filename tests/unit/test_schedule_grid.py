"""The grid of benchmarks/schedules: what is chosen against the paper's three and the lower bound, as docs/schedules.md has it."""

import csv
import statistics

import pytest

from benchmarks.schedules.__main__ import main
from benchmarks.schedules.grid import Point, periodic_makespan, points, row
from benchmarks.schedules.report import RESULTS
from benchmarks.schedules.simulator import simulate
from dash_inductor.schedule import Costs, Geometry, GroupedPlan, RoundRobinPlan, Symmetric


@pytest.fixture(scope="module")
def lines() -> list[dict]:
    with (RESULTS / "schedules.csv").open() as file:
        return [{name: int(value) if value.isdigit() else value for name, value in line.items()} for line in csv.DictReader(file)]


def test_never_slower_than_the_best_of_the_papers_three(lines: list[dict]) -> None:
    assert len(lines) == len(list(points()))
    for line in lines:
        paper = min(line["ascending"], line["descending"], line["ring"])
        assert line["bound"] <= line["chosen"] <= paper
        assert line["cautious"] <= paper * 1.02  # the default stays within the margin


def test_within_five_percent_of_the_bound_on_average(lines: list[dict]) -> None:
    assert statistics.fmean(line["chosen"] / line["bound"] for line in lines) <= 1.05
    assert statistics.fmean(line["cautious"] / line["bound"] for line in lines) <= 1.05


def test_the_file_is_what_the_code_gives(lines: list[dict]) -> None:
    small = [(point, line) for point, line in zip(points(), lines, strict=True) if point.n * point.heads <= 512]
    for point, line in small[::37]:
        found = row(point)
        assert Point(line["mask"], line["n_kv"], line["heads"], line["workers"], line["hop_percent"]) == point
        assert (line["family"], line["roles"], line["heads_in_flight"]) == (found.family, found.roles, found.heads_in_flight)
        for name in ("chosen", "cautious", "bound", "ascending", "descending", "ring"):
            assert line[name] == getattr(found, name), (point, name)


@pytest.mark.parametrize("heads", [3, 11, 60])
@pytest.mark.parametrize("hop_ns", [5, 14, 33])
def test_a_schedule_that_settles_is_simulated_in_part(heads: int, hop_ns: int) -> None:
    costs = Costs("model", "model", 10, hop_ns, 0, 5, 2**20, True)
    for n in (4, 6, 9):
        grid = Geometry(2 * n, 2 * n, 1, 2, "causal")
        pairs = -(-n // 2)
        for plan in (RoundRobinPlan(Symmetric(grid, min(pairs, 5)), heads, 5), GroupedPlan(Symmetric(grid, 2), heads, 2)):
            whole = simulate(plan, compute_ns=10, reduce_ns=0, sync_ns=hop_ns).makespan_ns
            assert periodic_makespan(plan, costs) == whole


@pytest.mark.nightly
def test_the_command(lines: list[dict], capsys: pytest.CaptureFixture[str]) -> None:
    """A few points, and a summary of them that the file gives too."""
    assert main(["grid", "--every", "440"]) == 0
    some = lines[::440]
    (of_all,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("all "))
    assert of_all.split()[:3] == ["all", str(len(some)), f"{statistics.fmean(line['chosen'] / line['bound'] for line in some):.3f}"]
