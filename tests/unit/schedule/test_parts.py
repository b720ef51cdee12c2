"""Chains cut into parts: who waits for whom, what is covered, and what the model says is gained."""

from __future__ import annotations

import csv
import statistics
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.block_masks.__main__ import RESULTS
from benchmarks.block_masks.grid import FEW_CHAINS, few_chains, plan_of
from benchmarks.schedules.simulator import simulate
from dash_inductor.devices.cost_files import load_costs
from dash_inductor.schedule import Geometry
from dash_inductor.schedule.parts import FEW_CHAINS as MOST
from dash_inductor.schedule.parts import WHOLE, PartCosts, Parts, RunTimeParts, _tickets, part_makespan, parts_for

from .strategies import block_masks

ANY_PARTS = st.builds(Parts, st.integers(1, 6), st.integers(1, 3))


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 6))
def test_the_band_falls_as_the_kv_tile_rises(q_blocks: int, kv_blocks: int, bands: int) -> None:
    """And rises with the Q tile: so a part's tiles follow one another in its chain."""
    parts = Parts(bands)
    seen = [[parts.band(i, j, q_blocks, kv_blocks) for i in range(q_blocks)] for j in range(kv_blocks)]
    assert all(row == sorted(row) for row in seen)
    assert all(list(column) == sorted(column, reverse=True) for column in zip(*seen, strict=True))
    places = parts.kv_tiles_of_bands(kv_blocks, 1)
    assert all(j < places[band] for j, row in enumerate(seen) for band in row)


@given(block_masks(), ANY_PARTS, st.integers(1, 3))
def test_whoever_waits_waits_for_lower_tickets(g: Geometry, parts: Parts, kv_heads: int) -> None:
    """For the chains before it at a dQ tile, and for the parts of its own chain before it."""
    ticket = {unit: place for place, unit in enumerate(_tickets(g.n_kv, kv_heads, parts))}
    assert len(ticket) == parts.units(kv_heads, g.n_kv, 1)
    of_tile = {(i, j): parts.band(i, j, g.n_q, g.n_kv) for j in range(g.n_kv) for i in g.tiles(j)}
    for head in range(kv_heads):
        for of_set in range(parts.sets):
            for (i, j), band in of_tile.items():
                own = ticket[head, j, band, of_set]
                assert all(ticket[head, k, of_tile[i, k], of_set] < own for k in g.contributors(i) if k > j)
    for head, j, band, of_set in ticket:
        own = ticket[head, j, band, of_set]
        before = [place for (x, k, *unit), place in ticket.items() if (x, k) == (head, j) and unit < [band, of_set]]
        assert all(place < own for place in before)


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 6), st.integers(1, 4))
def test_a_band_ends_with_whole_blocks(n_kv: int, kv_tiles: int, bands: int, sets: int) -> None:
    parts = Parts(bands, sets)
    of_bands = parts.kv_tiles_of_bands(n_kv, kv_tiles)
    assert of_bands[0] >= n_kv and all(tiles % kv_tiles == 0 for tiles in of_bands)
    assert parts.units(2, n_kv, kv_tiles) == 2 * sets * sum(min(n_kv, tiles) for tiles in of_bands)


@given(block_masks(), st.integers(1, 3), st.integers(1, 8), st.integers(0, 3))
def test_whole_chains_take_what_the_simulator_says(g: Geometry, kv_heads: int, workers: int, hop: int) -> None:
    plan = plan_of("spt", g, kv_heads)
    simulated = simulate(plan, compute_ns=1, reduce_ns=0, sync_ns=hop, resident=workers).makespan_ns
    assert part_makespan(g, kv_heads, 1, WHOLE, workers, PartCosts(hop, 0, 0, 0)) == simulated


@given(st.integers(1, 3), st.integers(1, 12), st.integers(1, 40))
def test_work_is_covered_once(kv_heads: int, group: int, n: int) -> None:
    """One worker takes all of it, one step after the other."""
    g = Geometry(n, n, 1, 1, "causal")
    parts = parts_for(kv_heads, group, n)
    assert part_makespan(g, kv_heads, group, parts, 1, PartCosts(0, 0, 0, 0)) == kv_heads * group * n * (n + 1) // 2


@given(st.integers(1, 600), st.integers(1, 128), st.integers(1, 600))
def test_how_many_parts(kv_heads: int, group: int, n_kv: int) -> None:
    parts = parts_for(kv_heads, group, n_kv)
    assert group % parts.sets == 0 and (parts.sets in (1, group) or min(8 * kv_heads, kv_heads * n_kv) * parts.sets >= 128)
    assert parts == WHOLE if kv_heads * n_kv > MOST else (parts.bands > 1) == (kv_heads * n_kv * parts.sets >= 192)
    at_run_time = [RunTimeParts(group, 128, 2)(index, 128 * n_kv, kv_heads) for index in range(3)]
    assert at_run_time == [parts.bands, parts.sets, parts.units(kv_heads, n_kv, 2)]


@pytest.mark.parametrize(("kernel", "head_dim"), [("gluon", 64), ("gluon", 128), ("triton", 128)])
def test_parts_of_short_sequences_are_nearly_the_best(kernel: str, head_dim: int) -> None:
    """From 512 to 4,096 positions, by the costs of an H200: of no bands, two and four, and any sets. Whole chains are 26 to
    40 % slower than the best on average."""
    rows = 128 if head_dim == 64 else 64
    costs = load_costs("h200", block_m=rows, block_n=128, head_dim=head_dim, kernel=kernel, mask="causal")
    priced = PartCosts.of(costs)
    taken, whole = [], []
    for length, kv_heads, group in product((512, 1024, 2048, 4096), (2, 8, 16, 32), (1, 4)):
        g = Geometry(length, length, rows, 128, "causal")
        sets = [sets for sets in range(1, group + 1) if group % sets == 0]
        times = {
            parts: part_makespan(g, kv_heads, group, parts, costs.workers, priced)
            for parts in (Parts(*found) for found in product((1, 2, 4), sets))
        }
        best = min(times.values())
        taken.append(times[parts_for(kv_heads, group, g.n_kv)] / best)
        whole.append(times[WHOLE] / best)
    assert statistics.fmean(taken) < 1.03 and max(taken) < 1.3 and statistics.fmean(whole) > 1.2


def test_few_chains_take_fifteen_percent_more_than_the_work_shared_out() -> None:
    """On average, where they took 42 % more; waits, prologues, sums and empty tickets are priced."""
    with (RESULTS / "few_chains.csv").open() as file:
        lines = [{name: float(value) for name, value in line.items()} for line in csv.DictReader(file)]
    assert statistics.fmean(line["in_parts"] for line in lines) <= 1.15 < 1.4 < statistics.fmean(line["whole"] for line in lines)
    assert all(line["in_parts"] <= line["whole"] for line in lines)
    for sizes, line in list(zip(FEW_CHAINS, lines, strict=True))[:2]:
        assert few_chains(*sizes) == line


def test_no_mask_of_the_grid_takes_longer_in_parts() -> None:
    with (RESULTS / "block_masks.csv").open() as file:
        assert all(int(line["in_parts"]) <= int(line["whole"]) for line in csv.DictReader(file))
