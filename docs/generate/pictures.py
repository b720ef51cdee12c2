"""Pictures of the pages as SVG. Their ink is `currentColor`, so that a page in dark lends them its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path

from benchmarks.block_masks.grid import plan_of
from benchmarks.schedules.simulator import Simulation, simulate
from dash_inductor.schedule import Geometry, GroupedPlan, make_order

from .results import compared

FOLDER = Path(__file__).parents[1] / "pictures"
STEP, HOP = 10, 8  # ns of a step and of a hop to another CTA, in all pictures
WIDTH = 720
STYLE = """
svg.drawing { color: #1f2328; font: 13px system-ui, sans-serif; }
@media (prefers-color-scheme: dark) { svg.drawing { color: #d5dae0; } }
.drawing text { fill: currentColor; }
.drawing text.tag { font-size: 9px; fill: #fff; }
.drawing text.in { fill: #fff; text-anchor: middle; }
.drawing text.dark { fill: #1f2328; text-anchor: middle; }
.drawing .blue { fill: #3f6ba0; }
.drawing .green { fill: #2f7d4f; }
.drawing .plum { fill: #8a4a86; }
.drawing .sand { fill: #f2b35c; }
.drawing .wait { fill: currentColor; fill-opacity: 0.08; stroke: currentColor; stroke-opacity: 0.55; stroke-dasharray: 3 2; }
.drawing .frame { fill: none; stroke: currentColor; stroke-opacity: 0.45; }
.drawing .line { fill: none; stroke: currentColor; stroke-width: 1.5; }
""".strip()
HEADS = ("blue", "green", "plum")  # colours of the first heads, or documents


class Drawing:
    """Boxes, texts and arrows, in pixels from the upper left corner."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, kind: str, label: str = "") -> None:
        """A rectangle with a label in its middle."""
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" class="{kind}"/>')
        if label:
            ink = {"sand": "dark", "frame": "centred", "wait": "centred"}.get(kind, "in")
            self.text(x + width / 2, y + height / 2 + 4.5, label, ink)

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        """A text on a baseline; centred, or at the right end of x, where `kind` says so."""
        anchor = {"centred": "middle", "right": "end"}.get(kind)
        shown = f' text-anchor="{anchor}"' if anchor else f' class="{kind}"' if kind else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}"{shown}>{escape(text)}</text>')

    def line(self, *points: tuple[float, float], arrow: bool = False) -> None:
        """A line through points."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" class="line"/>')
        if arrow:
            (x0, y0), (x, y) = points[-2:]
            dx, dy = (5, 0) if y0 == y else (0, 5)
            sign = 1 if (x, y) > (x0, y0) else -1
            head = f"{x - sign * dx - dy:g},{y - sign * dy - dx:g} {x:g},{y:g} {x - sign * dx + dy:g},{y - sign * dy + dx:g}"
            self.parts.append(f'<polyline points="{head}" class="line"/>')

    def svg(self, height: int, width: int = WIDTH) -> str:
        """The whole picture; a narrow one fits a phone, and is not enlarged."""
        kind = "drawing" if width == WIDTH else "drawing narrow"
        size = "" if width == WIDTH else f' width="{width}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"{size} class="{kind}">'
        return "\n".join([head, f"<style>{STYLE}</style>", *self.parts, "</svg>\n"])


def tiles() -> str:
    """One head as a grid: a row is a CTA, a column a sum of dQ; ranks are those of shift."""
    drawing, order = Drawing(), make_order("shift", Geometry(6, 6, 1, 2, "full"), 3)
    left, top, side, marked = 190, 62, 58, 2
    ranks = [dict(zip(order.visits(j), order.ranks(j), strict=True)) for j in range(3)]
    for i in range(6):
        drawing.text(left + side * (i + 0.5), top - 10, f"q{i}", "centred")
    for j in range(3):
        y = top + side * j
        drawing.text(left - 12, y + side / 2 + 4, f"CTA {j}: dK, dV of kv{j}", "right")
        for i in range(6):
            kind = "sand" if i == marked else "blue"
            drawing.box(left + side * i + 2, y + 2, side - 4, side - 4, kind, f"rank {ranks[j][i]}")
    below, x = top + 3 * side, left + side * (marked + 0.5)
    drawing.line((x, below + 4), (x, below + 28), arrow=True)
    drawing.text(x, below + 46, f"dQ of q{marked}: the part of rank 0, then of rank 1, then of rank 2", "centred")
    drawing.text(left, 16, "a CTA visits the Q tiles one after the other")
    drawing.line((left, 26), (left + 6 * side, 26), arrow=True)
    return drawing.svg(below + 60)


def step() -> str:
    """What a CTA does in one step, lane by lane. Not to scale."""
    drawing = Drawing()
    left, top, height, unit = 92, 34, 50, 62
    for lane, name in enumerate(("copies", "matmuls", "arithmetic", "order")):
        drawing.text(8, top + lane * height + 25, name)
        drawing.line((left, top + lane * height + 42), (WIDTH - 8, top + lane * height + 42))
    items: Iterable[tuple[int, float, float, str, str]] = (
        (0, 0, 10, "green", "q, dO, lse of the step after, in flight"),
        (1, 0, 1.5, "blue", "dK before"),
        (1, 1.5, 1, "blue", "S"),
        (1, 3.25, 1, "blue", "dP"),
        (1, 4.25, 1, "blue", "dV"),
        (1, 7, 1, "blue", "dQ"),
        (1, 8, 2, "blue", "dK, in flight"),
        (2, 2.5, 0.75, "plum", "P"),
        (2, 5.25, 0.75, "plum", "dS"),
        (2, 8, 1.3, "plum", "add dQ"),
        (3, 0, 1.5, "sand", "release"),
        (3, 6, 1, "wait", "wait"),
    )
    for lane, start, length, kind, label in items:
        drawing.box(left + start * unit, top + lane * height + 4, length * unit - 4, 34, kind, label)
    drawing.text(left, 20, "one step of a CTA")
    drawing.line((left + 130, 15), (WIDTH - 8, 15), arrow=True)
    return drawing.svg(top + 4 * height + 8)


def gantt(drawing: Drawing, simulation: Simulation, top: float, scale: float, colour: Callable[[int, int], str]) -> float:
    """A row per CTA below `top`: its steps with their Q tiles, and its waits; returns where the rows end."""
    steps, left, height = simulation.steps, 64, 38
    rows: dict[int, int] = {}
    for worker, before in enumerate(simulation.follows):
        rows[worker] = rows[before] if before >= 0 else len(set(rows.values()))
        if before < 0:
            drawing.text(8, top + height * rows[worker] + 22, f"CTA {rows[worker]}")
    chain = None
    for index in range(len(steps)):
        head, kv, q, _ = steps[index]
        y = top + height * rows[steps.worker(index)]
        start, ready, turn = (
            left + scale * t for t in (simulation.start_ns[index], simulation.ready_ns[index], simulation.turn_ns[index])
        )
        drawing.box(start, y, ready - start - 1, 32, colour(head, kv))
        drawing.text((start + ready) / 2, y + 25, str(q), "in")
        if turn > ready:
            drawing.box(ready, y + 0.5, turn - ready - 1, 31, "wait")
        if chain != (head, kv):
            drawing.parts.append(f'<text x="{start + 2:g}" y="{y + 10:g}" class="tag">kv{kv}</text>')
            chain = head, kv
    return top + height * len(set(rows.values()))


def schedules() -> str:
    """The same attention twice: a schedule in which CTAs wait, and one in which nobody does."""
    drawing, geometry, end = Drawing(), Geometry(8, 8, 1, 2, "causal"), 0.0
    for family, roles, said in (("ascending", 4, "CTAs wait for each other"), ("symmetric", 2, "nobody waits")):
        plan = GroupedPlan(make_order(family, geometry, roles), 2, 4 // roles)
        simulation = simulate(plan, compute_ns=STEP, reduce_ns=0, sync_ns=HOP)
        drawing.text(8, end + 18, f"{family}: {said}; {simulation.makespan_ns / STEP:g} steps long")
        end = gantt(drawing, simulation, end + 26, 3.5, lambda head, _: HEADS[head]) + 16
    return drawing.svg(round(end + legend(drawing, end, "head 0", "head 1")))


def documents() -> str:
    """A mask of three packed documents, by tickets from the last KV tile and from the first."""
    drawing, lengths, side = Drawing(), (4, 3, 3), 17
    document = [number for number, length in enumerate(lengths) for _ in range(length)]
    n = len(document)
    geometry = Geometry.of_blocks([[i >= j and document[i] == document[j] for i in range(n)] for j in range(n)])
    left, top = 64, 30
    drawing.text(left, 18, "Q tiles 0 to 9, downwards; KV tiles 0 to 9, to the right")
    for j in range(n):
        for i in range(n):
            seen = i in geometry.tiles(j)
            drawing.box(left + side * j, top + side * i, side - 1, side - 1, HEADS[document[j]] if seen else "frame")
    x = left + side * n + 24
    for line, text in enumerate(
        (
            "Three documents in one row of tokens, each causal.",
            "A coloured tile is visited, an empty one never.",
            "Each KV tile, a column, is a chain: one CTA walks it downwards.",
            "A row is the sum of one dQ tile, over the chains that meet it.",
            "4 CTAs take the 10 chains, one after another.",
        )
    ):
        drawing.text(x, top + 24 + 26 * line, text)
    end = top + side * n + 16.0
    for name, said in (("spt", "last KV tile first (what the kernel does)"), ("ascending_up", "first KV tile first")):
        simulation = simulate(plan_of(name, geometry, 1), compute_ns=STEP, reduce_ns=0, sync_ns=HOP, resident=4)
        waits = "nobody waits" if not simulation.wait_ns else f"waits of {simulation.wait_ns / STEP:g} steps in all"
        drawing.text(8, end + 18, f"{said}: {simulation.makespan_ns / STEP:g} steps long, {waits}")
        end = gantt(drawing, simulation, end + 26, 5.9, lambda _, kv: HEADS[document[kv]]) + 16
    return drawing.svg(round(end + legend(drawing, end, "document 0", "document 1", "document 2")))


def legend(drawing: Drawing, top: float, *names: str) -> int:
    """What the colours are; returns its height."""
    for place, (kind, name) in enumerate([*zip(HEADS, names, strict=False), ("wait", "waits for its turn to add")]):
        drawing.box(64 + 110 * place, top, 14, 14, kind)
        drawing.text(84 + 110 * place, top + 12, name)
    drawing.text(64, top + 38, "In a box: the Q tile that is visited, and kv where the chain of another KV tile begins.")
    drawing.text(64, top + 58, "Times are the model's: a step takes 1, handing a sum over to another CTA 0.8.")
    return 70


def measured() -> str:
    """The times of the first page's table, a bar each."""
    drawing, width, left, height = Drawing(), 486, 246, 30
    rows = [(shown, float(row["median_ms"]), row["same_bits"] == "True") for shown, row in compared()]
    scale = (width - left - 44) / max(ms for _, ms, _ in rows)
    drawing.text(8, 18, "Backward of attention on an H200, in ms")
    for place, (shown, ms, same) in enumerate(rows):
        y = 32 + height * place
        drawing.text(left - 10, y + 16, shown, "right")
        drawing.box(left, y, scale * ms, height - 8, "blue" if same else "sand")
        drawing.text(left + scale * ms + 8, y + 16, f"{ms:.2f}")
    end = 32 + height * len(rows) + 8
    for x, kind, said in (
        (8, "blue", "the same bits in every launch"),
        (236, "sand", "bits differ from launch to launch"),
    ):
        drawing.box(x, end, 14, 14, kind)
        drawing.text(x + 20, end + 12, said)
    return drawing.svg(end + 24, width)


PICTURES: dict[str, Callable[[], str]] = {
    "measured": measured,
    "tiles": tiles,
    "step": step,
    "schedules": schedules,
    "documents": documents,
}


def path_of(name: str) -> Path:
    """Where a picture stands."""
    return FOLDER / f"{name}.svg"
