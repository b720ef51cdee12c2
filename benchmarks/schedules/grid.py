"""The grid of shapes, and the times on it: the chosen schedule's, the paper's three, the lower bound."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from dash_inductor.schedule import Costs, Geometry, Shape, Straddling, choose, lower_bound, make, monotone_makespan

MASKS = ("full", "causal_top_left")
KV_TILES = (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
HEADS = (1, 4, 8, 16, 32, 64, 96, 128, 256, 512)
WORKERS = (108, 132, 148, 264)
HOP_PERCENT = (20, 75, 150)  # lam / tau
BLOCK_M, BLOCK_N = 64, 128
STEP_NS = 2000
L2_BYTES = 50 * 2**20
HEAD_DIM = 64


@dataclass(frozen=True)
class Point:
    """One shape on one device; lengths are n KV tiles of 128."""

    mask: str
    n: int
    heads: int
    workers: int
    hop_percent: int

    @property
    def hop_ns(self) -> int:
        return STEP_NS * self.hop_percent // 100

    @property
    def shape(self) -> Shape:
        length = self.n * BLOCK_N
        return Shape(length, length, self.heads, 1, HEAD_DIM, BLOCK_M, BLOCK_N, self.mask)

    @property
    def costs(self) -> Costs:
        """The paper's own model: a step costs the same in every family."""
        return Costs("model", "model", STEP_NS, self.hop_ns, 0, self.workers, L2_BYTES, True)


@dataclass(frozen=True)
class Row:
    """Times in ns; ring is shift for the full mask and symmetric for the causal one."""

    point: Point
    family: str
    roles: int
    heads_in_flight: int
    chosen: int
    bound: int
    ascending: int
    descending: int
    ring: int

    @property
    def paper(self) -> int:
        """The best of the paper's three."""
        return min(self.ascending, self.descending, self.ring)


def points() -> Iterator[Point]:
    """The whole grid."""
    return itertools.starmap(Point, itertools.product(MASKS, KV_TILES, HEADS, WORKERS, HOP_PERCENT))


def row(point: Point) -> Row:
    """Time everything at a point."""
    choice = choose(point.shape, point.costs)
    assert choice.time_ns is not None
    return Row(
        point,
        choice.family,
        choice.roles,
        choice.heads_in_flight,
        choice.time_ns,
        bound(point),
        round_robin(point, "ascending"),
        round_robin(point, "descending"),
        ring(point),
    )


@lru_cache(maxsize=64)
def geometry(mask: str, n: int) -> Geometry:
    return Geometry(n * BLOCK_N, n * BLOCK_N, BLOCK_M, BLOCK_N, mask)


def bound(point: Point) -> int:
    """What no schedule can beat."""
    grid = geometry(point.mask, point.n)
    return lower_bound(grid, heads=point.heads, workers=point.workers, step_ns=STEP_NS, hop_ns=point.hop_ns)


def round_robin(point: Point, family: str) -> int:
    """Chain after chain, head after head, dealt out to the workers in turn; exact."""
    grid = geometry(point.mask, point.n)
    plan = Straddling(make(family, grid, grid.n_kv), point.heads, point.workers)
    return monotone_makespan(plan, step_ns=STEP_NS, hop_ns=point.hop_ns)


def ring(point: Point) -> int:
    """Shift and symmetric as in the paper, dealt out in turn, as if no worker ever waited for another: at best so long."""
    grid = geometry(point.mask, point.n)
    if point.mask == "full":
        return -(-point.heads * point.n // point.workers) * grid.n_q * STEP_NS
    units = -(-point.heads * -(-point.n // 2) // point.workers)
    return units * (grid.steps(0) + (grid.steps(point.n - 1) if point.n > 1 else 0)) * STEP_NS
