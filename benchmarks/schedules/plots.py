"""Pictures of schedules, by matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.schedules.simulator import Simulation
from dash_inductor.schedule.families import REGISTER

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COMPUTE, REDUCE, WAIT, CRITICAL = "#4c78a8", "#f2a541", "#c9c9c9", "#c2185b"
TOP, BOTTOM, STRIPE = -0.36, 0.22, 0.33  # of a row: its bars, and the critical path
MOST_LABELLED_ROWS, LEAST_LABELLED_SHARE = 40, 0.01  # text needs rows that high, and steps that wide


def new_figure(width: float, height: float) -> Figure:
    """A figure that no window shows; ValueError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("plot needs matplotlib: pip install matplotlib") from None
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: str) -> None:
    """Write the figure in the format of the path's ending; ValueError where that cannot be."""
    if not Path(path).suffix:
        raise ValueError(f"plot {path!r} must end in .png or .svg")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ValueError(f"plot {path!r} cannot be written: {error}") from None


def gantt(simulation: Simulation, *, title: str, from_ns: int = 0, to_ns: int | None = None) -> Figure:
    """A row per worker: compute, reduction and wait of every step between from_ns and to_ns, and the critical path below.

    Where reductions overlap with the next compute they have the lower half of a bar. Where there is room for it each step shows
    its Q tile, and each chain its head and KV tile.
    """
    figure = new_figure(16, min(15, 1.6 + 0.45 * (len(simulation.steps.first) - 1)))
    from matplotlib.collections import PolyCollection
    from matplotlib.ticker import MaxNLocator

    axes = figure.subplots()
    to_ns = simulation.makespan_ns if to_ns is None else to_ns
    row_of = [worker for worker, (start, stop) in enumerate(pairwise(simulation.steps.first)) for _ in range(start, stop)]
    seen = [
        step for step in range(len(simulation.steps)) if simulation.start_ns[step] < to_ns and simulation.end_ns[step] > from_ns
    ]
    middle = (TOP + BOTTOM) / 2 if simulation.overlap else None
    computes = [(step, simulation.start_ns[step], simulation.start_ns[step] + simulation.compute_ns[step]) for step in seen]
    reduces = [(step, simulation.turn_ns[step], simulation.end_ns[step]) for step in seen]
    waits = [(step, simulation.ready_ns[step], simulation.turn_ns[step]) for step in seen]
    rows = len(simulation.steps.first) - 1
    share = sum(stop - start for _, start, stop in computes) / max(1, len(computes) * (to_ns - from_ns))  # of the width
    labelled = rows <= MOST_LABELLED_ROWS and share >= LEAST_LABELLED_SHARE
    for spans, colour, label, low, high in (
        (computes, COMPUTE, "compute", TOP, middle or BOTTOM),
        (reduces, REDUCE, "reduce", middle or TOP, BOTTOM),
        (waits, WAIT, "wait", TOP, BOTTOM),
    ):
        boxes = [
            (row_of[step] + low, row_of[step] + high, start / 1000, stop / 1000) for step, start, stop in spans if start < stop
        ]
        corners = [[(left, top), (right, top), (right, bottom), (left, bottom)] for top, bottom, left, right in boxes]
        edge = 0.15 if labelled else 0
        axes.add_collection(PolyCollection(corners, facecolors=colour, edgecolors="white", linewidths=edge, label=label))
    _critical_path(axes, simulation, row_of)
    if labelled:
        _labels(axes, simulation, computes, row_of, (TOP + (middle or BOTTOM)) / 2)

    axes.set(xlim=(from_ns / 1000, to_ns / 1000), ylim=(rows - 0.4, -0.6), xlabel="time [us]", ylabel="worker", title=title)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return figure


def _critical_path(axes: Axes, simulation: Simulation, row_of: list[int]) -> None:
    """A line below the bars of the path, thin where it goes to another worker."""
    from matplotlib.collections import LineCollection

    path = simulation.critical_path()
    stays: list[list[tuple[float, float]]] = []
    hops: list[list[tuple[float, float]]] = []
    for before, step in pairwise([path[0], *path]):
        waited = simulation.turn_ns[step] > simulation.ready_ns[step]
        start, end, row = simulation.turn_ns[step] if waited else simulation.start_ns[step], simulation.end_ns[step], row_of[step]
        stays.append([(start / 1000, row + STRIPE), (end / 1000, row + STRIPE)])
        if row_of[before] != row:
            hops.append([(simulation.end_ns[before] / 1000, row_of[before] + STRIPE), (start / 1000, row + STRIPE)])
    axes.add_collection(LineCollection(stays, colors=CRITICAL, linewidths=3, capstyle="butt", label="critical path"))
    axes.add_collection(LineCollection(hops, colors=CRITICAL, linewidths=1.2))


def _labels(axes: Axes, simulation: Simulation, computes: list[tuple[int, int, int]], row_of: list[int], middle: float) -> None:
    """The Q tile in every compute, and head and KV tile where a chain begins."""
    chain = None
    for step, start, stop in computes:
        head, kv, q, _ = simulation.steps[step]
        x, y = (start + stop) / 2000, row_of[step] + middle
        axes.text(x, y, str(q), color="white", fontsize=7, ha="center", va="center", clip_on=True)
        if chain != (head // simulation.steps.plan.group, kv):
            chain = head // simulation.steps.plan.group, kv
            axes.vlines(start / 1000, row_of[step] + TOP - 0.12, row_of[step] + BOTTOM, color="black", linewidth=1)
            axes.text(start / 1000, row_of[step] + TOP - 0.02, f" kv {kv}, head {head}", fontsize=6, va="bottom", clip_on=True)


def over_bound(rows: Sequence[Mapping[str, Any]], *, title: str) -> Figure:
    """Time over the lower bound by the number of KV tiles, a line per family; the rows of the command `compare`."""
    figure = new_figure(9, 5.5)
    axes = figure.subplots()
    for name, family in REGISTER.items():
        served = [row for row in rows if name in row["families"]]
        ratios = [row["families"][name]["makespan_ns"] / row["lower_bound_ns"] for row in served]
        if served:
            tiles = [row["kv_tiles"] for row in served]
            colour, style = family.colour, "--" if family.queue_of else "-"
            axes.plot(tiles, ratios, color=colour, linestyle=style, label=name, marker="o", markersize=3)
    axes.set(xlabel="KV tiles of a head", ylabel="time / lower bound", title=title)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure
