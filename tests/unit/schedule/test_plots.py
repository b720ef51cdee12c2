from __future__ import annotations

import pytest

from benchmarks.schedules.simulator import Simulation, simulate
from dash_inductor.schedule import FAMILIES, ROUND_ROBIN, Ascending, Geometry, GroupedPlan

matplotlib = pytest.importorskip("matplotlib")

from matplotlib.collections import PolyCollection  # noqa: E402

from benchmarks.schedules import plots  # noqa: E402

COSTS = {"compute_ns": 800, "reduce_ns": 200, "sync_ns": 550}


def simulated(roles: int = 3, overlap: bool = False) -> Simulation:
    return simulate(GroupedPlan(Ascending(Geometry(6, 3, 1, 1, "full"), roles), 2, 2), **COSTS, overlap=overlap)


def spans(figure) -> dict[str, list[tuple[float, float, int]]]:
    """(From us, to us, row) of the bars by their label."""
    found = {}
    for artist in figure.axes[0].collections:
        if isinstance(artist, PolyCollection):
            boxes = [path.vertices for path in artist.get_paths()]
            found[artist.get_label()] = [(min(b[:, 0]), max(b[:, 0]), round(float(b[:, 1].mean()))) for b in boxes]
    return found


@pytest.mark.parametrize("overlap", [False, True])
def test_the_chart_shows_every_compute_reduction_and_wait(overlap: bool) -> None:
    found = simulated(overlap=overlap)
    drawn = spans(plots.gantt(found, title="t"))
    steps = range(len(found.steps))
    workers = [found.steps.worker(step) for step in steps]

    def expected(starts: list[int], stops: list[int]) -> list[object]:
        both = zip(starts, stops, workers, strict=True)
        return [pytest.approx((start / 1000, stop / 1000, worker)) for start, stop, worker in both if start < stop]

    assert drawn["compute"] == expected(found.start_ns, [start + 800 for start in found.start_ns])
    assert drawn["reduce"] == expected(found.turn_ns, found.end_ns)
    assert drawn["wait"] == expected(found.ready_ns, found.turn_ns)
    assert len(drawn["wait"]) == len(found.waits) > 0


def test_every_family_has_a_line_of_its_own() -> None:
    row = {"kv_tiles": 2, "lower_bound_ns": 10, "families": {f: {"makespan_ns": 10} for f in (*FAMILIES, *ROUND_ROBIN)}}
    lines = plots.over_bound([row], title="t").axes[0].lines[:-1]  # the last one is the bound
    assert {line.get_label() for line in lines} == set(row["families"])
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(lines)
